"""Tables are read as the standard library reads them, or refused by line; from any record on."""

from __future__ import annotations

import csv
import gzip
import io
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from input_helpers import codes, read_all_ways, read_bytes, source_of, zstd
from run_helpers import MODEL, JobMaker

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode, UsageError
from batchgen.input.formats import delimited
from batchgen.plan.dry_run import make_plan, render_plan

CELLS = ["", " ", "a", "2", "é", "日本😀", "\0", '"', '""', 'say "hi"', "a,b", "a\tb", "a;b", "two\nlines"]
CELLS += ["two\r\nlines", "\n", '\r"', "\ufeff", "\x85\u2028", "x" * 300, '","', "'"]


def table(rng: random.Random, num_columns: int) -> tuple[bytes, str]:
    """A file and its delimiter."""
    delimiter = rng.choice(",,\t;¦")
    text = io.StringIO(newline="")
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    writer = csv.writer(text, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]), quoting=quoting)
    writer.writerow(f"{rng.choice(['c', 'é', 'a b', 'two|'])}{number}" for number in range(num_columns))
    writer.writerows([rng.choice(CELLS) for _ in range(num_columns)] for _ in range(rng.randrange(12)))
    content = rng.choice([b"", b"\xef\xbb\xbf"]) + text.getvalue().encode()
    return (content.rstrip(b"\r\n") if rng.random() < 0.3 else content), delimiter


def in_the_library(content: bytes, delimiter: str, *, strict: bool = False) -> list[dict[str, str]]:
    """What the standard library reads, up to what it cannot."""
    stream = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="\n" if strict else "")
    rows: list[Any] = []
    with suppress(csv.Error, UnicodeDecodeError):
        rows.extend(csv.DictReader(stream, delimiter=delimiter, strict=strict))
    return rows


def named(delimiter: str) -> dict[str, str]:
    return {} if delimiter in ",\t" else {"delimiter": delimiter}


@pytest.mark.parametrize("seed", range(300))
def test_a_table_is_read_as_the_library_reads_it_from_any_record_on(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    content, delimiter = table(rng, 10_000 if seed % 100 == 99 else rng.randrange(1, 8))
    suffix, pack = rng.choice([("", bytes), (".gz", gzip.compress), (".zst", zstd)])
    path = tmp_path / f"rows.{'tsv' if delimiter == chr(9) else 'csv'}{suffix}"
    path.write_bytes(pack(content))
    rows = read_all_ways(path, **named(delimiter))
    assert [row.columns for row in rows if row.error is None] == in_the_library(content, delimiter)
    assert len(codes(rows)) == codes(rows).count("ok")


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_table_is_read_as_far_as_the_library_can_and_refused_by_line_behind(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    content, delimiter = table(rng, rng.randrange(2, 5))
    head, _, body = content.partition(b"\n")
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(body) + 1)
        junk = rng.choice([b'"', b"\x81", b"\n", b"\r", b"\0", b'""', delimiter.encode(), b"\x90", b" "])
        body = body[:place] + junk + body[place + rng.randrange(3) :]
    path = tmp_path / "rows.csv"
    path.write_bytes(head + b"\n" + body)
    rows = read_all_ways(path, delimiter=delimiter)
    whole = [
        row for row in in_the_library(path.read_bytes(), delimiter, strict=True) if None not in [*row, *row.values()]
    ]
    found = [row.columns for row in rows if row.error is None]
    assert all(row in found for row in whole)
    assert sum(row.after.offset > 0 for row in rows) == len(rows)
    assert set(codes(rows)) <= {"ok", "bad_type", "bad_encoding"}


ROW = b'1,"two\nlines"\n'
BROKEN = {
    b"1\n": ("bad_type", "the row has 1 cell, and the header has 2"),
    b"1,2,3\n": ("bad_type", "the row has 3 cells, and the header has 2"),
    b"1,\xff\n": ("bad_encoding", "not UTF-8: invalid start byte at byte 3 of line 4"),
    b'1,"a\nb\xe6"\n': ("bad_encoding", "not UTF-8: invalid continuation byte at byte 2 of line 5"),
    b'1,"a"b\n': (
        "bad_type",
        "a cell continues after its closing quote (a quote in a cell is written twice), in line 4",
    ),
    b"1,a\rb\n": ("bad_type", "a cell without quotes has a carriage return, in line 4"),
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_row_is_an_error_row_with_its_line_and_costs_no_other(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n" + ROW + line + b"\n" + ROW)
    rows = read_all_ways(path)
    code, message = BROKEN[line]
    assert codes(rows) == ["ok", code, "ok"]
    assert [row.line for row in rows] == [2, 4, 5 + line.count(b"\n")]
    assert rows[1].error
    assert rows[1].error.message.startswith(message)
    assert (rows[1].text or "").encode() == line.replace(b"\xff", b"\\xff").replace(b"\xe6", b"\\xe6").rstrip()


SWALLOWED = {
    "closed by the next row's quote": (b'1,2\n"3,4\n5,6\n"7",8\n9,10\n', "in line 5; it begins in line 3; the 2 lines"),
    "opened in a row of several lines": (b'1,2\n"3\n4","5\n6,7\n8,9\n', "line 4: a quote is never closed; the 2 lines"),
    "behind a quote written twice": (b'1,2\n"a""\nb","c\n6,""\n8,9', "line 4: a quote is never closed; the 2 lines"),
    "in the last line": (b'1,2\n3,"4', "line 3: a quote is never closed"),
    "in the line before": (b'1,2\n3,"4\n5,6\n', "line 3: a quote is never closed; the 1 line after it was not read"),
    "too many lines": (b'1,2\n3,"4\n' + b"5,6\n" * 50, "line 3: is a quote never closed?; the 50 lines"),
    "too few cells": (b'1,2\n"3,4\n5,6"\n', "the row has 1 cell, and the header has 2, in lines 3 to 4"),
}


@pytest.mark.parametrize("case", SWALLOWED)
def test_a_row_that_took_the_lines_of_others_says_where_and_how_many(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "MAX_ROW_LINES", 20)
    content, message = SWALLOWED[case]
    errors = [row.error for row in read_bytes(tmp_path, b"a,b\n" + content, "rows.csv") if row.error]
    assert len(errors) == 1
    assert message in errors[0].message


def test_a_run_and_a_plan_repeat_that_a_quote_has_taken_the_rest(job: JobMaker) -> None:
    path = job.folder / "rows.csv"
    path.write_bytes(b'a,b\n1\n1,2\n3,4\n5,"broken\n' + b"6,7\n" * 1995)
    spec = job.spec(input={"path": [str(path)], "prompt": "{a}", "id": None})
    message = "line 5: a quote is never closed; the 1,995 lines after it were not read as rows"
    outcome = job.run(spec)
    assert outcome.exit_code == ExitCode.ROWS_FAILED
    assert f"warning: {path}, {message}" in outcome.lines
    assert message in " ".join(render_plan(make_plan(spec)).split())


@pytest.mark.parametrize("cell", [b"x" * 5000, b'"' + b'""\n,' * 2000 + b'"', b'"' + b"x" * 2998 + b'"'])
def test_a_row_beyond_the_limit_is_one_error_row_that_is_not_kept(
    cell: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 3000)
    monkeypatch.setattr(delimited, "_SKIP_BYTES", 7)
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n1,2\n3," + cell + b"\n4,5\n")
    rows = read_all_ways(path)
    assert codes(rows) == ["ok", "too_long", "ok"]
    assert rows[1].error and len(rows[1].text or "") <= 1000
    assert rows[2].line == 4 + cell.count(b"\n")
    path.write_bytes(b"a,b\n1,2\n3," + cell)
    assert codes(read_all_ways(path)) == ["ok", "too_long"]


@pytest.mark.slow
def test_a_cell_of_50_megabytes_is_read_and_one_of_200_refused_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("wb") as file:
        file.write(b"a,b\n1,2\n")
        for number in (50, 200):
            file.write(b'"')
            for _ in range(number):
                file.write(b"x" * ((1 << 20) - 1) + b"\n")
            file.write(b'",3\n')
        file.write(b"4,5\n")
    rows = list(source_of(tmp_path / "rows.csv").read())
    assert codes(rows) == ["ok", "ok", "too_long", "ok"]
    assert rows[1].error is None and len(rows[1].columns["a"]) == 50 << 20
    assert rows[3].line == 3 + 51 + 201


REFUSED = {
    "one name twice": (b"a,b,a\n1,2,3\n", {}, "line 1, the header: two columns are named 'a'"),
    "an unnamed one's name": (b"column_2,\n", {}, "two columns are named 'column_2'"),
    "quotes": (b'a,"b\n1,2\n', {}, "the header: line 1: a quote is never closed; the 1 line"),
    "a line of Excel": (b"sep=;\r\na;b\r\n1;2\r\n", {}, "delete this line and give --delimiter ';'"),
    "a line of Excel that names a tab": (b"sep=\t\r\na\tb\r\n1\t2\r\n", {}, "mark of the delimiter: delete this line"),
    "no UTF-8": (b"\na,\xff\n1,2\n", {}, "line 2, the header: not UTF-8"),
    "two delimiters": (b"a,b\n", {"delimiter": ",,"}, "must be one character"),
    "a quote": (b"a,b\n", {"delimiter": '"'}, "must be one character"),
    "a delimiter of lines": (b"a,b\n", {"delimiter": ";", "format": "jsonl"}, "input.delimiter applies to CSV"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_without_a_sound_header_is_refused_in_one_line(what: str, job: JobMaker) -> None:
    content, keys, message = REFUSED[what]
    path = job.folder / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        job.run(job.spec(input={"path": [str(path)], "prompt": "{a}", "id": None, **keys}))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", 'Nr;"Betrag, netto";Text\n1;"2,5";Why?\n'), ("a.tsv", "Nr;Text\n1;Why?\n")]
)
def test_a_table_whose_delimiter_was_not_found_is_refused_with_it(name: str, content: str, job: JobMaker) -> None:
    (job.folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"columns found: .*; if ; separates them, give --delimiter ';'$"):
        job.run(job.spec(input={"path": [str(job.folder / name)], "prompt": "{Text}", "id": None}))


@pytest.mark.parametrize("content", [b"PK\x03\x04\x14\x00", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"])
def test_a_workbook_is_refused_with_its_remedy(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "sheet.xlsx").write_bytes(content)
    for words in (
        ["run", str(path), "-m", str(MODEL), "-p", "{a}"],
        ["plan", str(path), "-m", str(MODEL), "-p", "{a}"],
    ):
        assert call(words) == 2
        assert f"{path} is an Excel workbook: save it as CSV" in capsys.readouterr().err
    assert call(["help", "xlsx"]) == 0
    assert "save a workbook as CSV" in capsys.readouterr().out


HEADERS: dict[str, tuple[bytes, dict[str, Any], list[dict[str, str]]]] = {
    "rows.csv": (b"a\n", {}, []),
    "empty.csv": (b"", {}, []),
    "blank.csv": (b"\xef\xbb\xbf\r\n\n", {}, []),
    "index.csv": (b",a\r\n\r\n0,x\r\n", {}, [{"column_1": "0", "a": "x"}]),
    "tabs.csv": (b'"a"\tb\n1\t2,3\n', {}, [{"a": "1", "b": "2,3"}]),
    "commas.tsv": (b"a,b\tc\n1\t2\n", {}, [{"a,b": "1", "c": "2"}]),
    "one.tsv.gz": (gzip.compress(b"a\n1,2\n"), {}, [{"a": "1,2"}]),
    "stdin": (b"a\tb\n1\t2\n", {"format": "csv"}, [{"a": "1", "b": "2"}]),
    "semicolons.csv": (b"a;b\n1;2,5\n", {}, [{"a": "1", "b": "2,5"}]),
    "bars.csv": (b"a|b\n1|2;3\n", {}, [{"a": "1", "b": "2;3"}]),
    "both.csv": (b"a;x,b\n1,2\n", {}, [{"a;x": "1", "b": "2"}]),
    "quoted.csv": (b'"a;b"\n1\n', {}, [{"a;b": "1"}]),
    "rows.txt": (b"a;b\n1;2\n", {"delimiter": ";"}, [{"a": "1", "b": "2"}]),
    "one;name.csv": (b"a;b\n1\n", {"delimiter": ","}, [{"a;b": "1"}]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_header_says_the_columns_and_name_or_header_the_delimiter(name: str, tmp_path: Path) -> None:
    content, keys, expected = HEADERS[name]
    rows = read_bytes(tmp_path, content, name, **keys)
    assert [row.columns for row in rows if row.error is None] == expected

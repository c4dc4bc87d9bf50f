"""Text in other encodings than UTF-8: read as said, refused with the encoding that would read it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from input_helpers import codes, read_bytes, source_of
from run_helpers import JobMaker

from batchgen.core.errors import UsageError

TEXT = "name;Wort\r\nJürgen;Größe „A“\r\nZoë;naïve\r\n" + "x;é\r\n" * 3000


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-8-sig", "mac_roman"])
def test_a_table_is_read_in_its_encoding_from_any_row_on(name: str, is_packed: bool, tmp_path: Path) -> None:
    text = TEXT.replace("„A“", "A") if name == "latin-1" else TEXT
    content = text.encode(name)
    path = tmp_path / "rows.csv"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    source = source_of(path, encoding=name)
    rows = [row for row in source.read() if row.error is None]
    assert [row.columns["Wort"] for row in rows[:2]] == [text.split("\r\n")[1].split(";")[1], "naïve"]
    assert len(rows) == 3002
    for at in (0, 1, 1500, 3000):
        assert [row.columns for row in source.read(rows[at].after)] == [row.columns for row in rows[at + 1 :]]


def test_a_byte_that_stands_for_nothing_is_one_error_row(tmp_path: Path) -> None:
    found = read_bytes(tmp_path, b"a\n\xe9\n\x81\nb\n", "rows.csv", encoding="cp1252")
    assert codes(found) == ["ok", "bad_encoding", "ok"]
    assert found[0].error is None and found[0].columns == {"a": "é"}


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("utf-16", "\ufeffq\na\n".encode("utf-16-le") + b"\x00\xd8" + "x\nb\n".encode("utf-16-le"), [2]),
        ("utf-16-be", "q\na\nb\n".encode("utf-16-be") + b"\xdc\x0a" + "\nc\n".encode("utf-16-be"), [3]),
        ("utf-16", "q\na\nb\n".encode("utf-16") + b"a", [3]),
        ("utf-32", "q\na\n".encode("utf-32") + b"\x00\x00\x7f\x00" + "\nb\n".encode("utf-32-le"), [2]),
        ("iso-2022-jp", b"q\na\n\x1b$Z\nb\n", [2]),
        ("iso-2022-jp", b"q\na\nb\n\x1b((((((((((((", [3]),
        ("utf-7", b"q\na\n+\nb\n", [2]),
    ],
)
def test_wide_and_shifted_text_that_is_damaged_costs_its_line_only(
    name: str, content: bytes, found: list[int], tmp_path: Path
) -> None:
    rows = codes(read_bytes(tmp_path, content, "rows.csv", encoding=name))
    assert [number for number, code in enumerate(rows, 2) if code != "ok"] == [number + 1 for number in found]
    assert len(rows) > 2 and set(rows) == {"ok", "bad_encoding"}


@pytest.mark.parametrize("name", ["utf-16", "utf-32"])
def test_wide_text_without_a_mark_is_refused_with_the_encodings_that_may_read_it(name: str, tmp_path: Path) -> None:
    content = "q\na\n".encode(f"{name}-le")
    with pytest.raises(UsageError, match=f'no mark of its byte order: give "{name}-le" or'):
        read_bytes(tmp_path, content, "rows.csv", encoding=name)
    assert codes(read_bytes(tmp_path, content, "rows.csv", encoding=f"{name}-le")) == ["ok"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt"])
def test_a_file_in_cp1252_is_refused_with_the_key_that_reads_it(name: str, tmp_path: Path) -> None:
    content = "text\nJürgen\nabc\nZoë\n".encode("cp1252")
    with pytest.raises(
        UsageError, match=r"line 2, is not UTF-8: give input.encoding = \"cp1252\" .*if it has 'ü' there"
    ):
        read_bytes(tmp_path, content, name)
    assert len(read_bytes(tmp_path, content, name, encoding="cp1252")) == (3 if name == "rows.csv" else 4)


@pytest.mark.parametrize("content", [b"text\n" + b"abc\n" * 50 + b"caf\xe9\n", b"text\nabc\n\x81\n\x81\n"])
def test_single_lines_and_bytes_of_no_encoding_are_error_rows(content: bytes, tmp_path: Path) -> None:
    assert set(codes(read_bytes(tmp_path, content, "rows.csv"))) == {"ok", "bad_encoding"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"encoding": "hex"}, "must be an encoding that Python knows"),
        ({"encoding": "punycode"}, "must be an encoding that Python knows"),
        ({"encoding": "undefined"}, "must be an encoding that Python knows"),
        ({"encoding": "utf-99"}, "must be an encoding that Python knows"),
        ({"encoding": "cp1252", "format": "parquet"}, "input.encoding applies to text only"),
    ],
)
def test_what_is_no_encoding_is_refused(keys: dict[str, str], said: str, job: JobMaker) -> None:
    job.write([{"id": 1, "question": "a"}])
    with pytest.raises(UsageError, match=said):
        job.run(job.spec(input=keys))


def test_utf_8_by_any_name_is_no_other_encoding(job: JobMaker) -> None:
    assert job.spec(input={"encoding": "UTF8"}).input.encoding is None

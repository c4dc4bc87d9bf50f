"""Text in other encodings than UTF-8: read as said, refused with the encoding that would read it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from input_helpers import codes, read_bytes, source_of
from run_helpers import JobMaker

from batchgen.core.errors import UsageError
from batchgen.core.records import Record

TEXT = "name;Wort\r\nJürgen;Größe „A“\r\nZoë;naïve\r\n" + "x;é\r\n" * 3000


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-8-sig", "mac_roman"])
def test_a_table_is_read_in_its_encoding_from_any_row_on(name: str, is_packed: bool, tmp_path: Path) -> None:
    text = TEXT.replace("„A“", "A") if name == "latin-1" else TEXT
    content = text.encode(name)
    path = tmp_path / "rows.csv"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    source = source_of(path, encoding=name)
    rows = [row for row in source.read() if isinstance(row, Record)]
    assert [row.columns["Wort"] for row in rows[:2]] == [text.split("\r\n")[1].split(";")[1], "naïve"]
    assert len(rows) == 3002
    for at in (0, 1, 1500, 3000):
        assert [row.columns for row in source.read(rows[at].after)] == [row.columns for row in rows[at + 1 :]]


def test_a_byte_that_stands_for_nothing_is_one_error_row(tmp_path: Path) -> None:
    found = read_bytes(tmp_path, b"a\n\xe9\n\x81\nb\n", "rows.csv", encoding="cp1252")
    assert codes(found) == ["ok", "bad_encoding", "ok"]
    assert isinstance(found[0], Record) and found[0].columns == {"a": "é"}


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt"])
def test_a_file_in_cp1252_is_refused_with_the_key_that_reads_it(name: str, tmp_path: Path) -> None:
    content = "text\nJürgen\nabc\nZoë\n".encode("cp1252")
    with pytest.raises(
        UsageError, match=r"line 2, is not UTF-8: give input.encoding = \"cp1252\" .*if 'ü' stands there"
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
        ({"encoding": "utf-99"}, "must be an encoding that Python knows"),
        ({"encoding": "cp1252", "format": "parquet"}, "input.encoding is of text"),
    ],
)
def test_what_is_no_encoding_is_refused(keys: dict[str, str], said: str, job: JobMaker) -> None:
    job.write([{"id": 1, "question": "a"}])
    with pytest.raises(UsageError, match=said):
        job.run(job.spec(input=keys))


def test_utf_8_by_any_name_is_no_other_encoding(job: JobMaker) -> None:
    assert job.spec(input={"encoding": "UTF8"}).input.encoding is None

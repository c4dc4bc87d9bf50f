"""Files that are packed, padded, encoded or laid out as no reader expects: read whole, or refused with the way out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest
from input_helpers import codes, read_bytes, source_of, zstd
from run_helpers import JobMaker

from batchgen.core.errors import ExitCode, InputError, UsageError
from batchgen.input.formats import delimited

ROWS = [{"n": number, "text": f"row {number}"} for number in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def skippable(size: int, number: int = 0) -> bytes:
    """A frame of zstd that holds none of the content, as pzstd writes them."""
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + size.to_bytes(4, "little") + b"x" * size


@pytest.mark.parametrize("name", ["rows.jsonl.zst", "rows.jsonl", "rows"])
@pytest.mark.parametrize(
    "content",
    [
        skippable(4) + zstd(LINES),
        skippable(0, 15) + skippable(9, 3) + zstd(LINES[:99]) + skippable(4) + zstd(LINES[99:]),
        zstd(LINES) + skippable(4),
    ],
)
def test_skippable_frames_are_no_content_wherever_they_stand(name: str, content: bytes, tmp_path: Path) -> None:
    found = read_bytes(tmp_path, content, name)
    assert [row.columns for row in found] == ROWS


@pytest.mark.parametrize(
    "behind",
    [bytes(511), b"garbage", gzip.compress(LINES)[:-9]],
    ids=["zeros", "text", "a member cut short"],
)
def test_what_else_stands_behind_a_gzip_file_is_one_failed_row(behind: bytes, tmp_path: Path) -> None:
    found = read_bytes(tmp_path, gzip.compress(LINES) + behind, "rows.jsonl.gz")
    assert codes(found)[-1] == "bad_encoding" and len(found) >= 301


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows", "rows.txt.gz"])
@pytest.mark.parametrize("kind", ["bzip2", "xz", "lz4", "zip"])
def test_other_compressions_are_refused_by_name_whatever_the_file_is_called(
    kind: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "packed"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("rows.jsonl", LINES)
    else:
        pack = {"bzip2": bz2.compress, "xz": lzma.compress, "lz4": lambda text: b"\x04\x22\x4d\x18" + text}[kind]
        path.write_bytes(pack(LINES))
    with pytest.raises(UsageError, match=rf"is compressed by {kind}, which cannot be read; (unpack|recompress)"):
        read_bytes(tmp_path, path.read_bytes(), name)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (json.dumps(ROWS, indent=2), r"'\.\[\]'"),
        (json.dumps(ROWS), r"'\.\[\]'"),
        (json.dumps(ROWS * 300), r"'\.\[\]'"),  # of more than is looked at
        ("[" + ",\n".join(map(json.dumps, ROWS)) + "]", r"'\.\[\]'"),
        ("\ufeff\n [\r\n" + ",\r\n".join(map(json.dumps, ROWS)) + "]", r"'\.\[\]'"),
        ("\n".join(json.dumps(row, indent=1) for row in ROWS), r"\."),
        (json.dumps(ROWS[:2]) + "\n" + json.dumps(ROWS[2:]), r"'\.\[\]'"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.ndjson.gz"])
def test_json_that_is_no_json_lines_is_refused_with_the_command_that_makes_lines(
    text: str, program: str, name: str, tmp_path: Path
) -> None:
    content = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    with pytest.raises(
        UsageError, match=rf"not JSON Lines.*: jq -c {program} FILE > NEW_FILE.jsonl|jq -c '\.\[\]' FILE"
    ):
        read_bytes(tmp_path, content, name)


@pytest.mark.parametrize("first", [b"[1, 2]", b'[{"a": 1}]', b'{"a": 1', b"[1, 2", b"{}"])
def test_a_bad_line_before_good_ones_costs_no_more_than_itself(first: bytes, tmp_path: Path) -> None:
    found = read_bytes(tmp_path, first + b"\n" + LINES, "rows.jsonl")
    assert [row.columns for row in found[1:]] == ROWS


def test_a_quote_that_is_never_closed_over_short_lines_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "MAX_ROW_LINES", 50)
    content = b'p,q\na,"1\n2"\nb,"' + b"x\n" * 1000 + b'"\nc,3\n'
    found = read_bytes(tmp_path, content, "rows.csv")
    assert codes(found) == ["ok", "too_long", "ok"]
    assert [row.line for row in found] == [2, 4, 1005]
    assert codes(read_bytes(tmp_path, b'p,q\nb,"' + b"x\n" * 1000, "rows.csv")) == ["too_long"]


def test_the_lines_of_a_table_row_are_kept_as_their_bytes_alone(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "rows.csv").write_bytes(b'p,q\nb,"' + b"x\n" * 90_000 + b'"\n')
    tracemalloc.start()
    try:
        assert len([*source_of(tmp_path / "rows.csv").read()]) == 1
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # 80 bytes for each line would be more
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("values", [(1, "n/a"), (1, {"a": 1})])
def test_files_of_a_dataset_that_do_not_agree_are_refused_for_good_with_the_way_to_read_them(
    values: tuple[object, object], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, value in enumerate(values):
        lines = "".join(json.dumps({"prompt": "a", "score": value}) + "\n" for _ in range(400))
        (folder / f"part{number}.jsonl").write_text(lines)
    source = source_of(f"hf:{folder}")
    with pytest.raises(InputError, match=r"must agree on the types.*name its files in input\.path") as caught:
        list(source.read())
    assert caught.value.exit_code == ExitCode.USAGE and "run the same command again" not in str(caught.value)


def tar_of(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        member = tarfile.TarInfo("rows.txt")
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv", "rows.jsonl", "rows"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n".encode("utf-16-le"), "UTF-16 text: give input.encoding = .utf-16le. .--encoding utf-16le"),
        ("a,b\n1,2\n".encode("utf-16-be"), "UTF-16 text: give input.encoding = .utf-16be. .--encoding utf-16be"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16 text: give input.encoding = .utf-16."),
        ("a,b\n1,2\n".encode("utf-32-le"), "UTF-32 text: give input.encoding = .utf-32le. .--encoding utf-32le"),
        ("東京,b\n1,大阪\n".encode("utf-32-le"), "UTF-32 text: give input.encoding = .utf-32le. .--encoding utf-32le"),
        ("東京,b\n1,大阪\n".encode("utf-32-be"), "UTF-32 text: give input.encoding = .utf-32be. .--encoding utf-32be"),
        ("a,b\n1,2\n".encode("utf-32"), "UTF-32 text: give input.encoding = .utf-32."),
        (b"a,b\r1,2\r3,4\r", "end with CR alone; convert it: tr '.r' '.n'|a cell without quotes has a carriage return"),
        (tar_of(b"a\nb\n"), "is a tar archive, which cannot be read; unpack it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n", "pointer of Git LFS.*git lfs pull"),
    ],
)
def test_what_would_pass_as_lines_of_text_is_refused_by_name(
    content: bytes, said: str, name: str, tmp_path: Path
) -> None:
    for packed in (content, gzip.compress(content)):
        with pytest.raises(UsageError, match=said):
            read_bytes(tmp_path, packed, name)


@pytest.mark.parametrize(
    "content",
    [b"one line", b"one line\r", b"one\rtwo\r\nthree\r\n", b"a\0\nb\n", b"a\0\0\n" * 9 + b"b" * 9, bytes(64), b"x"],
)
def test_lines_with_odd_bytes_among_them_are_still_lines(content: bytes, tmp_path: Path) -> None:
    assert set(codes(read_bytes(tmp_path, content, "rows.txt"))) == {"ok"}


# ---------------------------------------------------------------- encodings


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

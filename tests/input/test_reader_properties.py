"""Whatever the bytes, the reader loses no neighbour, raises nothing but UsageError, and resumes from any row."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_runs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_inputs import SOUND, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_helpers import FORMATS, as_text, codes, read_all_ways, source_of, zstd
from repeats import share_of
from run_helpers import ENVIRONMENT, survived

from batchgen.core.errors import UsageError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
GOOD_LINES = OBJECTS.map(lambda value: json.dumps(value).encode())
JUNK_LINES = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")) | st.sampled_from(
    [b"", b" ", b"\r", b"\xef\xbb\xbf{}", b"{", b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[]", b"\0\0", b"null"]
)
LINES = st.lists(GOOD_LINES | JUNK_LINES, max_size=12)
any_file = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# Without lines in cells, so that the line of each row is known.
TEXTS = st.text("aé \t,;\"'|\x85\u2028日😀", min_size=1, max_size=9)
ITEMS = st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=2)
TABLES = st.lists(
    st.fixed_dictionaries({"id": TEXTS, "prompt": TEXTS.filter(str.strip), "nested": ITEMS}), min_size=1, max_size=12
)


@pytest.mark.parametrize("form", FORMATS)
@settings(any_file, max_examples=10)
@given(rows=TABLES, limit=st.integers(1, 14))
def test_any_table_written_in_any_format_is_read_as_the_same_rows_from_any_row_on(
    form: str, rows: list[dict[str, Any]], limit: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = FORMATS[form](rows, Path(name))
        read = read_all_ways(path)
        texts = {"txt": [{"text": row["prompt"]} for row in rows], "csv": as_text(rows), "tsv.gz": as_text(rows)}
        assert [row.columns for row in read if row.error is None] == texts.get(form, rows)
        half = len(rows) // 2
        lines = [*range(1, half + 1), *range(1, len(rows) - half + 1)] if form == "parts" else range(1, len(rows) + 1)
        assert [row.line - ("sv" in form) for row in read] == [*lines]
        limited = source_of(path, limit=limit)
        assert list(limited.read()) == read[:limit]
        assert list(limited.read(read[0].after)) == read[1:limit]
        for source, num_rows in ((source_of(path), len(rows)), (limited, min(limit, len(rows)))):
            assert source.num_rows() in (num_rows, *[None] * (form not in ("parquet", "saved dataset")))


@any_file
@given(lines=LINES, end=st.sampled_from([b"\n", b"\r\n"]), has_end=st.booleans(), has_mark=st.booleans())
def test_every_line_that_is_not_blank_is_one_row_whatever_its_neighbours(
    lines: list[bytes], end: bytes, has_end: bool, has_mark: bool, folder: Path
) -> None:
    lines = [b"{}", *lines]  # a file is known by its first bytes, which here say "JSON"
    content = end.join(lines) + (end if has_end else b"")
    (folder / "rows.jsonl").write_bytes((b"\xef\xbb\xbf" if has_mark else b"") + content)
    rows = read_all_ways(folder / "rows.jsonl")
    expected = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert [row.line for row in rows] == [number for number, _ in expected] and rows[0].error is None
    for row, (_, line) in zip(rows, expected, strict=True):
        if row.error is None:
            assert repr(row.columns) == repr(json.loads(line))
        else:
            assert row.error.code in ("bad_json", "bad_type", "bad_encoding")


@any_file
@given(content=st.binary(max_size=300), form=st.sampled_from(["jsonl", "text", "auto", "openai-batch"]))
def test_any_bytes_are_rows_or_one_clear_line(content: bytes, form: str, folder: Path) -> None:
    (folder / "any").write_bytes(content)
    try:
        read_all_ways(folder / "any", format=form)
    except UsageError as error:
        assert "\n" not in str(error)


@settings(any_file, max_examples=60)
@given(
    objects=st.lists(OBJECTS, min_size=1, max_size=20), data=st.data(), compress=st.sampled_from([gzip.compress, zstd])
)
def test_a_file_cut_off_while_compressed_costs_nothing_before_the_cut(
    objects: list[dict[str, Any]], data: st.DataObject, compress: Callable[[bytes], bytes], folder: Path
) -> None:
    lines = [json.dumps(item).encode() + b"\n" for item in objects]
    content = bytearray(compress(b"".join(lines)))
    place = data.draw(st.integers(4, len(content) - 1))
    intact = b""
    if data.draw(st.booleans()):
        del content[place:]
        if compress is gzip.compress:  # a zstd block is whole or lost, and these files have one
            intact = zlib.decompressobj(31).decompress(content)
    else:  # a changed byte costs what is decompressed in one go with it, which is all of these files
        content[place] ^= data.draw(st.integers(1, 255))
    (folder / "rows.jsonl").write_bytes(content)
    rows = read_all_ways(folder / "rows.jsonl")
    before = intact.count(b"\n")
    if intact:
        assert codes(rows) == ["ok"] * before + ["bad_encoding"] and "damaged" in str(rows[-1].error)
    assert [repr(row.columns) for row in rows[:before] if row.error is None] == [
        repr(json.loads(line)) for line in lines[:before]
    ]


@settings(any_file, max_examples=60)
@given(objects=st.lists(VALUES, min_size=1, max_size=30), data=st.data(), checksum=st.booleans())
def test_a_damaged_parquet_file_has_all_its_rows_or_is_refused(
    objects: list[Any], data: st.DataObject, checksum: bool, folder: Path
) -> None:
    table = pa.table({"n": range(len(objects)), "value": [json.dumps(item) for item in objects]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=7, write_page_checksum=checksum)
    content = bytearray((folder / "rows.parquet").read_bytes())
    for place in data.draw(st.lists(st.integers(4, len(content) - 1), max_size=3)):
        content[place] ^= data.draw(st.integers(1, 255))
    (folder / "rows.parquet").write_bytes(content)
    try:
        read_all_ways(folder / "rows.parquet", format="parquet")
    except UsageError as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- hostile inputs


SEED = 19
NUM_CASES = share_of(320)


def attack(folder: Path, count: int, seed: int) -> Counter[str]:
    """How many cases of each kind were run; fails the test with those that broke a promise."""
    return Counter(survived(hostile_runs.__file__, folder, count, seed)["kinds"])


@pytest.mark.slow
def test_hundreds_of_hostile_inputs_end_in_their_exit_codes_with_each_row_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = attack(tmp_path, NUM_CASES, SEED)
    with capsys.disabled():
        print(f"\nhostile inputs: {dict(kinds)}; {kinds.total()} in all", end=" ")
    assert kinds.total() == NUM_CASES


JOB = """
[model]
path = "{model}"
[input]
path = "in.jsonl.gz"
prompt = "question"
[sampling]
max_tokens = 4
[output]
path = "out"
"""

ONE_CASE = """
import json, sys
from pathlib import Path
import hostile_runs
from hostile_inputs import Case
print(json.dumps(hostile_runs.run(Case("bomb", b""), Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_a_small_file_that_unpacks_to_a_line_of_800_megabytes_is_an_error_row_in_bounded_memory(tmp_path: Path) -> None:
    sound = json.dumps(SOUND).encode() + b"\n"
    block = b"a" * (64 << 20)
    folder = tmp_path / "case"
    case = Case("bomb", JOB.encode(), num_rows=3)
    hostile_runs.prepare(case, folder)
    with gzip.open(folder / "in.jsonl.gz", "wb") as file:
        file.write(sound + b'{"question": "')
        for _ in range(12):
            file.write(block)
        file.write(b'"}\n' + sound)
    command = [sys.executable, "-c", ONE_CASE, str(folder)]  # not a fork, whose peak of memory begins at ours
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    code, said, rss_bytes = json.loads(done.stdout)
    assert code == hostile_runs.FAILED_ROWS, said
    hostile_runs.check_rows(case, folder / "out", code)
    assert rss_bytes < hostile_runs.MAX_RSS_BYTES

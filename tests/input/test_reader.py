"""Every input format gives the same rows, from any row on, and says where it stands."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import FORMATS, codes, jsonl, read_bytes, sample_rows, source_of, zstd

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.core.file_digests import Digests, file_digest
from batchgen.core.records import Cursor
from batchgen.core.units import WHOLE
from batchgen.input.formats import arrow, lines
from batchgen.input.source import RowRange, open_source

every_format = pytest.mark.parametrize("form", FORMATS)


@every_format
def test_an_edit_changes_the_fingerprint_and_a_new_modification_time_does_not(form: str, tmp_path: Path) -> None:
    prints = []
    for name, last in (("a", "question"), ("b", "edited")):
        (tmp_path / name).mkdir()
        source = source_of(FORMATS[form]([*sample_rows(7), {**sample_rows(8)[7], "prompt": last}], tmp_path / name))
        before = source.fingerprint(Digests())
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (1, 1))
        assert source.fingerprint(Digests()) == before
        prints.append([file["sha256"] for file in before["files"]])
    assert prints[0] != prints[1]


def test_no_edit_of_a_large_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 80 << 20)
    digests = {file_digest(path)}
    for place in (0, 1_234_567, 40_000_001, (80 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        digests.add(file_digest(path))
    assert len(digests) == 5


def test_the_digest_is_the_one_that_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert file_digest(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_text_line_keeps_its_white_space_and_loses_only_its_end(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path, "\ufeff  two\u2028lines \r\n\n\ttab\n".encode(), "rows.txt")
    assert [row.columns for row in rows if row.error is None] == [{"text": "  two\u2028lines "}, {"text": "\ttab"}]


def test_json_is_read_as_leniently_as_python_does_where_that_loses_nothing(tmp_path: Path) -> None:
    line = b'{"a": NaN, "b": 1, "b": 2, "c": 123456789012345678901234567890, "d": "\\u0000\\ud83d\\ude00"}\n'
    [row] = read_bytes(tmp_path, line)
    assert row.error is None
    assert row.columns["a"] != row.columns["a"]  # NaN
    assert row.columns["b"] == 2
    assert row.columns["c"] == 123456789012345678901234567890
    assert row.columns["d"] == "\0😀"


def test_a_line_of_20_megabytes_is_a_row_like_any_other(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": "x" * (20 << 20)}, {"a": 2}]
    assert [row.columns for row in read_bytes(tmp_path, jsonl(rows)) if row.error is None] == rows


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_beyond_the_limit_is_one_error_row_that_is_not_kept(
    end: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2000)
    rows = read_bytes(tmp_path, b'{"a": 1}\n{"a": "' + b"x" * 5000 + b'"}' + end)
    assert codes(rows) == ["ok", "too_long"]
    assert rows[1].error and len(rows[1].text or "") == 1000
    more = read_bytes(tmp_path, b'{"a": "' + b"x" * 5000 + b'"}\n{"a": 2}\n')
    assert codes(more) == ["too_long", "ok"]
    assert list(source_of(tmp_path / "rows.jsonl").read(more[0].after)) == more[1:]
    assert codes(read_bytes(tmp_path, b'\xef\xbb\xbf{"a": "' + b"x" * 5000 + b'"}\n{"a": 2}\n')) == codes(more)


def test_reading_goes_on_with_the_next_file_after_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(jsonl(sample_rows(3)))[:-4])
    (tmp_path / "2.jsonl").write_bytes(jsonl([{"a": 1}]))
    source = source_of(tmp_path / "*")
    rows = list(source.read())
    assert codes(rows) == ["ok"] * 3 + ["bad_encoding", "ok"]
    assert [list(source.read(row.after)) for row in rows] == [rows[n + 1 :] for n in range(5)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows", "rows.weird", "rows.jsonl.gz"])
def test_compression_and_format_are_told_by_content_whatever_the_name(name: str, tmp_path: Path) -> None:
    rows = sample_rows(3)
    for content in (jsonl(rows), gzip.compress(jsonl(rows)), zstd(jsonl(rows))):
        assert [row.columns for row in read_bytes(tmp_path, content, name) if row.error is None] == rows


def test_what_is_no_json_is_text_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    assert codes(read_bytes(tmp_path, b"one\ntwo\n", "stdin")) == ["ok", "ok"]
    assert codes(read_bytes(tmp_path, b"one\ntwo\n", "stdin", format="jsonl")) == ["bad_json", "bad_json"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows"])
def test_an_empty_file_is_an_input_of_no_rows(name: str, tmp_path: Path) -> None:
    assert read_bytes(tmp_path, b"", name) == []
    assert read_bytes(tmp_path, gzip.compress(b""), name) == []
    assert read_bytes(tmp_path, b"\n \n\r\n", name) == []


def test_a_glob_is_sorted_and_a_list_keeps_its_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(jsonl([{"file": name}]))

    def files(*names: str) -> list[str]:
        source = open_source(InputSpec(path=tuple(str(tmp_path / name) for name in names)))
        return [row.columns["file"] for row in source.read() if row.error is None]

    assert files("*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert files("c.jsonl", "[ab].jsonl") == ["c.jsonl", "a.jsonl", "b.jsonl"]
    with pytest.raises(UsageError, match=r"a\.jsonl is named twice"):
        files("a.jsonl", "*.jsonl")


def test_a_folder_gives_its_parquet_files_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", ".cache/0.parquet", "_old/0.parquet"):
        (tmp_path / name).parent.mkdir()
        pq.write_table(pa.table({"name": [name]}), tmp_path / name)
    source = source_of(tmp_path)
    assert [row.columns["name"] for row in source.read() if row.error is None] == ["a/1.parquet", "b/2.parquet"]
    assert source.paths == (tmp_path / "a/1.parquet", tmp_path / "b/2.parquet")


def test_a_row_group_without_wanted_rows_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(FORMATS["parquet"](sample_rows(9), tmp_path))
    groups = []
    read_group = pq.ParquetFile.iter_batches

    def record(self: pq.ParquetFile, *args: Any, row_groups: list[int], **options: Any) -> Any:
        groups.extend(row_groups)
        return read_group(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record)
    assert [row.index for row in source.read(wanted=lambda index: index == 7)] == [7]
    list(source.read(Cursor(0, 1, 3, 6)))
    assert {*groups} == {2}


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_(pa.string_view())], ids=str)
def test_a_part_of_the_rows_is_read_where_arrow_cannot_take_their_type(kind: pa.DataType, tmp_path: Path) -> None:
    values = [f"row {number}" for number in range(9)]
    column = values if pa.types.is_string_view(kind) else [[value] for value in values]
    pq.write_table(pa.table({"prompt": pa.array(column, kind)}), tmp_path / "rows.parquet")
    for wanted in ({1, 2, 7}, {8}, set()):
        read = source_of(tmp_path / "rows.parquet").read(wanted=wanted.__contains__)
        assert [row.columns["prompt"] for row in read if row.error is None] == [column[i] for i in sorted(wanted)]


def test_long_values_that_repeat_are_converted_a_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [letter * 100_000 for letter in "ab"]
    sizes = []
    convert = arrow.rows_at

    def recorded(batch: pa.RecordBatch, *options: Any) -> Any:
        sizes.append(batch.nbytes)
        return convert(batch, *options)

    monkeypatch.setattr(arrow, "rows_at", recorded)
    pq.write_table(pa.table({"prompt": long * 100}), tmp_path / "long.parquet")
    assert (tmp_path / "long.parquet").stat().st_size < 1_000_000, "the file's metadata say nothing of the rows' size"
    saved = datasets.Dataset.from_dict({"prompt": long * 100})
    saved.save_to_disk(str(tmp_path / "saved"))
    for name in ("long.parquet", "saved"):
        sizes.clear()
        assert len(list(source_of(tmp_path / name).read())) == 200
        assert max(sizes) < 64 * 110_000


def test_a_split_must_be_named_where_a_dataset_has_several(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(sample_rows(2))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match=r"several splits: choose one of train, test, as in 'hf:.*\?split=train'"):
        source_of(tmp_path / "d")
    with pytest.raises(UsageError, match=r"no split 'dev': choose one of train, test"):
        source_of(f"hf:{tmp_path / 'd'}?split=dev")
    assert source_of(f"hf:{tmp_path / 'd'}?split=test").num_rows() == 1


def test_images_in_a_dataset_stay_undecoded_bytes(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image()})
    table = pa.table({"image": pa.array([{"bytes": b"no image", "path": None}], features.arrow_schema.field(0).type)})
    one = datasets.Dataset(table, datasets.DatasetInfo(features=features))
    one.save_to_disk(str(tmp_path / "d"))
    [row] = source_of(tmp_path / "d").read()
    assert row.error is None and row.columns == {"image": {"bytes": b"no image", "path": None}}


def test_a_file_that_vanishes_while_it_is_used_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl(sample_rows(2)))
    source = source_of(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*rows\.jsonl: No such file"):
        list(source.read())
    with pytest.raises(UsageError, match=r"cannot read .*rows\.jsonl: No such file"):
        source.fingerprint(Digests())


def test_reading_and_prompting_import_neither_torch_nor_datasets() -> None:
    program = (
        "import sys, batchgen.input.source, batchgen.input.requests; print({'torch', 'datasets'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_folder_in_the_working_directory_never_stands_for_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "train.jsonl").write_bytes(jsonl(sample_rows(3)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"the working directory holds a folder 'org/tiny'"):
        source_of("hf:org/tiny")
    assert len(list(source_of(f"hf:{tmp_path}/org/tiny").read())) == 3


def test_the_rows_of_a_folder_of_data_are_counted_beforehand(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n" + "1,2\n" * 7, encoding="utf-8")
    source = source_of(f"hf:{tmp_path}")
    assert RowRange(source, WHOLE).count() == len(list(source.read())) == 7


CACHED_DATASET = """
import sys
from datasets.packaged_modules.json.json import Json
builder = Json(dataset_name="tiny", config_name="main", hash="abc", data_files={"test": [sys.argv[1]]})
builder.download_and_prepare(sys.argv[2])
"""
READ_DATASET = """
from batchgen.input.source import open_source
from batchgen.core.errors import UsageError
from batchgen.config.job import InputSpec
source = open_source(InputSpec(path=("hf:org/tiny?config=main",)))
rows = list(source.read())
assert list(source.read(rows[1].after)) == rows[2:]
print(source.num_rows(), [row.columns["id"] for row in rows])
try:
    open_source(InputSpec(path=("hf:org/other",)))
except UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_read_from_the_cache_when_offline(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(jsonl(sample_rows(3)))
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def run(program: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    run(CACHED_DATASET, str(tmp_path / "test.jsonl"), str(tmp_path / "datasets/org___tiny/main/0.0.0/abc"))
    rows, missing = run(READ_DATASET)
    assert rows == "3 ['q-0', 'q-1', 'q-2']"
    assert missing.startswith("cannot open hf:org/other: Couldn't reach 'org/other' on the Hub")

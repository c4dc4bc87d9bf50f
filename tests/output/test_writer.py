"""The final files: every row once, in order, in each format, readable by the tools that read such files."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from records import dead_letter, record
from run_helpers import ENVIRONMENT

from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.core.errors import BatchgenError, StorageError
from batchgen.core.file_digests import Digests
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor
from batchgen.core.units import WHOLE, Shard
from batchgen.output import finalize as finalize_module
from batchgen.output import segments
from batchgen.output.finalize import finalize
from batchgen.output.formats import parquet
from batchgen.output.journal import Counts, Journal, JournalEntry
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import JournalledJob, RunDir

Rows = Sequence[dict[str, Any]]


def journal_of(folder: Path, results: Rows, errors: Rows = ()) -> Journal:
    journal = Journal.open(folder)
    for kind, rows in (("result", results), ("error", errors)):
        for row in rows:
            index = row["index"]
            journal.append(JournalEntry(index, Cursor(0, index, 0, index + 1), kind, encode_json(row)))
    return journal


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def spec(output_format: str = "jsonl", *, chat: bool = True) -> JobSpec:
    output = OutputSpec(path="unused", format=output_format)
    return JobSpec(ModelSpec("m"), InputSpec(("in",), chat_template="auto" if chat else "none"), output)


def begun_in(run_dir: RunDir, shard: Shard = WHOLE) -> JournalledJob:
    return run_dir.begin(Manifest(spec().to_dict(), spec().output_keys(), shard=shard))


def written(
    run_dir: RunDir, results: Rows, errors: Rows = (), output_format: str = "jsonl", **options: Any
) -> list[dict[str, Any]]:
    begun = begun_in(run_dir)
    journal = journal_of(begun.folder, results, errors)
    begun = finalize(run_dir, begun, spec(output_format, **options), journal, num_rows=len(results) + len(errors))
    journal.close()
    assert begun.manifest.num_rows == len(results) + len(errors)
    assert journal.counts == Counts(len(results), len(errors))
    run_dir.finish(begun, Digests(), keeps_rows=False)
    if output_format == "parquet":
        return pq.read_table(run_dir.outputs("parquet")).to_pylist()
    return [json.loads(line) for line in run_dir.outputs(output_format).read_bytes().splitlines()]


def test_rows_come_out_in_input_order_whatever_order_they_finished_in(run_dir: RunDir) -> None:
    rows = [record(index) for index in range(50)]
    assert written(run_dir, random.Random(0).sample(rows, 50)) == rows


def test_the_output_line_is_the_record_as_a_person_would_write_it(run_dir: RunDir) -> None:
    written(run_dir, [record(0, answer="é")])
    line = run_dir.outputs("jsonl").read_text()
    assert line.startswith('{"id": "q-0", "index": 0, "fingerprint": "5eed')
    assert '5eed", "text": "ответ 0\\n", "finish_reason": "stop", "usage": {"prompt' in line
    assert line.endswith('"reused": true}, "answer": "é"}\n')


def test_dead_letters_are_in_input_order_and_none_where_no_row_failed(run_dir: RunDir) -> None:
    written(run_dir, [record(1)], [dead_letter(2), dead_letter(0)])
    assert [json.loads(line) for line in run_dir.errors.read_bytes().splitlines()] == [dead_letter(0), dead_letter(2)]
    written(run_dir, [record(0)])
    assert not run_dir.errors.exists(), "those of an earlier run"


def test_outputs_of_another_format_go_once_the_new_ones_are_there(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, had_outputs = finalize_module.commit_staged, list[bool]()
    monkeypatch.setattr(
        finalize_module, "commit_staged", lambda path: (had_outputs.append(run_dir.has_outputs()), commit(path))
    )
    for output_format in ("parquet", "jsonl", "parquet"):
        written(run_dir, [record(0)], output_format=output_format)
        assert [path.name for path in run_dir.path.glob("outputs.*")] == [run_dir.outputs(output_format).name]
    assert had_outputs == [False, True, True], "a kill leaves the folder with outputs"


def test_dead_letters_of_no_row_are_put_in_place_at_no_moment(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right after that, a run in which no row failed would be taken for one in which some did."""
    committed: list[str] = []
    commit = finalize_module.commit_staged
    monkeypatch.setattr(finalize_module, "commit_staged", lambda path: (committed.append(path.name), commit(path)))
    written(run_dir, [record(0)])
    assert committed == ["outputs.jsonl"]
    assert not (run_dir.path / ".errors.jsonl.tmp").exists()


@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai-batch"])
def test_a_job_without_rows_makes_an_empty_file(run_dir: RunDir, output_format: str) -> None:
    assert written(run_dir, [], output_format=output_format) == []
    assert run_dir.outputs(output_format).exists()


@pytest.mark.parametrize("done", [[0, 1], [0, 2], [0, 1, 2, 3]])
def test_a_missing_or_surplus_row_is_never_glossed_over(run_dir: RunDir, done: list[int]) -> None:
    begun = begun_in(run_dir)
    journal = journal_of(begun.folder, [record(index) for index in done])
    with pytest.raises(BatchgenError, match="the input has 3 rows"):
        finalize(run_dir, begun, spec(), journal, num_rows=3)
    journal.close()
    assert not run_dir.is_complete()


def test_a_shard_is_complete_with_its_own_rows(run_dir: RunDir) -> None:
    begun = begun_in(run_dir, Shard(2, 3))
    journal = Journal.open(begun.folder, shard=Shard(2, 3))
    for index in (1, 4, 7):
        journal.append(JournalEntry(index, Cursor(0, 0, 0, index + 1), "result", encode_json(record(index))))
    assert finalize(run_dir, begun, spec(), journal, num_rows=9).manifest.num_rows == 9
    journal.close()


def test_a_record_that_rots_while_it_is_read_leaves_no_outputs(run_dir: RunDir) -> None:
    begun = begun_in(run_dir)
    journal = journal_of(begun.folder, [record(index) for index in range(3)])
    journal.commit()
    (segment,) = begun.folder.glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[-50] ^= 1
    segment.write_bytes(content)
    with pytest.raises(StorageError):
        finalize(run_dir, begun, spec(), journal, num_rows=3)
    journal.close()
    assert [path.name for path in run_dir.path.iterdir()] == ["journal"]


def test_more_segments_than_files_may_be_open(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_OPEN", 2)
    begun = begun_in(run_dir)
    for index in range(6):
        journal_of(begun.folder, [record(index)]).close()
    journal = Journal.open(begun.folder)
    finalize(run_dir, begun, spec(), journal, num_rows=6)
    assert len(journal._reader._open) == 2
    journal.close()


# Parquet


def test_parquet_is_compressed_and_cut_into_row_groups(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 10)
    written(run_dir, [record(index) for index in range(25)], output_format="parquet")
    metadata = pq.read_metadata(run_dir.outputs("parquet"))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10, 10, 5]
    assert metadata.row_group(0).column(1).compression == "ZSTD"
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1000)
    written(run_dir, [record(index) for index in range(9)], output_format="parquet")
    assert pq.read_metadata(run_dir.outputs("parquet")).num_row_groups > 2, "a group of long rows ends early"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", None], "string"),
        ([True, None], "bool"),
        ([1, 2, None], "int64"),
        ([1, 2.5, None], "double"),
        ([None, None], "string"),
        ([[1], [], [2.5]], "list<element: double>"),
        ([{"a": 1}, {"b": "x"}], "struct<a: int64, b: string>"),
        ([{"a": 1.5}, {"a": True}], "string"),
        ([{}, {}], "string"),
    ],
    ids=str,
)
def test_a_kept_column_takes_the_type_its_values_share(run_dir: RunDir, values: list[Any], kind: str) -> None:
    written(run_dir, [record(i, kept=value) for i, value in enumerate(values)], output_format="parquet")
    assert str(pq.read_schema(run_dir.outputs("parquet")).field("kept").type) == kind


@pytest.mark.parametrize("level", [lambda value: [value], lambda value: {"a": value}])
def test_what_is_nested_deeper_than_readers_of_parquet_take_becomes_json_text(run_dir: RunDir, level: Any) -> None:
    for num_levels in (20, 120):
        value: Any = 1
        for _ in range(num_levels):
            value = level(value)
        rows = written(run_dir, [record(0, kept=value)], output_format="parquet")
        assert rows[0]["kept"] == (value if num_levels == 20 else json.dumps(value, separators=(", ", ": ")))


def test_an_object_with_ever_new_keys_becomes_json_text(run_dir: RunDir) -> None:
    rows = written(run_dir, [record(i, kept={f"key-{i}": i}) for i in range(100)], output_format="parquet")
    assert rows[7]["kept"] == '{"key-7": 7}'


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([2**53, 2**60, 2**63, "\ud800"])
KEPT = st.recursive(
    PLAIN | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


def unfilled(value: Any) -> Any:
    """A value without the nulls that a struct fills in, its booleans told from numbers."""
    if isinstance(value, dict):
        return {name: unfilled(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [*map(unfilled, value)]
    return str(value) if isinstance(value, bool) else value


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from(["k", "l"]), KEPT), min_size=1, max_size=6), st.integers(1, 6))
@example([{"k": 1}, {"k": "a"}], 1)
@example([{"k": True}, {"k": 1.5}, {"k": 2}], 2)
@example([{"k": [1.5]}, {"k": [None, True]}, {}], 2)
@example([{"k": 2**60}, {"k": 1.5}], 1)
@example([{"k": 2**60}, {"k": 1.5}], 2)
@example([{"k": [{}]}, {"k": None}], 2)
def test_any_mixture_of_kept_values_comes_back_from_parquet_as_it_is_or_as_its_json(
    tmp_path_factory: pytest.TempPathFactory, kept: list[dict[str, Any]], group_rows: int
) -> None:
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_ROWS", group_rows)
        rows = written(run_dir, [record(i, **columns) for i, columns in enumerate(kept)], output_format="parquet")
    assert [row["index"] for row in rows] == list(range(len(kept)))
    for name in {name for columns in kept for name in columns}:
        is_json = pq.read_schema(run_dir.outputs("parquet")).field(name).metadata == {b"batchgen": b"json"}
        found = [json.loads(row[name]) if is_json and row[name] is not None else row[name] for row in rows]
        assert unfilled(found) == unfilled([columns.get(name) for columns in kept])


_COUNT_THREADS = """
import os
from batchgen.output.formats.parquet import table_of
before = os.listdir("/proc/self/task")
table_of([b'{"id": 1, "b": "x"}'] * 9, {}).to_pandas(use_threads=False)
assert os.listdir("/proc/self/task") == before
"""


@pytest.mark.breadth
def test_a_table_in_memory_is_made_without_threads_of_arrow() -> None:
    command = [sys.executable, "-c", _COUNT_THREADS]  # one that ends late ends the interpreter by SIGABRT
    assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == 0


# OpenAI Batch


def test_a_kept_url_decides_the_shape_of_an_openai_row(run_dir: RunDir) -> None:
    rows = [record(0, url="/v1/completions"), record(1, url="/v1/chat/completions"), record(2, url=None)]
    objects = [row["response"]["body"]["object"] for row in written(run_dir, rows, output_format="openai-batch")]
    assert objects == ["text_completion", "chat.completion", "chat.completion"]


def test_a_failed_openai_row_has_openais_shape_and_what_a_dead_letter_holds(run_dir: RunDir) -> None:
    written(run_dir, [], [{**dead_letter(0), "id": "r-1"}], output_format="openai-batch")
    answer: dict[str, Any] = {"id": "batch_req_000000000000", "custom_id": "r-1", "response": None}
    answer |= {"error": {"code": "bad_json", "message": "no JSON"}}
    answer |= {name: dead_letter(0)[name] for name in ("index", "source", "line", "row")}
    assert json.loads(run_dir.errors.read_bytes()) == answer

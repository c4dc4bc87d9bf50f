"""What Arrow holds as JSON text, pads with nulls, keeps as a map or lacks in JSON is what the same rows say as JSON."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import codes, source_of
from run_helpers import JobMaker

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.input.formats.arrow import rows_at
from batchgen.input.in_memory import json_lines
from batchgen.run.invocation import RunOptions

JSON = pa.json_()
TEXT = '{"a": {"b": null, "c": [1, "é"]}}'
VALUE = json.loads(TEXT)


def read(path: Path | str, **keys: Any) -> list[dict[str, Any]]:
    rows = list(source_of(path, **keys).read())
    assert codes(rows) == ["ok"] * len(rows), rows
    return [dict(row.columns) for row in rows if row.error is None]


def write(folder: Path, column: pa.Array, name: str = "data") -> Path:
    pq.write_table(pa.table({name: column}), folder / "rows.parquet")
    return folder / "rows.parquet"


def of(storage: pa.DataType, value: Any, kind: pa.DataType) -> pa.Array:
    """One value of a type that has ``arrow.json`` where ``storage`` has a string."""
    return pa.array([value, None], storage).cast(kind)


S = pa.string()
NESTED = {
    "itself": (S, TEXT, JSON, VALUE),
    "large": (pa.large_string(), TEXT, pa.json_(pa.large_string()), VALUE),
    "list": (pa.list_(S), [TEXT, None], pa.list_(JSON), [VALUE, None]),
    "large list": (pa.large_list(S), [TEXT], pa.large_list(JSON), [VALUE]),
    "fixed-size list": (pa.list_(S, 1), [TEXT], pa.list_(JSON, 1), [VALUE]),
    "struct": (
        pa.struct([("k", S), ("n", S)]),
        {"k": TEXT},
        pa.struct([("k", JSON), ("n", S)]),
        {"k": VALUE, "n": None},
    ),
    "map": (pa.map_(S, S), [("k", TEXT)], pa.map_(S, JSON), [("k", VALUE)]),
    "list of structs of lists": (
        pa.list_(pa.struct([("k", pa.list_(S))])),
        [{"k": [TEXT]}],
        pa.list_(pa.struct([("k", pa.list_(JSON))])),
        [{"k": [VALUE]}],
    ),
}


@pytest.mark.parametrize(("storage", "value", "kind", "expected"), NESTED.values(), ids=NESTED)
def test_a_value_of_type_json_is_what_its_text_says_at_any_depth(
    storage: pa.DataType, value: Any, kind: pa.DataType, expected: Any, tmp_path: Path
) -> None:
    assert read(write(tmp_path, of(storage, value, kind))) == [{"data": expected}, {"data": None}]


def test_a_json_type_that_pyarrow_did_not_know_is_told_by_the_metadata_of_its_field() -> None:
    field = pa.field("data", pa.list_(pa.field("item", S, metadata={"ARROW:extension:name": "arrow.json"})))
    batch = pa.record_batch([pa.array([[TEXT]], field.type)], pa.schema([field]))
    assert rows_at(batch, [0]) == [({"data": [VALUE]}, None)]
    plain = pa.field("data", S, metadata={"ARROW:extension:name": "arrow.json"})
    assert rows_at(pa.record_batch([pa.array([TEXT])], pa.schema([plain])), [0]) == [({"data": VALUE}, None)]


@pytest.mark.parametrize("bad", ["{", "", "[" * 200 + "]" * 200, '"\\ud800"'])
def test_a_text_that_is_not_json_costs_its_own_row_only(bad: str, tmp_path: Path) -> None:
    path = write(tmp_path, pa.array([TEXT, bad, "1"], S).cast(JSON))
    rows = list(source_of(path, prompt="data").read())
    assert [row.columns["data"] for row in rows if row.error is None] == [VALUE, 1]
    [problem] = [row for row in rows if row.error]
    assert problem.index == 1 and problem.error.code in ("bad_json", "bad_encoding")
    assert problem.error.message.startswith("column 'data' holds JSON that cannot be read: ")


def test_a_null_in_a_column_of_data_stays_as_the_file_has_it(tmp_path: Path) -> None:
    rows = [{"meta": {"a": 1, "b": None}, "messages": [{"role": "user", "name": None}], "turns": [{"n": None, "m": 1}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == [{**rows[0], "messages": [{"role": "user"}]}]
    assert read(tmp_path / "rows.parquet", messages="turns") == [{**rows[0], "turns": [{"m": 1}]}]


def test_a_null_that_was_written_as_json_stays(tmp_path: Path) -> None:
    written = '[{"type": "function", "function": {"name": "f", "default": null}}]'
    assert read(write(tmp_path, pa.array([written], S).cast(JSON), "tools")) == [{"tools": json.loads(written)}]


def test_a_map_in_a_chat_is_an_object_and_keeps_its_nulls(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("arguments", pa.map_(S, S)), ("name", S)]))
    calls = pa.array([[{"arguments": [("tz", "UTC"), ("city", None)], "name": None}]], kind)
    assert read(write(tmp_path, calls, "messages")) == [{"messages": [{"arguments": {"tz": "UTC", "city": None}}]}]
    assert read(write(tmp_path, calls)) == [{"data": [{"arguments": [("tz", "UTC"), ("city", None)], "name": None}]}]


@pytest.mark.parametrize("is_file", [True, False])
def test_two_columns_of_one_name_are_refused(is_file: bool, tmp_path: Path) -> None:
    table = pa.table([["a"], [1], ["b"]], names=["prompt", "n", "prompt"])
    pq.write_table(table, tmp_path / "rows.parquet")
    where = r"rows\.parquet" if is_file else "a table of rows"
    with pytest.raises(UsageError, match=f"{where}: two columns are named 'prompt'"):
        source_of(tmp_path / "rows.parquet") if is_file else list(json_lines(table, []))


# ---------------------------------------------------------------- rows in memory


def test_a_row_in_memory_that_cannot_be_read_is_a_row_by_itself() -> None:
    table = pa.table({"tools": pa.array(["[]", "{"], S).cast(JSON), "prompt": ["a", "b"]})
    good, bad = json_lines(table, InputSpec().request_columns)
    assert json.loads(good) == {"tools": [], "prompt": "a"}
    assert bad.startswith(b"rows[1] cannot be read: column 'tools' holds JSON that cannot be read")


def test_messages_of_a_run_end_encoded_column_have_their_own_keys_alone() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]
    table = pa.table({"messages": pa.RunEndEncodedArray.from_arrays([1], pa.array([chat]))})
    (line,) = json_lines(table, ["messages"])
    assert json.loads(line) == {"messages": chat}


TURNS = ['"a"', '[{"type": "text", "text": "b"}]']  # as datasets writes texts and parts in one column


@pytest.mark.parametrize("kind", ["pandas", "arrow"])
@pytest.mark.parametrize(
    ("contents", "is_lost"),
    [
        (TURNS, True),
        (["a", TURNS[1]], False),  # what a tool answers
        (['"a"', '"b"'], False),
        (['"a"', "[1]"], False),
        (['"a"', "[]"], False),
        (['"a"', "[{"], False),
    ],
)
def test_contents_that_all_lost_their_type_on_the_way_are_refused(
    contents: list[str], is_lost: bool, kind: str
) -> None:
    chats = [[{"role": "user", "content": content}] for content in contents]
    table = pa.table({"messages": chats})
    for rows in (table, pa.table({"body": [{"messages": chat} for chat in chats]})):
        lines = json_lines(rows.to_pandas() if kind == "pandas" else rows, ["messages", "body"])
        if is_lost:
            with pytest.raises(UsageError, match="each content of the chats is JSON text"):
                list(lines)
        else:
            assert [
                json.dumps(content) in json.dumps(json.loads(line))
                for content, line in zip(contents, lines, strict=True)
            ] == [True, True]


# ---------------------------------------------------------------- cells and ids that JSON lacks


def parquet_job(job: JobMaker, table: dict[str, Any], **keys: Any) -> Any:
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table(table), path)
    return job.spec(input={"path": [str(path)], **keys}, output={"format": "jsonl"})


def unknown_zone(count: int) -> pa.Array:
    return pa.array([0] * count, pa.timestamp("us", tz="Mars/Phobos"))


def test_a_cell_that_no_prompt_needs_costs_no_row(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": ["a", "b"], "question": ["x", "y"], "at": unknown_zone(2)}
    assert job.run(parquet_job(job, columns), RunOptions()).exit_code == 0
    assert [row["at"] for row in job.outputs()] == [None, None]
    said = "column 'at' has cells that cannot be read: they are null in the outputs"
    assert capsys.readouterr().err.count(said) == 1


def test_a_column_that_is_not_kept_is_not_named(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": ["a"], "question": ["x"], "at": unknown_zone(1)}
    assert job.run(parquet_job(job, columns, columns=["question"]), RunOptions()).exit_code == 0
    assert "cannot be read" not in capsys.readouterr().err


def test_a_cell_of_the_prompt_that_cannot_be_read_fails_its_row(job: JobMaker) -> None:
    job.run(parquet_job(job, {"id": ["a"], "question": unknown_zone(1)}))
    (letter,) = job.errors()
    assert (letter["code"], "'question' (timestamp" in letter["message"]) == ("bad_type", True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, 7),
        (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    ],
)
def test_an_id_that_is_no_text_is_what_a_kept_column_has(job: JobMaker, value: Any, text: str | int) -> None:
    ids = (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([value.bytes], pa.binary(16)))
        if isinstance(value, UUID)
        else [value]
    )
    columns = {"id": ids, "question": ["x"]}
    assert job.run(parquet_job(job, columns)).exit_code == 0
    assert [row["id"] for row in job.outputs()] == [text]


def test_an_encrypted_parquet_file_is_refused_in_true_words(job: JobMaker) -> None:
    path = job.folder / "rows.parquet"
    path.write_bytes(b"PARE" + b"\r\x00\x80" * 40 + b"PARE")
    with pytest.raises(UsageError, match="is an encrypted Parquet file, which cannot be read: decrypt it first"):
        job.run(job.spec(input={"path": [str(path)]}))

"""Rows of Arrow batches get what a run gives them, however they are cut, and nothing is left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chat_templates import PUBLISHED
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import write_tokenizer
from run_helpers import MODEL, JobMaker, quiet, read_lines, without_timings
from stub_engine import StubEngine, stub_factory

from batchgen.arrow import generate, output_schema
from batchgen.core.errors import UsageError
from batchgen.executors.tables import ADDED
from batchgen.run.job import run_job

SAMPLED = {"max_tokens": 12, "temperature": 0.8, "seed": 3}


def question(number: int) -> str | None:
    return {5: "", 11: None}.get(number, f"What is {number} and {number % 7}?")


def table(numbers: range) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"row": list(numbers), "question": [question(number) for number in numbers]},
        pa.schema([("row", pa.int64()), ("question", pa.string())]),
    )


def answers(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch], **job: Any) -> list[pa.RecordBatch]:
    given = {"model": str(MODEL), "prompt": "{question}", "sampling": SAMPLED, "key": "row", **job}
    return list(generate(batches, engine_factory=stub_factory(), **given))


def rows_of(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same rows as a run answers them, in the shape of the batches."""
    job = JobMaker(tmp_path_factory.mktemp("run"))
    job.write([{"question": question(number)} for number in range(40)])
    spec = job.spec(model={"path": str(MODEL)}, input={"prompt": "{question}", "id": None}, sampling=SAMPLED)
    run_job(spec, quiet(), engine_factory=stub_factory())
    found = {
        record["index"]: {
            "text": record["text"],
            "finish_reason": record["finish_reason"],
            **record["usage"],
            "details": None,
            "error": None,
        }
        for record in without_timings(job.output / "outputs.jsonl")
    }
    for record in read_lines(job.output / "errors.jsonl"):
        error = {"error": f"{record['code']}: {record['message']}"}
        found[record["index"]] = dict.fromkeys(ADDED.names) | error
    return [{"row": index, "question": question(index), **found[index]} for index in range(40)]


@given(cuts=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=15, deadline=None)
def test_any_cut_into_batches_gives_what_a_run_gives(cuts: list[int], of_a_run: list[dict[str, Any]]) -> None:
    edges = [0, *sorted(cuts), 40]
    batches = [table(range(low, high)) for low, high in pairwise(edges)]
    found = answers(batches)
    assert [batch.num_rows for batch in found] == [batch.num_rows for batch in batches]
    assert rows_of(found) == of_a_run


def test_the_schema_is_fixed_and_known_beforehand() -> None:
    given = table(range(3))
    wanted = output_schema(given.schema)
    assert wanted.names == ["row", "question", *ADDED.names]
    bad_rows_only = pa.RecordBatch.from_pydict({"row": [1], "question": [None]}, given.schema)
    assert [batch.schema for batch in answers([given.slice(0, 0), given, bad_rows_only])] == [wanted] * 3


def test_all_that_sampling_asks_for_is_in_the_details(tmp_path: Path) -> None:
    rows = [{"question": "What?", "sampling": {"n": 2, "logprobs": 1}}, {"question": "Which?"}]
    rows += [{"question": "Which?", "sampling": {"choices": ["yes", "no"]}}]
    rows += [{"question": "And?", "sampling": {"prompt_logprobs": 0}}]
    job = JobMaker(tmp_path)
    job.write(rows)
    sampling = {"max_tokens": 9}
    spec = job.spec(model={"path": str(MODEL)}, input={"prompt": "{question}", "id": None}, sampling=sampling)
    run_job(spec, quiet(), engine_factory=stub_factory())
    wanted = without_timings(job.output / "outputs.jsonl")
    columns = [pa.RecordBatch.from_pylist([row]) for row in rows]
    found = [rows_of(answers([batch], key=None, sampling=sampling))[0] for batch in columns]
    details = [json.loads(row["details"] or "{}") for row in found]
    assert [set(one) for one in details] == [
        {"logprobs", "samples"},
        set(),
        {"choices"},
        {"prompt_logprobs", "perplexity"},
    ]
    assert all(one == {name: record[name] for name in one} for one, record in zip(details, wanted, strict=True))


def test_a_column_with_the_name_of_an_added_one_is_kept_under_another() -> None:
    batch = pa.RecordBatch.from_pydict({"text": ["a", "b"], "input_text": ["c", "d"]})
    found = answers([batch], prompt="text", key=None, sampling={"max_tokens": 3})[0]
    assert found.schema.names[:2] == ["input_input_text", "input_text"]
    assert found["input_input_text"].to_pylist() == ["a", "b"]
    assert None not in found["text"].to_pylist()


def test_chats_of_a_batch_have_no_field_that_arrow_padded(tmp_path: Path) -> None:
    """Each struct of a column has the fields of all of them; as JSON text the rows have their own."""
    rows = []
    for name, key in (("weather", "city"), ("now", "zone")):
        call = {"function": {"name": name, "arguments": {key: "x"}}}
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        rows.append({"messages": chat, "tools": [tool]})
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    tokenizer = str(write_tokenizer(tmp_path, chat_template=PUBLISHED["qwen3"]))
    given = {"model": {"path": str(MODEL), "tokenizer": tokenizer}, "prompt": None, "key": None}
    given |= {"input": {"messages": "messages"}, "sampling": {"max_tokens": 5}}
    padded, plain = (
        [{name: row[name] for name in ADDED.names} for row in rows_of(answers([batch], **given))]
        for batch in (pa.RecordBatch.from_pylist(rows), pa.RecordBatch.from_pylist(texts))
    )
    assert padded == plain and not any(row["error"] for row in plain)


def test_without_rows_no_model_is_loaded() -> None:
    def never(*_: object) -> Any:
        raise AssertionError

    batches = [table(range(0))] * 3
    assert len(list(generate(batches, model=str(MODEL), prompt="{question}", engine_factory=never))) == 3
    assert list(generate([], model=str(MODEL), prompt="{question}", engine_factory=never)) == []


def test_batches_share_the_engine_and_none_waits_for_its_predecessor_to_drain() -> None:
    steps: list[int] = []
    engines: list[StubEngine] = []

    def factory(*given: Any) -> Any:
        backend = stub_factory(step_s=0.003, before_step=lambda step: steps.append(len(engines[0].running)))(*given)
        engines.append(backend.engine)
        return backend

    batches = [table(range(number, number + 4)) for number in range(20, 220, 4)]
    found = list(
        generate(batches, model=str(MODEL), prompt="{question}", sampling={"max_tokens": 20}, engine_factory=factory)
    )
    assert len(rows_of(found)) == 200
    middle = steps[5:-30]
    assert sum(middle) / len(middle) > 0.9 * engines[0].max_num_seqs


def test_a_consumer_that_stops_early_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    pulled = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal pulled
        for number in range(1000):
            pulled += 1
            yield table(range(4 * number, 4 * number + 4))

    batches = generate(source(), model=str(MODEL), prompt="{question}", engine_factory=stub_factory(step_s=0.001))
    assert next(batches).num_rows == 4
    assert set(threading.enumerate()) > before
    batches.close()
    assert set(threading.enumerate()) == before
    assert pulled < 200, "the source is read as far ahead as the engine needs"


def test_an_engine_that_crashes_raises_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError):
        list(
            generate(
                [table(range(20))], model=str(MODEL), prompt="{question}", engine_factory=stub_factory(crashes_at=2)
            )
        )
    assert set(threading.enumerate()) == before


def test_rows_with_the_same_key_are_answered_each() -> None:
    batch = pa.RecordBatch.from_pydict({"row": ["a", "a", "b", "a"], "question": ["x", "y", "x", "x"]})
    texts = answers([batch])[0]["text"].to_pylist()
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


def test_random_draws_need_a_key_and_rows_without_one_say_so() -> None:
    with pytest.raises(UsageError, match="name a column of unique values as key"):
        answers([], key=None)
    batch = pa.RecordBatch.from_pydict({"row": [1.5, None], "question": ["a", "b"]})
    assert {error.split(":")[0] for error in answers([batch])[0]["error"].to_pylist()} == {"bad_type"}
    assert answers([batch], key="no")[0]["error"].to_pylist()[0] == "missing_column: no column 'no' (the row's key)"
    own = pa.RecordBatch.from_pylist([{"question": "a", "sampling": {"temperature": 1.0}}])
    found = answers([own], key=None, sampling={})[0]["error"].to_pylist()
    assert found[0].startswith("bad_param: ")


def test_impossible_jobs_are_refused_before_a_batch_is_pulled() -> None:
    def never() -> Iterator[pa.RecordBatch]:
        raise AssertionError
        yield

    for job, words in (
        ({"sampling": {"max_tokens": -1}}, "generate: sampling.max_tokens: max_tokens = -1"),
        ({"engine": {"thread": 2}}, 'generate: engine.thread: unknown key.*"threads"'),
        ({"model": ""}, "generate: model.path"),
        ({"temperature": 0.5}, "generate: unknown argument 'temperature': give it in sampling"),
        ({"samplng": {}}, 'generate: unknown argument .samplng.*"sampling"'),
    ):
        with pytest.raises(UsageError, match=words):
            answers(never(), **job)


def test_a_batch_of_another_schema_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch has the schema"):
        answers([table(range(3)), pa.RecordBatch.from_pydict({"question": ["a"]})])


def test_text_that_is_not_utf8_is_an_error_of_its_row() -> None:
    broken = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\x00\x00\x00\x00\x04\x00\x00\x00\x05\x00\x00\x00"), pa.py_buffer(b"good\xff")
    )
    found = answers([pa.RecordBatch.from_arrays([pa.array([1, 2]), broken], ["row", "question"])])[0]
    errors = found["error"].to_pylist()
    assert errors[0] is None
    assert errors[1].startswith("bad_encoding: ")

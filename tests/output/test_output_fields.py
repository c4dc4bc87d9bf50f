"""What rows may ask for besides text, and the types of kept columns, in each output format."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import records
from run_helpers import JobMaker, quiet

from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.config.record_fields import RECORD_KEYS, VECTOR_KEYS
from batchgen.core.json_line import encode_json
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.output.formats.parquet import FIXED_TYPES, ParquetFormat, fixed_types


def token(token_id: int, text: str | None, logprob: float, *top: tuple[int, str | None, float]) -> dict[str, Any]:
    tops = [{"token_id": i, "token": t, "logprob": value} for i, t, value in top]
    return {"token_id": token_id, "token": text, "logprob": logprob, "top_logprobs": tops}


LOGPROBS = [
    token(5, " é", -0.5, (5, " é", -0.5), (9, "\ufffd", -1.5), (10, "\ufffd", -2.5)),
    token(9, "\ufffd", -1.5, (8, "b", -0.25), (9, "\ufffd", -1.5), (10, "\ufffd", -2.5)),
]
SAMPLES = [
    {"text": " é", "reasoning": "so", "finish_reason": "stop", "token_ids": [5, 9], "logprobs": LOGPROBS},
    {"text": "", "reasoning": "", "finish_reason": "repetition", "token_ids": [], "logprobs": []},
    {"text": "x", "reasoning": None, "finish_reason": "length", "token_ids": [11], "logprobs": [token(11, "x", -1.0)]},
]
SAMPLES = [
    {**sample, "tool_calls": [], "complete": complete}
    for sample, complete in zip(SAMPLES, (True, False, None), strict=True)
]
ASKED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": LOGPROBS},
    "samples": {"token_ids": [5, 9], "logprobs": LOGPROBS, "samples": SAMPLES},
    "reasoning": {"reasoning": "so"},
    "structured": {"complete": False},
    "scoring": {"prompt_logprobs": LOGPROBS, "perplexity": 2.718282},
    "short": {"logprobs": [], "prompt_logprobs": [], "perplexity": None},
}


def record(index: int, **asked: Any) -> dict[str, Any]:
    return records.record(index, text=" é", **asked)


def written(form: Any, rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    form.write(file, [form.result_row(encode_json(row)) for row in rows])
    return file.getvalue()


# ---------------------------------------------------------------- Parquet


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_parquet_holds_what_the_record_held_in_fixed_types(asked: dict[str, Any]) -> None:
    rows = [record(index, **asked) for index in range(3)]
    table = pq.read_table(io.BytesIO(written(ParquetFormat(), rows)))
    assert table.to_pylist() == rows
    assert {name: table.schema.field(name).type for name in asked} == {name: FIXED_TYPES[name] for name in asked}


def test_parquet_has_columns_only_for_what_some_row_asked_for_and_fills_in_what_samples_lack() -> None:
    rows = [record(0), record(1, **ASKED["reasoning"]), record(2)]
    table = pq.read_table(io.BytesIO(written(ParquetFormat(), rows)))
    assert table.column_names == [*record(0), "reasoning"]
    assert table["reasoning"].to_pylist() == [None, "so", None]
    samples = [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "length"}]
    (row,) = pq.read_table(io.BytesIO(written(ParquetFormat(), [record(0, samples=samples)]))).to_pylist()
    lacking = dict.fromkeys(("reasoning", "complete", "token_ids", "logprobs", "tool_calls"))
    assert row["samples"] == [{**sample, **lacking} for sample in samples]


def test_every_field_of_the_record_but_the_id_and_what_is_read_in_the_text_has_a_fixed_type() -> None:
    assert FIXED_TYPES.keys() == (RECORD_KEYS | VECTOR_KEYS) - {"id", "parsed", "extracted", "scores"}


PARSED = fixed_types(JobSpec(ModelSpec("m"), InputSpec(("in",)), OutputSpec("", parse=("json",))))


@pytest.mark.parametrize(
    ("values", "kind", "read_back"),
    [
        ([{"x": 1.5, "y": ["a"]}, None, {"y": []}], "struct<x: double, y: list<element: string>>",
         [{"x": 1.5, "y": ["a"]}, None, {"x": None, "y": []}]),
        ([1, "a", None], "string", ["1", '"a"', None]),
        ([{"x": 2**53 + 1}, {"x": 1.5}], "string", [f'{{"x": {2**53 + 1}}}', '{"x": 1.5}']),
        ([None, None], "string", [None, None]),
        ([], "string", []),
    ],
)  # fmt: skip
def test_parsed_values_have_the_type_that_all_share_and_else_are_json(
    values: list[Any], kind: str, read_back: list[Any]
) -> None:
    rows = [record(index, parsed=value) for index, value in enumerate(values)]
    table = pq.read_table(io.BytesIO(written(ParquetFormat(PARSED), rows)))
    assert table.column_names[:5] == ["id", "index", "fingerprint", "text", "parsed"]
    assert (str(table.schema.field("parsed").type), table["parsed"].to_pylist()) == (kind, read_back)


def test_parsed_values_of_samples_are_json() -> None:
    samples = [{"text": "a", "parsed": {"x": [1, None]}, "finish_reason": "stop"}, {"text": "b", "parsed": None}]
    table = pq.read_table(io.BytesIO(written(ParquetFormat(PARSED), [record(0, parsed=None, samples=samples)])))
    assert [sample["parsed"] for sample in table["samples"].to_pylist()[0]] == ['{"x": [1, null]}', None]


# ---------------------------------------------------------------- OpenAI


@pytest.mark.parametrize("chat", [True, False])
def test_openai_lines_hold_the_value_where_the_sdk_has_it(chat: bool) -> None:
    samples = [record(0, parsed={"x": 1}, complete=True), record(0, parsed=None, complete=False)]
    choices = body(record(0, parsed={"x": 1}, samples=samples), chat=chat)["choices"]
    assert [(choice["message"] if chat else choice)["parsed"] for choice in choices] == [{"x": 1}, None]
    assert [choice["complete"] for choice in choices] == [True, False]


def body(row: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The body of the response line, seen to be what the openai package reads."""
    line = json.loads(written(OpenAIBatchFormat("m", chat), [row]))
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == (row["id"], None, 200)
    found: dict[str, Any] = line["response"]["body"]
    types = pytest.importorskip("openai.types.chat" if chat else "openai.types")
    (types.ChatCompletion if chat else types.Completion).model_validate(found, strict=True)
    return found


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_openai_rows_validate_whatever_was_asked_for(asked: dict[str, Any], chat: bool) -> None:
    found = body(record(0, **asked), chat=chat)
    assert found["object"] == ("chat.completion" if chat else "text_completion")
    assert len(found["choices"]) == len(record(0, **asked).get("samples") or [None])


@pytest.mark.parametrize("chat", [True, False])
def test_samples_become_openais_choices_and_usage_is_that_of_all(chat: bool) -> None:
    found = body(record(30, **ASKED["samples"]), chat=chat)
    choices = found["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "length"]
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    assert texts == [sample["text"] for sample in SAMPLES]
    assert [choice["token_ids"] for choice in choices] == [[5, 9], [], [11]]
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}


def test_a_chats_log_probabilities_are_in_openais_shape() -> None:
    (choice,) = body(record(0, logprobs=LOGPROBS), chat=True)["choices"]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"]).decode()) == (" é", -0.5, " é")
    assert [top["token"] for top in first["top_logprobs"]] == [" é", "\ufffd", "\ufffd"]
    assert second["bytes"] is None  # part of a character: which bytes is not known


def test_the_bytes_of_a_part_of_a_character_are_told_as_openai_shows_them() -> None:
    part = token(9, " \ufffd", -1.5) | {"bytes": [0x20, 0xF0, 0x9F]}
    (choice,) = body(record(0, logprobs=[part]), chat=True)["choices"]
    [found] = choice["logprobs"]["content"]
    assert (found["token"], found["bytes"]) == (" \\xf0\\x9f", [0x20, 0xF0, 0x9F])
    (choice,) = body(record(0, logprobs=[part]), chat=False)["choices"]
    assert choice["logprobs"]["tokens"] == [" \ufffd"]  # whose lengths are the offsets in the text


def test_a_completions_log_probabilities_are_in_openais_shape() -> None:
    (choice,) = body(record(0, logprobs=LOGPROBS), chat=False)["choices"]
    assert choice["logprobs"] == {
        "tokens": [" é", "\ufffd"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{" é": -0.5, "\ufffd": -1.5}, {"b": -0.25, "\ufffd": -1.5}],
        "text_offset": [0, 2],
    }
    (choice,) = body(record(0, logprobs=[token(5, "a", -1.0)]), chat=False)["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_a_row_without_log_probabilities_says_null_and_an_empty_one_has_empty_lists() -> None:
    for chat in (True, False):
        assert body(record(0), chat=chat)["choices"][0]["logprobs"] is None
    (choice,) = body(record(0, logprobs=[]), chat=False)["choices"]
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": None, "text_offset": []}


def test_tokens_without_a_tokenizer_are_known_by_their_ids() -> None:
    row = record(0, logprobs=[token(5, None, -1.0, (6, None, -0.5))])
    del row["text"]
    (choice,) = body(row, chat=False)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:6": -0.5}]


def test_scores_of_the_prompt_are_kept_under_names_of_their_own() -> None:
    found = body(record(0, **ASKED["scoring"]), chat=True)
    assert {name: found[name] for name in ASKED["scoring"]} == ASKED["scoring"]


# ---------------------------------------------------------------- types of kept columns


AT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
COLUMNS = {
    "zoned": pa.array([AT, None], pa.timestamp("us", tz="Europe/Berlin")),
    "millis": pa.array([AT.replace(tzinfo=None), None], pa.timestamp("ms")),
    "day": pa.array([date(2026, 1, 2), None], pa.date32()),
    "clock": pa.array([time(3, 4, 5, 678000), None], pa.time32("ms")),
    "price": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
    "picture": pa.array([b"\x00\xff", None], pa.binary()),
    "small": pa.array([-3, None], pa.int16()),
    "huge": pa.array([2**64 - 1, None], pa.uint64()),
    "single": pa.array([0.1, None], pa.float32()),
}


def parquet_job(job: JobMaker, **columns: Any) -> Any:
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "question": ["x", "y"]} | columns), path)
    return job.spec(input={"path": [str(path)]}, output={"format": "parquet"})


def test_types_that_json_lacks_are_those_of_the_input(job: JobMaker) -> None:
    assert job.run(parquet_job(job, **COLUMNS)).exit_code == 0
    table = pq.read_table(job.output / "outputs.parquet")
    for name, column in COLUMNS.items():
        assert (table[name].type, table[name].to_pylist()) == (column.type, column.to_pylist())


def test_types_survive_a_resume(job: JobMaker) -> None:
    days = pa.array([date(2026, 1, 2)] * 200)
    spec = parquet_job(job, id=range(200), question=["x"] * 200, day=days)
    assert job.run(spec, quiet(max_total_tokens=400)).exit_code == 75
    assert job.run(spec).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet")["day"].to_pylist() == days.to_pylist()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.timestamp("us", tz="Mars/Phobos"), [None, None]),
        (pa.duration("s"), [None, None]),
        (pa.float32(), [0.5, float("nan")]),
        (pa.float16(), [0.5, None]),
        (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None]),
        (pa.struct([("a", pa.list_(pa.list_(pa.binary())))]), [{"a": [[b"\xff"], []]}, None]),
    ],
    ids=str,
)
def test_a_type_that_cannot_be_restored_or_does_not_fit_costs_no_row(
    job: JobMaker, kind: pa.DataType, values: list[Any]
) -> None:
    assert job.run(parquet_job(job, other=pa.array(values, kind))).exit_code == 0
    found = pq.read_table(job.output / "outputs.parquet")["other"].to_pylist()
    assert len(found) == 2 and (found[0] is None) == (values[0] is None)


def test_files_whose_types_differ_give_what_their_values_share(job: JobMaker) -> None:
    first, second = job.folder / "a.parquet", job.folder / "b.parquet"
    pq.write_table(pa.table({"id": ["a"], "question": ["x"], "day": pa.array([date(2026, 1, 2)])}), first)
    pq.write_table(pa.table({"id": ["b"], "question": ["x"], "day": ["soon"]}), second)
    spec = job.spec(input={"path": [str(first), str(second)]}, output={"format": "parquet"})
    assert job.run(spec).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet")["day"].to_pylist() == ["2026-01-02", "soon"]

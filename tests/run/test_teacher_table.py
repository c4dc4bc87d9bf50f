"""Log-probabilities as typed columns of Parquet: types, resume, update, forms, merge, workers, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, Shell, journal_of, quiet, rows_of, timeless, updating

from batchgen.api import Run
from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch, UsageError
from batchgen.core.logprobs import unpacked
from batchgen.output.formats import parquet
from batchgen.plan.dry_run import make_plan, render_plan
from batchgen.run.loader import read_model

K = 5
CHAT = [
    *({"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}),
    *({"role": "user", "content": "And 2 + 4?"}, {"role": "assistant", "content": "6"}),
]


@pytest.fixture
def job(tmp_path: Path) -> JobMaker:
    job = JobMaker(tmp_path)
    job.write(rows_of(30))
    return job


def teacher(job: JobMaker, k: int = K, **sections: Any) -> JobSpec:
    output = {"format": "parquet", **sections.pop("output", {})}
    sampling = {"max_tokens": 0, "prompt_logprobs": k, **sections.pop("sampling", {})}
    return job.spec(sampling=sampling, output=output, **sections)


def tokenizer_of(job: JobMaker) -> Any:
    return read_model(job.spec(input={"prompt": None, "messages": "messages"})).tokenizer


def table_of(job: JobMaker) -> Any:
    return pq.read_table(job.output / "outputs.parquet")


def test_the_table_of_a_prompt_has_typed_columns_of_a_fixed_size(job: JobMaker) -> None:
    job.run(teacher(job))
    table = table_of(job)
    floats = pa.list_(pa.field("element", pa.float32()))
    assert table.schema.field("prompt_logprobs").type == floats
    kinds = {name: table.schema.field(f"prompt_top_{name}").type.value_type for name in ("ids", "logprobs")}
    assert [(kind.list_size, kind.value_type) for kind in kinds.values()] == [(K, pa.int32()), (K, pa.float32())]
    for row in table.to_pylist():
        ids = row["prompt_token_ids"]
        assert row["prompt_logprobs"] == [float(np.float32(-token / 100)) for token in ids[1:]]
        assert row["prompt_top_ids"] == [[8 + rank for rank in range(K)]] * (len(ids) - 1)
        assert row["prompt_top_logprobs"] == [[-0.5 - rank for rank in range(K)]] * (len(ids) - 1)
        assert "assistant_mask" not in row


def test_the_table_of_an_answer_stands_beside_its_ids(job: JobMaker) -> None:
    job.run(job.spec(sampling={"logprobs": K}, output={"format": "parquet"}))
    for row in table_of(job).to_pylist():
        assert len(row["token_ids"]) == row["usage"]["completion_tokens"] == len(row["top_ids"])
        assert row["logprobs"] == [float(np.float32(-token / 100)) for token in row["token_ids"]]
        assert {*map(len, row["top_logprobs"])} == {K}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_samples_have_their_own_tables(dtype: str, job: JobMaker) -> None:
    output = {"format": "parquet", "logprobs_dtype": dtype}
    job.run(job.spec(sampling={"logprobs": 2, "n": 3, "temperature": 1.0}, output=output))
    kinds = {item.name: item.type for item in table_of(job).schema.field("samples").type.value_type}
    assert kinds["top_logprobs"].value_type.value_type == kinds["logprobs"].value_type == pa.type_for_alias(dtype)
    for row in table_of(job).to_pylist():
        assert len(row["samples"]) == 3
        for sample in row["samples"]:
            assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["top_ids"])
        assert {name: row[name] for name in ("logprobs", "top_ids")} == {
            name: row["samples"][0][name] for name in ("logprobs", "top_ids")
        }


def test_rows_that_ask_for_other_numbers_get_them_in_lists_without_a_fixed_size(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write([*rows_of(3), {"id": "x", "question": "Why?", "sampling": {"prompt_logprobs": 2}}])
    for group_rows in (1, 4):
        monkeypatch.setattr(parquet, "GROUP_ROWS", group_rows)
        job.run(teacher(job), quiet(overwrite=True))
        table = table_of(job)
        assert pa.types.is_list(table.schema.field("prompt_top_ids").type.value_type)
        assert [{*map(len, row)} for row in table["prompt_top_ids"].to_pylist()] == [{K}, {K}, {K}, {2}]


def test_float16_is_written_again_from_the_journal_without_a_model(job: JobMaker) -> None:
    job.run(teacher(job))
    whole = table_of(job).drop_columns("timings")
    job.run(teacher(job, output={"logprobs_dtype": "float16"}))
    assert job.engines == []
    half = table_of(job)
    assert half.schema.field("prompt_top_logprobs").type.value_type.value_type == pa.float16()
    wanted = [[np.float16(x) for x in row] for row in whole["prompt_logprobs"].to_pylist()]
    assert half["prompt_logprobs"].to_pylist() == wanted
    job.run(teacher(job))
    assert table_of(job).drop_columns("timings").equals(whole)


def test_a_run_that_is_stopped_and_resumed_writes_the_same_table(job: JobMaker) -> None:
    expected = job.elsewhere("fresh", teacher(job))
    assert job.run(teacher(job), quiet(max_total_tokens=200)).exit_code == 75
    [segment] = journal_of(job.output).glob("*.seg")
    segment.write_bytes(segment.read_bytes()[:-40])  # as a kill within a write leaves it
    job.run(teacher(job))
    assert job.outputs() == expected
    assert table_of(job).schema == pq.read_schema(job.folder / "fresh" / "outputs.parquet")


def test_another_number_is_refused_and_computed_again_by_an_update(job: JobMaker) -> None:
    job.run(teacher(job))
    with pytest.raises(ResumeMismatch, match="prompt_logprobs: was 5, now 3"):
        job.run(teacher(job, 3))
    job.run(teacher(job, 3), updating())
    assert {len(row) for table in table_of(job)["prompt_top_ids"].to_pylist() for row in table} == {3}


def test_another_form_of_the_records_is_refused_and_computed_again_by_an_update(job: JobMaker) -> None:
    job.run(teacher(job))
    as_lines = teacher(job, output={"format": "jsonl"})
    with pytest.raises(ResumeMismatch, match=r'output\.format: was "parquet"'):
        job.run(as_lines)
    job.run(as_lines, updating())
    assert {*job.outputs()[0]["prompt_logprobs"][0]} == {"token_id", "token", "logprob", "top_logprobs"}
    job.run(teacher(job), updating())
    assert table_of(job).schema.field("prompt_top_ids").type.value_type.list_size == K


def test_a_job_whose_rows_alone_ask_keeps_objects_in_each_format(job: JobMaker) -> None:
    job.write([{**row, "sampling": {"logprobs": 1}} for row in rows_of(3)])
    job.run(job.spec(output={"format": "parquet"}))
    [first, *_] = table_of(job).to_pylist()
    assert {*first["logprobs"][0]} == {"token_id", "token", "logprob", "top_logprobs"}
    job.run(job.spec())  # the format is free
    assert job.engines == []


def test_reports_and_perplexities_are_those_of_json_lines(job: JobMaker, tmp_path: Path) -> None:
    job.run(teacher(job))
    lines = job.elsewhere("lines", teacher(job, output={"format": "jsonl"}))
    reports = [json.loads((place / "report.json").read_text()) for place in (job.output, tmp_path / "lines")]
    assert reports[0]["perplexity"]["tokens"] == reports[1]["perplexity"]["tokens"] > 0
    assert reports[0]["perplexity"]["value"] == pytest.approx(reports[1]["perplexity"]["value"], rel=1e-6)
    assert table_of(job)["perplexity"].to_pylist() == pytest.approx([row["perplexity"] for row in lines], rel=1e-6)
    for row, line in zip(table_of(job).to_pylist(), lines, strict=True):
        tokens = line["prompt_logprobs"]
        assert row["prompt_token_ids"][1:] == [token["token_id"] for token in tokens]
        assert row["prompt_top_ids"] == [[top["token_id"] for top in token["top_logprobs"]] for token in tokens]


def test_cat_and_python_show_the_numbers_as_lists(job: JobMaker, shell: Shell) -> None:
    spec = teacher(job)
    outcome = job.run(spec)
    table = [timeless(row) for row in table_of(job).to_pylist()]
    lines = shell("cat", job.output, "--columns", "prompt_token_ids,prompt_top_logprobs").out.splitlines()
    shown = [json.loads(line) for line in lines]
    assert shown == [{name: row[name] for name in ("prompt_token_ids", "prompt_top_logprobs")} for row in table]
    assert "prompt_top_ids" in shell("cat", job.output, "--format", "csv").out.splitlines()[0]
    run = Run(spec, outcome)
    assert run[0]["prompt_top_ids"] == table[0]["prompt_top_ids"]
    assert run.to_arrow().equals(table_of(job))


def test_a_column_with_the_name_of_one_of_the_table_is_kept_under_another(job: JobMaker) -> None:
    job.write([{"id": "a", "prompt_token_ids": [5, 6, 7, 8]}])
    job.run(teacher(job, input={"prompt": None, "prompt_token_ids": "prompt_token_ids"}))
    [row] = table_of(job).to_pylist()
    assert row["prompt_token_ids"] == row["input_prompt_token_ids"] == [5, 6, 7, 8]


def test_chats_have_a_mask_of_the_assistants_tokens(job: JobMaker) -> None:
    job.write([{"id": f"{count}", "messages": CHAT[:count]} for count in (4, 1, 3)])
    job.run(teacher(job, input={"prompt": None, "messages": "messages"}))
    a, b, c = table_of(job).to_pylist()
    assert table_of(job).schema.field("assistant_mask").type.value_type == pa.bool_()
    text_of = partial(tokenizer_of(job).decode, skip_special_tokens=False)
    ids = [token for token, mine in zip(a["prompt_token_ids"], a["assistant_mask"], strict=True) if mine]
    assert text_of(ids) == "It is 5.<|im_end|>6<|im_end|>"
    assert not any(b["assistant_mask"])
    assert text_of(a["prompt_token_ids"]).endswith("6<|im_end|>\n"), "it is scored as it stands"
    assert text_of(c["prompt_token_ids"]).endswith("<|im_start|>assistant\n")


def test_a_number_above_the_vocabulary_is_refused(job: JobMaker) -> None:
    with pytest.raises(UsageError, match=r"sampling.prompt_logprobs = 100000: the model has \d+ tokens"):
        job.run(teacher(job, 100_000))


def test_a_row_whose_table_no_memory_holds_fails_and_the_plan_says_so(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.input.requests.MAX_RECORD_BYTES", 1 << 18)
    job.write([*rows_of(2), {"id": "long", "question": "word " * 100, "answer": ""}])
    job.run(teacher(job, 600))
    [error] = job.errors()
    assert error["code"] == "bad_param"
    assert error["message"].startswith("prompt_logprobs = 600: the record would have up to")


def test_as_many_as_openai_gives_are_taken_in_any_context(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.input.requests.MAX_RECORD_BYTES", 1 << 10)
    job.write(rows_of(2))
    job.run(teacher(job, 20))
    assert not job.errors()


def test_a_kept_column_that_looks_like_a_packed_array_stays_as_it_is() -> None:
    record = {"vector": {"dtype": "int32", "shape": [1], "base64": "AQAAAA=="}, "text": "a"}
    assert unpacked(record, {"logprobs"}) == record


def test_the_plan_says_the_bytes_of_a_row(job: JobMaker) -> None:
    plan = make_plan(teacher(job))
    tokens = plan["prompt_tokens"]["total"]
    assert plan["logprobs"]["total_bytes"] == tokens * 8 * (K + 1)
    assert plan["logprobs"]["fits"]
    assert "a row" in render_plan(plan)
    assert make_plan(replace(job.spec(), output=replace(job.spec().output, path="")))["logprobs"] is None

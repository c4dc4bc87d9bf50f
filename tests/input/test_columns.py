"""Columns that a job names and the input does not have are refused before the weights are loaded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import MODEL, JobMaker, finish, quiet, rows_of, start

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.shard import Shard
from batchgen.input.columns import HEAD_ROWS
from batchgen.plan.dry_run import make_plan
from batchgen.run.backend import Backend
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import ModelInfo

CHAT_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
BATCH_LINE = {**CHAT_LINE, "body": {"messages": [{"role": "user", "content": "hi"}]}}
NO_MAPPING = {"prompt": None, "id": None}
Sections = Mapping[str, Mapping[str, Any]]


def loading(spec: JobSpec, model: ModelInfo) -> Backend:
    pytest.fail("the weights were loaded")


def spec_of(job: JobMaker, sections: Sections) -> JobSpec:
    """The job with some keys of [input] set, or taken away by None."""
    others = {name: values for name, values in sections.items() if name != "input"}
    spec = job.spec(**{"model": {"path": str(MODEL)}, **others})  # which has a chat template
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in sections.get("input", {}).items()
    }
    return replace(spec, input=replace(spec.input, **values))


def refusal(job: JobMaker, **sections: Mapping[str, Any]) -> str:
    """What a run says, and so does a plan; neither loads weights or leaves a trace."""
    spec = spec_of(job, sections)
    with pytest.raises(UsageError) as run_refused:
        run_job(spec, quiet(), engine_factory=loading)
    with pytest.raises(UsageError) as plan_refused:
        make_plan(spec)
    assert not job.output.exists()
    assert str(run_refused.value) == str(plan_refused.value)
    return str(run_refused.value)


def test_an_input_whose_first_rows_are_all_no_json_is_refused(job: JobMaker) -> None:
    job.write([f"question {number}" for number in range(HEAD_ROWS)])
    message = refusal(job)
    assert message.startswith(f"none of the first {HEAD_ROWS} rows is JSON ({job.input}:1: ")
    assert 'input.format what the file is, such as "text"' in message


def test_fewer_rows_that_are_no_json_are_error_rows(job: JobMaker) -> None:
    job.write(["question"] * (HEAD_ROWS - 1))
    assert job.run().exit_code == 3
    assert len(job.errors()) == HEAD_ROWS - 1


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"input": {"prompt": "{nothing} of {question}"}}, "input.prompt names column 'nothing', which none of"),
        ({"input": {"prompt": "qestion"}}, "input.prompt names column 'qestion', which none of the first 3 rows has"),
        ({"input": {"id": "nope"}}, "input.id names column 'nope', which"),
        ({"input": {"keep_columns": ["answer", "anser"]}}, "input.keep_columns names column 'anser', which"),
        ({"output": {"expected": "answr"}}, "output.expected names column 'answr', which"),
        ({"sampling": {"columns": ["max_tokens"]}}, "sampling.columns names column 'max_tokens', which"),
        ({"input": {"prompt": None, "messages": "chat"}}, "input.messages names column 'chat', which"),
        ({"input": {"prompt": None, "prompt_token_ids": "ids"}}, "input.prompt_token_ids names column 'ids', which"),
        ({"input": NO_MAPPING}, "the job names no prompt, and none of the first 3 rows has a column 'messages' or"),
        ({"input": {**NO_MAPPING, "format": "openai-batch"}}, "input.format = 'openai-batch' names column 'body'"),
    ],
)
def test_a_column_that_no_row_has_is_refused_by_its_key(job: JobMaker, sections: Sections, words: str) -> None:
    job.write(rows_of(3))
    said = refusal(job, **sections)
    assert said.startswith(words)
    assert said.endswith("; columns found: 'id', 'question', 'answer'")


def test_the_nearest_column_is_named(job: JobMaker) -> None:
    job.write(rows_of(1))
    assert 'which the first row does not have (did you mean "question"?)' in refusal(
        job, input={"prompt": "{Question}"}
    )


def test_a_column_that_one_of_the_first_rows_has_is_fine(job: JobMaker) -> None:
    rows = [*rows_of(HEAD_ROWS - 1), {"id": "last", "question": "?", "rare": 1}]
    job.write(rows)
    outcome = job.run(job.spec(input={"keep_columns": ["rare"]}))
    assert outcome.exit_code == 0


def test_only_the_first_rows_are_looked_at(job: JobMaker) -> None:
    job.write([*rows_of(HEAD_ROWS), {"id": "late", "question": "?", "rare": 1}])
    assert f"none of the first {HEAD_ROWS} rows" in refusal(job, input={"keep_columns": ["rare"]})


def test_unreadable_rows_are_no_rows_to_judge_by(job: JobMaker) -> None:
    job.write(["{", "[1]"])
    assert job.run(job.spec(input={"prompt": "{nothing}"})).exit_code == 3


def test_a_limit_bounds_the_rows_that_are_judged(job: JobMaker) -> None:
    job.write([*rows_of(2), {"id": "late", "question": "?", "rare": 1}])
    assert "none of the first 2 rows" in refusal(job, input={"keep_columns": ["rare"], "limit": 2})


def test_a_shard_is_judged_by_the_rows_of_all(job: JobMaker) -> None:
    job.write([{**row, "rare": 1} if i == 0 else row for i, row in enumerate(rows_of(4))])
    options = RunOptions(shard=Shard(2, 2), progress="quiet")
    assert job.run(job.spec(input={"keep_columns": ["rare"]}), options).exit_code == 0


def test_compressed_and_parquet_inputs_are_judged(job: JobMaker, tmp_path: Path) -> None:
    packed, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows_of(3)).encode()))
    pq.write_table(pa.Table.from_pylist(rows_of(3)), table)
    for path in (packed, table):
        assert 'did you mean "question"?' in refusal(job, input={"path": [str(path)], "prompt": "{questio}"})
        assert (
            job.run(job.spec(input={"path": [str(path)]}, output={"path": str(tmp_path / path.suffix)})).exit_code == 0
        )


def test_standard_input_is_judged(job: JobMaker) -> None:
    job.write(rows_of(3))
    arguments = ["run", job.toml(), "--input", "-", "--prompt", "{nothing}"]
    code, said = finish(start(arguments, stdin=job.input))
    assert (code, job.output.exists()) == (2, False)
    assert "input.prompt names column 'nothing'" in said


def test_batch_lines_have_their_prompts_in_the_body(job: JobMaker) -> None:
    job.write([BATCH_LINE])
    assert job.run(spec_of(job, {"input": NO_MAPPING})).exit_code == 0


def test_batch_lines_without_a_body_are_refused(job: JobMaker) -> None:
    job.write([CHAT_LINE])
    said = refusal(job, input={**NO_MAPPING, "format": "openai-batch"})
    assert said.startswith("input.format = 'openai-batch' names column 'body', which the first row does not have")


def test_a_run_that_was_begun_is_not_judged_again(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    assert job.run().exit_code == 0


def test_an_old_run_is_not_dropped_for_a_job_that_is_refused(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    before = job.outputs()
    with pytest.raises(UsageError, match="names column"):
        job.run(job.spec(input={"prompt": "{nothing}"}), RunOptions(overwrite=True, progress="quiet"))
    assert job.outputs() == before


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("{{question}}", "input.prompt = '{{question}}' names no column, so that every row would be the same prompt"),
        ("{{}}", "input.prompt = '{{}}' names no column"),
    ],
)
def test_a_template_without_columns_is_refused(job: JobMaker, prompt: str, words: str) -> None:
    job.write(rows_of(3))
    said = refusal(job, input={"prompt": prompt})
    assert said.startswith(words)
    assert said.endswith("; {{ is a brace, write " + ("{question}" if "question" in prompt else "{column}"))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("{meta[tsk]}", "no 'tsk' in meta, which the prompt's template names"),
        ("{question[0]}", "the template's {question[0]} looks for [0] in question, which is a string"),
    ],
)
def test_a_template_that_fails_on_all_of_the_first_rows_is_refused(job: JobMaker, prompt: str, words: str) -> None:
    job.write([{**row, "meta": {"task": "add"}} for row in rows_of(3)])
    said = refusal(job, input={"prompt": prompt})
    assert said.startswith(f"input.prompt = {prompt!r} cannot be filled in from any of the first 3 rows; ")
    assert said.endswith(f".jsonl:1: {words}")


def test_a_template_that_fits_one_of_the_first_rows_is_fine(job: JobMaker) -> None:
    job.write([{**row, "meta": {"task": i} if i else {}} for i, row in enumerate(rows_of(3))])
    assert job.run(job.spec(input={"prompt": "{question} {meta[task]}"})).exit_code == 3

"""Columns that a job names and the input does not have are refused before the weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from input_helpers import openai_line
from run_helpers import MODEL, JobMaker, finish, quiet, rows_of, start

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.units import Shard
from batchgen.input.columns import HEAD_ROWS
from batchgen.plan.dry_run import make_plan
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import ModelInfo

NO_MAPPING = {"prompt": None, "id": None}
Sections = Mapping[str, Mapping[str, Any]]


def loading(spec: JobSpec, model: ModelInfo) -> LoadedEngine:
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
        ({"input": {"prompt": "Say hello"}}, "input.prompt names column 'Say hello', which none of the first 3 rows"),
        ({"input": {"id": "nope"}}, "input.id names column 'nope', which"),
        ({"input": {"columns": ["answer", "anser"]}}, "input.columns names column 'anser', which"),
        ({"eval": {"expected": "answr"}}, "eval.expected names column 'answr', which"),
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
    assert ("a text needs a {column} in it" in said) == ("Say hello" in said)


def test_the_nearest_column_is_named(job: JobMaker) -> None:
    job.write(rows_of(1))
    assert 'which the first row does not have (did you mean "question"?)' in refusal(
        job, input={"prompt": "{Question}"}
    )


def test_only_the_first_rows_or_those_of_the_limit_are_looked_at(job: JobMaker) -> None:
    late = {"id": "late", "question": "?", "rare": 1}
    job.write([*rows_of(HEAD_ROWS), late])
    assert f"none of the first {HEAD_ROWS} rows" in refusal(job, input={"columns": ["rare"]})
    job.write([*rows_of(2), late])
    assert "none of the first 2 rows" in refusal(job, input={"columns": ["rare"], "limit": 2})


RARE = {"input": {"columns": ["rare"]}}
FINE: dict[str, tuple[list[Any], Sections, int]] = {
    "one of the first rows has the column": ([*rows_of(HEAD_ROWS - 1), {**rows_of(1)[0], "id": 9, "rare": 1}], RARE, 0),
    "a row of another shard has it": (
        [{**row, "rare": 1} if i == 0 else row for i, row in enumerate(rows_of(4))],
        RARE,
        0,
    ),
    "unreadable rows are no rows to judge by": (["{", "[1]"], {"input": {"prompt": "{nothing}"}}, 3),
    "batch lines have their prompts in the body": ([openai_line()], {"input": NO_MAPPING}, 0),
    "a template fits one of the first rows": (
        [{**row, "meta": {"task": i} if i else {}} for i, row in enumerate(rows_of(3))],
        {"input": {"prompt": "{question} {meta[task]}"}},
        3,
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_columns_that_are_there_are_fine(job: JobMaker, name: str) -> None:
    rows, sections, code = FINE[name]
    job.write(rows)
    options = RunOptions(shard=Shard(2, 2), progress="quiet") if "shard" in name else quiet()
    assert job.run(spec_of(job, sections), options).exit_code == code


def test_standard_input_is_judged(job: JobMaker) -> None:
    job.write(rows_of(3))
    arguments = ["run", job.toml(), "--input", "-", "--prompt", "{nothing}"]
    code, said = finish(start(arguments, stdin=job.input))
    assert (code, job.output.exists()) == (2, False)
    assert "input.prompt names column 'nothing'" in said


def test_an_old_run_is_not_dropped_for_a_job_that_is_refused(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    before = job.outputs()
    with pytest.raises(UsageError, match="names column"):
        job.run(job.spec(input={"prompt": "{nothing}"}), RunOptions(overwrite=True, progress="quiet"))
    assert job.outputs() == before


FAILS = "cannot be filled in from any of the first 3 rows; "


@pytest.mark.parametrize(
    ("prompt", "said", "end"),
    [
        (
            "{{question}}",
            "has no column, so every row would get the same prompt",
            "; {{ is a literal brace: write {question}",
        ),
        ("{{}}", "has no column", "; {{ is a literal brace: write {column}"),
        ("{meta[tsk]}", FAILS, ".jsonl:1: no 'tsk' in meta, which the prompt's template names"),
        ("{question[0]}", FAILS, ".jsonl:1: the template's {question[0]} looks for [0] in question, which is a string"),
    ],
)
def test_a_template_without_columns_or_that_fits_no_first_row_is_refused(
    job: JobMaker, prompt: str, said: str, end: str
) -> None:
    job.write([{**row, "meta": {"task": "add"}} for row in rows_of(3)])
    found = refusal(job, input={"prompt": prompt})
    assert found.startswith(f"input.prompt = {prompt!r} {said}") and found.endswith(end)


def test_fields_of_a_request_next_to_a_chat_are_named_with_where_they_are_read(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 3, "extra_body": {"top_k": 1}, "seed": None}
    job.write([{"messages": chat, "user": "x", **asked}])
    job.run(job.spec(input=NO_MAPPING | {"chat_template": "auto"}), RunOptions())
    assert "not read: 'response_format', 'max_tokens', 'extra_body'; put them as an object" in capsys.readouterr().err
    job.write([{"messages": chat, "user": "x", "sampling": asked | {"extra_body": None}}])
    job.run(job.spec(input=NO_MAPPING | {"chat_template": "auto"}), RunOptions(overwrite=True))
    assert "not read" not in capsys.readouterr().err


def test_a_field_of_an_object_with_a_dot_is_told_the_form_that_is_taken(job: JobMaker) -> None:
    job.write([{"id": "a", "review": {"body": {"text": "Fine."}}}])
    words = "(a field of 'review' is written {review[body][text]})"
    assert words in refusal(job, input={"prompt": "{review.body.text}"})

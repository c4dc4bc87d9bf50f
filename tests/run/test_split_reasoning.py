"""Jobs of a thinking model: reasoning and text in every format of output, over stops, samples, resumes and retries."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import THINKING
from input_helpers import write_tokenizer
from run_helpers import JobMaker, quiet, rows_of, updating
from stub_engine import answer_with

from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch, UsageError
from batchgen.run.loader import read_model
from batchgen.text.tokenizer import Tokenizer

OPENED = THINKING.replace("{%- if enable_thinking is defined", "{{- '<think>\\n' }}{%- if enable_thinking is defined")


def thought(index: int) -> str:
    return f"It is a square, é, no. {index}."


def answer(index: int) -> str:
    return f"{index * index}"


@pytest.fixture(params=[THINKING, OPENED], ids=["the model opens", "the prompt opens"])
def spec(request: pytest.FixtureRequest, job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job whose rows are answered with ``thought`` and ``answer``, in bytes."""
    tokenizer = Tokenizer.load(write_tokenizer(job.folder / "tokenizer", chat_template=request.param))
    opening = "<think>\n" if request.param == THINKING else ""
    answer_with(monkeypatch, tokenizer, lambda asked: f"{opening}{thought(asked.key)}\n</think>\n\n{answer(asked.key)}")
    return spec_of(job)


def spec_of(job: JobMaker, **sections: Any) -> JobSpec:
    output = {"path": str(job.output), "parse": ["reasoning"], **sections.pop("output", {})}
    sampling = {"max_tokens": 500, **sections.pop("sampling", {})}
    return job.spec(model={"tokenizer": str(job.folder / "tokenizer")}, output=output, sampling=sampling, **sections)


@pytest.mark.usefixtures("spec")
def test_every_format_holds_reasoning_and_text_apart(job: JobMaker) -> None:
    job.write(rows_of(5))
    for form in ("jsonl", "parquet", "openai-batch"):
        rows = job.elsewhere(form, spec_of(job, output={"format": form}))
        if form == "openai-batch":
            messages = [row["response"]["body"]["choices"][0]["message"] for row in rows]
            rows = [{"text": found["content"], "reasoning": found["reasoning_content"]} for found in messages]
        assert [(row["text"], row["reasoning"]) for row in rows] == [(answer(i), thought(i)) for i in range(5)]


def test_the_field_follows_the_text_and_is_there_only_when_asked_for(job: JobMaker, spec: JobSpec) -> None:
    job.write([{"question": "a"}])
    spec = spec_of(job, input={"id": None})
    job.run(spec)
    assert list(job.outputs()[0])[:6] == ["id", "index", "fingerprint", "text", "reasoning", "finish_reason"]
    [row] = job.elsewhere("plain", spec_of(job, input={"id": None}, output={"parse": []}))
    assert "reasoning" not in row and row["text"].endswith(f"{thought(0)}\n</think>\n\n{answer(0)}")


@pytest.mark.usefixtures("spec")
def test_reasoning_that_never_ends_leaves_no_text(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(spec_of(job, sampling={"max_tokens": 20}))
    for index, row in enumerate(job.outputs()):
        assert (row["text"], row["finish_reason"]) == ("", "length")
        assert thought(index).startswith(row["reasoning"]) and row["reasoning"]


@pytest.mark.usefixtures("spec")
def test_each_sample_has_its_own(job: JobMaker) -> None:
    job.write(rows_of(2))
    for form in ("jsonl", "parquet"):
        spec = spec_of(job, output={"format": form}, sampling={"n": 2, "temperature": 1.0}, input={"limit": 2})
        for index, row in enumerate(job.elsewhere(form, spec)):
            assert [(found["text"], found["reasoning"]) for found in row["samples"]] == [
                (answer(index), thought(index)),
                (answer(index)[:-1], thought(index)),  # the stub's second sample is a token shorter
            ]


@pytest.mark.usefixtures("spec")
def test_accuracy_counts_the_text_alone(job: JobMaker) -> None:
    job.write(rows_of(6))
    outcome = job.run(spec_of(job, eval={"expected": "answer"}))
    assert outcome.report is not None and outcome.report["accuracy"]["exact_match"] == 1.0


@pytest.mark.usefixtures("spec")
def test_a_resumed_and_an_updated_run_split_as_an_undisturbed_one(job: JobMaker) -> None:
    job.write(rows_of(30))
    spec = spec_of(job)
    expected = job.elsewhere("whole", spec)
    assert job.run(spec, quiet(max_total_tokens=1500)).exit_code == 75
    with pytest.raises(ResumeMismatch, match=r'output\.parse: was \["reasoning"\], now \[\]'):
        job.run(spec_of(job, output={"parse": []}))
    assert job.run(spec, fails=frozenset({28})).exit_code == 3
    assert job.run(spec, updating()).exit_code == 0
    assert job.outputs() == expected


@pytest.mark.usefixtures("spec")
def test_a_kept_column_of_that_name_makes_way(job: JobMaker) -> None:
    job.write([{"question": "a", "reasoning": "mine"}])
    job.run(spec_of(job, input={"id": None, "columns": ["reasoning"]}))
    [row] = job.outputs()
    assert (row["reasoning"], row["input_reasoning"]) == (thought(0), "mine")


def test_a_model_without_a_tokenizer_cannot_split(job: JobMaker) -> None:
    job.write([{"prompt_token_ids": [8]}])
    with pytest.raises(UsageError, match=r"^output\.parse = \['reasoning'\] needs a tokenizer"):
        read_model(job.spec(model={"path": "dummy:LFM2-350M"}, input={"prompt": None}, output={"parse": ["reasoning"]}))


def test_openai_completions_hold_it_beside_the_text(job: JobMaker, spec: JobSpec) -> None:
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "2 * 2 =<think>"}}
    job.write([line])
    job.run(spec_of(job, input={"id": None, "prompt": None}, output={"format": "openai-batch"}))
    [row] = job.outputs()
    [choice] = row["response"]["body"]["choices"]
    assert (choice["text"], choice["reasoning_content"]) == (answer(0), thought(0))

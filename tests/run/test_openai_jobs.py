"""Jobs over OpenAI's requests: how long their answers may be, and what their lines say."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from run_helpers import MODEL, JobMaker, read_lines

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict
from batchgen.core.errors import ResumeMismatch
from batchgen.core.records import Request

MESSAGES = [{"role": "user", "content": "Hi"}]
NO_PROMPT = {"id": None, "prompt": None, "chat_template": "auto"}


def line(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "body": {"messages": MESSAGES, **body}}


def limits(job: JobMaker, **sections: Any) -> list[int]:
    """The ``max_tokens`` of each row as the engine gets it."""
    seen: dict[int, Request] = {}

    def note(_: Any) -> None:
        seen.update({asked.key: asked for asked, *_ in job.engines[0].running.values()})

    job.run(job.spec(**{"input": NO_PROMPT, "sampling": {"max_tokens": None}} | sections), before_step=note)
    return [seen[key].params.max_tokens for key in sorted(seen)]


@pytest.mark.parametrize("form", ["auto", "openai-batch"])
def test_a_request_without_max_tokens_may_fill_the_context(job: JobMaker, form: str) -> None:
    completion = {"custom_id": "d", "body": {"prompt": "Hi"}}
    job.write([line("a"), line("b", max_tokens=None), line("c", max_completion_tokens=3), completion])
    assert limits(job, input=NO_PROMPT | {"format": form}) == [1024, 1024, 3, 1024]


def test_what_the_job_says_of_max_tokens_counts(job: JobMaker) -> None:
    job.write([line("a"), line("b", max_tokens=5)])
    assert limits(job, sampling={"max_tokens": 256}) == [256, 5]


def test_rows_of_another_form_keep_the_default(job: JobMaker) -> None:
    job.write([line("a"), {"messages": MESSAGES}])
    assert limits(job) == [1024, 256]


@pytest.mark.parametrize("given", [None, 256])
def test_a_job_read_back_knows_whether_max_tokens_was_given(job: JobMaker, given: int | None) -> None:
    spec = job.spec(input=NO_PROMPT, sampling={"max_tokens": given})
    assert spec.max_tokens_unset == (given is None)
    assert job_from_dict(spec.to_dict()) == spec


def test_a_run_goes_on_only_with_the_limit_that_it_was_begun_with(job: JobMaker) -> None:
    job.write([line("a")])
    limits(job)
    with pytest.raises(ResumeMismatch, match=r"sampling\.max_tokens: was \(not set\), now 256"):
        job.run(job.spec(input=NO_PROMPT, sampling={"max_tokens": 256}))


# ---------------------------------------------------------------- lines


def bodies(job: JobMaker) -> list[dict[str, Any]]:
    return [row["response"]["body"] for row in read_lines(job.output / "outputs.jsonl")]


def openai_job(job: JobMaker, **given: Any) -> JobSpec:
    output = {"path": str(job.output), "format": "openai-batch"}
    return job.spec(input=NO_PROMPT | given, output=output)


@pytest.mark.parametrize("keep", [[], ["*"]])
def test_a_line_names_the_model_that_was_asked_for_or_else_this_one_without_its_path(
    job: JobMaker, keep: list[str]
) -> None:
    job.write([line("a", model="gpt-4o-mini"), line("b"), line("c", model=7)])
    job.run(openai_job(job, columns=keep))
    assert [body["model"] for body in bodies(job)] == ["gpt-4o-mini", MODEL.name, MODEL.name]


def test_all_lines_were_created_when_the_run_was_begun_also_those_that_came_later(job: JobMaker) -> None:
    job.write([line(str(number)) for number in range(5)])
    before = int(time.time())
    job.run(openai_job(job))
    created = {body["created"] for body in bodies(job)}
    assert len(created) == 1 and before <= created.pop() <= time.time()
    manifest = json.loads((job.output / "job.json").read_text(encoding="utf-8"))
    manifest["created_at"] = "2026-01-01T00:00:00+01:00"
    (job.output / "job.json").write_text(json.dumps(manifest), encoding="utf-8")
    job.write([line(str(number)) for number in range(7)])
    job.run(openai_job(job))
    assert [body["created"] for body in bodies(job)][5:] == [1767222000] * 2


def test_tokens_that_are_parts_of_a_character_have_its_bytes(job: JobMaker) -> None:
    job.write([line("a", messages=[{"role": "user", "content": "🙂"}], prompt_logprobs=0)])
    job.run(openai_job(job))
    [body] = bodies(job)
    parts = [token["bytes"] for token in body["prompt_logprobs"] if "bytes" in token]
    assert len(parts) > 1 and bytes(value for part in parts for value in part) == "🙂".encode()
    assert all(("\ufffd" in token["token"]) == ("bytes" in token) for token in body["prompt_logprobs"])

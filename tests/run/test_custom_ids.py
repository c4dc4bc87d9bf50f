"""Ids as OpenAI's ``custom_id``, which are texts: 5 and "5" are one id there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_helpers import JobMaker, rows_of
from stub_engine import stub_factory

from batchgen.plan.dry_run import make_plan
from batchgen.plan.trial import try_job


def test_ids_of_one_text_are_one_custom_id(job: JobMaker) -> None:
    job.write([{"id": name, "question": "Why?"} for name in (5, "5", 6)])
    spec = job.spec(output={"format": "openai-batch"})
    assert make_plan(spec)["rows"] == {"total": 3, "good": 2, "bad": 1}
    tried = try_job(spec, 3, print, stub_factory())
    assert [row.record.get("code") for row in tried] == [None, "duplicate_id", None]
    job.run(spec)
    assert [row["custom_id"] for row in job.outputs()] == ["5", "6"]
    (letter,) = job.errors()
    assert (letter["index"], letter["error"]["code"]) == (1, "duplicate_id")


def test_a_row_known_by_its_position_shares_no_custom_id(job: JobMaker) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Why?"}}
    job.write([line, {"prompt": "How?"}, {"prompt": "Who?"}])
    spec = job.spec(output={"format": "openai-batch"})
    job.run(replace(spec, input=replace(spec.input, id=None, prompt=None)))
    assert [row["custom_id"] for row in job.outputs()] == ["1", "2"]
    (letter,) = job.errors()
    assert letter["error"] == {"code": "duplicate_id", "message": "row 0 already has the id '1'"}


def test_a_row_that_cannot_be_read_takes_no_custom_id(job: JobMaker) -> None:
    line = {"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Why?"}}
    job.write(["{broken", line])
    spec = job.spec(output={"format": "openai-batch"})
    job.run(replace(spec, input=replace(spec.input, id=None, prompt=None)))
    assert [row["custom_id"] for row in job.outputs()] == ["0"]
    assert [row["custom_id"] for row in job.errors()] == [None]


def test_a_row_that_cannot_be_read_keeps_its_code_and_its_text(job: JobMaker) -> None:
    job.write(["{broken", *rows_of(1)])
    job.run()
    (letter,) = job.errors()
    assert (letter["id"], letter["code"], letter["row"]) == (None, "bad_json", "{broken")


def test_a_begun_run_whose_ids_become_texts_finds_the_duplicates(job: JobMaker) -> None:
    job.write([{"id": name, "question": "Why?"} for name in (5, "5", *range(10, 40))])
    with pytest.raises(RuntimeError):
        job.run(crashes_at=5)
    assert job.run(job.spec(output={"format": "openai-batch"})).exit_code == 3
    (letter,) = job.errors()
    assert (letter["index"], letter["error"]["code"]) == (1, "duplicate_id")
    assert job.run().exit_code == 0
    assert len(job.outputs()) == 32


def test_a_begun_run_without_ids_may_become_openai_batch(job: JobMaker) -> None:
    job.write(rows_of(40))
    specs = [job.spec(output={"format": name}) for name in ("jsonl", "openai-batch")]
    begun, changed = (replace(spec, input=replace(spec.input, id=None)) for spec in specs)
    with pytest.raises(RuntimeError):
        job.run(begun, crashes_at=5)
    assert job.run(changed).exit_code == 0
    assert len(job.outputs()) == 40

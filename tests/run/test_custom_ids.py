"""Ids as OpenAI's ``custom_id``, which are texts: 5 and "5" are one id there."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("name", "rows", "ids", "failed"),
    [
        ("1", ["line", {"prompt": "How?"}, {"prompt": "Who?"}], ["1", "2"], "row 0 already has the id '1'"),
        ("0", ["{broken", "line"], ["0"], "not valid JSON: Expecting"),
    ],
    ids=["a row known by its position shares none", "a row that cannot be read takes none"],
)
def test_a_custom_id_is_that_of_one_line(
    job: JobMaker, name: str, rows: list[Any], ids: list[str], failed: str
) -> None:
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "Why?"}}
    job.write(line if row == "line" else row for row in rows)
    job.run(job.spec(input={"id": None, "prompt": None}, output={"format": "openai-batch"}))
    assert [row["custom_id"] for row in job.outputs()] == ids
    (letter,) = job.errors()
    assert letter["error"]["message"].startswith(failed) and letter["custom_id"] is None


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
    begun, changed = (job.spec(input={"id": None}, output={"format": name}) for name in ("jsonl", "openai-batch"))
    with pytest.raises(RuntimeError):
        job.run(begun, crashes_at=5)
    assert job.run(changed).exit_code == 0
    assert len(job.outputs()) == 40

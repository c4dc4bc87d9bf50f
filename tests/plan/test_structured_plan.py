"""Rows that ask for structured outputs, in a plan and with --strict: how many, and which are refused and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.core.errors import UsageError
from batchgen.plan.dry_run import PlanOptions, make_plan
from batchgen.plan.text import render_plan
from batchgen.run.invocation import RunOptions

ASKED: dict[int, Any] = {
    0: {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}}},
    1: {"structured_outputs": {"regex": "[ab]+"}},
    2: {"guided_regex": "[ab]+"},
    4: {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
    5: {"guided_json": {"$ref": "#/$defs/missing"}},
    7: {"structured_outputs": {"regex": "(?=a)b"}},
    8: {"structured_outputs": {"regex": "a", "choice": ["b"]}},
}
REFUSED = (4, 5, 7, 8)


@pytest.fixture
def rows(job: JobMaker) -> list[dict[str, Any]]:
    rows = [{**row, "sampling": ASKED.get(index)} for index, row in enumerate(rows_of(10))]
    job.write(rows)
    return rows


def test_a_plan_counts_rows_with_a_schema_and_names_the_refused_ones(job: JobMaker, rows: list[dict[str, Any]]) -> None:
    plan = make_plan(job.spec(), PlanOptions())
    assert plan["structured"] == {"rows": 3, "distinct": 2}
    bad = plan["bad_rows"]
    assert [(row["line"], row["code"]) for row in bad] == [(index + 1, "bad_param") for index in REFUSED]
    assert all(row["message"].startswith("structured_outputs") for row in bad)
    reasons = ("uniqueItems", "missing", "look", "not regex and choice")
    assert all(reason in row["message"] for reason, row in zip(reasons, bad, strict=True))
    text = render_plan(plan)
    assert "structured   3 rows must fit a schema or grammar; different ones: 2" in text
    assert "bad_param 4: line 5, 6, 8, 9" in text and max(map(len, text.splitlines())) <= 80


def test_a_plan_counts_the_jobs_schema_for_every_row_but_those_without(job: JobMaker) -> None:
    job.write([*rows_of(6), {"id": "free", "question": "a", "sampling": {"structured_outputs": {}}}])
    plan = make_plan(job.spec(sampling={"structured_outputs": {"choice": ["a", "b"]}}), PlanOptions())
    assert (plan["structured"], plan["rows"]["bad"]) == ({"rows": 6, "distinct": 1}, 0)
    free = make_plan(job.spec(), PlanOptions())
    assert free["structured"] == {"rows": 0, "distinct": 0} and "structured" not in render_plan(free)
    with pytest.raises(UsageError, match=r"^sampling\.structured_outputs: .*uniqueItems"):
        make_plan(job.spec(sampling={"structured_outputs": {"json": {"uniqueItems": True}}}), PlanOptions())


def test_strict_refuses_them_before_anything_runs(job: JobMaker, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(
        UsageError, match=r"--strict: 4 bad rows, nothing was run:\n .*:5: bad_param: structured_outputs"
    ):
        job.run(options=RunOptions(strict=True, progress="quiet"))
    assert not job.engines and not job.output.exists()


def test_the_plan_of_a_run_is_that_of_its_errors(job: JobMaker, rows: list[dict[str, Any]]) -> None:
    plan = make_plan(job.spec(), PlanOptions())
    assert job.run().exit_code == 3
    assert [(row["line"], row["message"]) for row in plan["bad_rows"]] == [
        (row["line"], row["message"]) for row in job.errors()
    ]
    assert [row["row"] for row in job.errors()] == json.loads(json.dumps([rows[index] for index in REFUSED]))

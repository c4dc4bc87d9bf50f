"""``output.answer`` in whole runs: in the records of every format, in the report, and in its hints."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow.parquet as pq
import pytest
from report_samples import ABOUT, record
from run_helpers import JobMaker, quiet, rows_of, without_timings
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode, ResumeMismatch, UsageError
from batchgen.core.shard import Shard
from batchgen.report.advice import advice
from batchgen.report.build import build_report
from batchgen.report.rows import RowTotals, interval
from batchgen.report.text import render_report
from batchgen.run.invocation import RunOptions
from batchgen.run.retry import retry_job

RULE = r"(\w+)"  # the last word of what the stub says


@pytest.mark.parametrize("form", ["jsonl", "parquet", "openai-batch"])
def test_every_format_keeps_the_answer_beside_the_column_of_that_name(form: str, job: JobMaker) -> None:
    job.write(rows_of(6))
    spec = job.spec(output={"answer": RULE, "expected": "answer", "format": form}, sampling={"n": 2, "temperature": 1})
    report = job.run(spec).report
    assert report is not None and report["accuracy"]["total"] == 6
    path = job.output / ("outputs.parquet" if form == "parquet" else "outputs.jsonl")
    for index, whole in enumerate(without_timings(path)):
        row = whole.get("kept_columns", whole)
        assert row["input_answer"] == str(index**2)
        assert isinstance(row["answer"], str)
        assert "samples" not in row or row["samples"][0]["answer"] == row["answer"]
    if form == "parquet":
        assert pq.read_schema(path).names[:4] == ["id", "index", "text", "answer"]


def test_without_the_rule_a_column_of_that_name_stays(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run(job.spec(output={"expected": "answer"}))
    assert [row["answer"] for row in job.outputs()] == ["0", "1"]


def test_stopped_sharded_and_retried_runs_score_as_a_whole_one(job: JobMaker) -> None:
    job.write([*rows_of(20), {"id": "q-20", "answer": "5"}])
    output = {"answer": RULE, "expected": "answer"}
    whole = job.run(job.spec(output={**output, "path": str(job.folder / "whole")})).report
    assert whole is not None
    while job.run(job.spec(output=output), quiet(max_total_tokens=40)).exit_code == ExitCode.STOPPED:
        pass
    for number in (1, 2):
        part = job.spec(output={**output, "path": str(job.folder / f"part{number}")})
        job.run(part, RunOptions(shard=Shard(number, 2), progress="quiet"))
    call(["merge", *(str(job.folder / f"part{number}") for number in (1, 2)), "-o", str(job.folder / "merged")])
    for name in ("out", "merged"):
        found = json.loads((job.folder / name / "report.json").read_text())
        assert found["accuracy"] == whole["accuracy"]
        assert without_timings(job.folder / name / "outputs.jsonl") == without_timings(
            job.folder / "whole/outputs.jsonl"
        )
    (letter,) = job.errors()
    letter["row"]["question"] = "What?"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    retried = retry_job(job.output, quiet(), {}, engine_factory=stub_factory([])).report
    assert retried is not None and retried["accuracy"]["total"] == 21
    assert "answer" in job.outputs()[20]


def test_another_rule_makes_other_records_so_a_resume_refuses_it(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(job.spec(output={"answer": RULE}))
    with pytest.raises(ResumeMismatch, match=r"output\.answer"):
        job.run(job.spec(output={"answer": "choice"}))


def test_with_reuse_a_run_gets_answers_and_computes_nothing(job: JobMaker) -> None:
    job.write(rows_of(6))
    earlier, fresh = str(job.folder / "earlier"), str(job.folder / "fresh")
    output = {"answer": RULE, "expected": "answer"}
    sampling = {"n": 2, "temperature": 1}
    job.run(job.spec(output={"path": earlier}, sampling=sampling))
    job.run(job.spec(output={**output, "path": fresh}, sampling=sampling))
    job.run(job.spec(output={**output, "reuse": [earlier]}, sampling=sampling))
    assert sum(engine.num_started for engine in job.engines) == 0
    lines = [(folder / "outputs.jsonl").read_text() for folder in (job.output, job.folder / "fresh")]
    assert len({re.sub(r'"timings": {.*?}', "", text) for text in lines}) == 1


@pytest.mark.parametrize("rule", ["parsed.n", "lastnumber"])
def test_a_rule_that_cannot_work_is_refused_before_anything_runs(rule: str, job: JobMaker) -> None:
    job.write(rows_of(1))
    with pytest.raises(UsageError, match=r"output\.parse_json|--answer = 'lastnumber': must be last_number"):
        job.run(job.spec(output={"answer": rule}))
    assert not job.output.exists()


# ---------------------------------------------------------------- the report


def scored(pairs: list[tuple[str, Any]], answer: str | None = None) -> dict[str, Any]:
    """The report over rows of a text, or answer, and what is expected."""
    totals = RowTotals("wanted", answer)
    for index, (text, wanted) in enumerate(pairs):
        totals.add_result(record(index, text=text, answer=text or None, wanted=wanted))
    return build_report(totals, {"wall_s": 1.0}, ABOUT)


HINTS = {
    "last_number": [("It costs $1,234.", "1234")] * 240 + [("I do not know", "5")] * 60,
    "choice": [("The answer is B.", "B")] * 3,
    "REGEX": [("It is Paris, I think", "Paris")] * 3,
}


@pytest.mark.parametrize("rule", HINTS)
def test_where_no_text_is_right_the_setting_that_would_help_is_named(rule: str) -> None:
    (text,) = [text for text in advice(scored(HINTS[rule])) if "expected" in text]
    assert f'[output] answer = "{rule}"' in text
    if rule == "last_number":
        assert text.startswith("no text equals [output] expected (0 of 300)") and "240 would be right" in text
    right = scored([*HINTS[rule], ("x", "x")])
    assert not any("expected" in text for text in advice(right))
    assert "helped" not in right["accuracy"]


def test_where_a_rule_finds_nothing_the_report_says_so() -> None:
    (text,) = [text for text in advice(scored([("", "1"), ("2", "1")], "last_number")) if "expected" in text]
    assert text == "no answer equals [output] expected (0 of 2); 1 texts have none that [output] answer finds"


def test_the_report_shows_the_interval_and_five_wrong_rows() -> None:
    found = scored([(str(index % 10), "1") for index in range(100)], "last_number")
    assert found["accuracy"] == {
        **{"correct": 10, "total": 100, "exact_match": 0.1, "interval": [0.055229, 0.174366], "without_answer": 0},
        "wrong": [{"id": f"r{i}", "index": i, "answer": str(i), "expected": "1"} for i in (0, 2, 3, 4, 5)],
    }
    text = render_report(found)
    assert "10.00% (10 of 100; 95% interval 5.5% to 17.4%)" in text and "r2: 2 (expected 1)" in text


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (1, 1), (0, 300), (300, 300), (287, 300)])
def test_the_interval_holds_the_share_and_is_never_a_point(correct: int, total: int) -> None:
    low, high = interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    assert low < high

"""What a run costs: the report's hours at the price of the job, over all invocations, and a limit on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from report_samples import ABOUT, record
from run_helpers import JobMaker, quiet, rows_of

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode, UsageError
from batchgen.plan import dry_run
from batchgen.plan.text import render_plan
from batchgen.report.build import build_report
from batchgen.report.facts import figures
from batchgen.report.rows import RowTotals
from batchgen.report.text import render_report
from batchgen.run import progress
from batchgen.run.status import read_status, render_status

PRICED = {"price_per_hour": 36.0}  # 0.01 per second


@pytest.fixture
def step_of_a_second(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the steps of a stub engine take a second each of the run's clock, and nothing else any time."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def step(number: int) -> None:
        clock.now_s += 1.0

    return step


def test_a_run_that_has_spent_its_limit_loads_no_model_and_one_begun_anew_starts_from_nothing(
    job: JobMaker, step_of_a_second: Any
) -> None:
    job.write(rows_of(400))
    spec = job.spec(cluster=PRICED, sampling={"max_tokens": 2})
    for overwrite, num_engines in ((False, 1), (False, 0), (True, 1)):
        options = replace(quiet(max_cost=2.0), overwrite=overwrite)
        outcome = job.run(spec, options, before_step=step_of_a_second, max_num_seqs=1)
        assert outcome.exit_code == 75
        assert outcome.lines[0].endswith("of 400 rows finished; give a higher --max-cost to resume")
        assert len(job.engines) == num_engines
        assert 2.0 <= read_status(job.output)["cost"]["total"] <= 2.04
        assert read_status(job.output)["advice"] == "give a higher --max-cost to resume"


def test_a_run_stops_within_two_percent_of_its_max_cost_and_resumed_ones_add_up(
    job: JobMaker, step_of_a_second: Any
) -> None:
    job.write(rows_of(400))
    spec = job.spec(cluster=PRICED, sampling={"max_tokens": 2})
    for max_cost in (2.0, 4.0, 4.0, 5.0):  # the third has nothing left to spend
        options = quiet(max_cost=max_cost)
        outcome = job.run(spec, options, before_step=step_of_a_second, max_num_seqs=1)
        assert (outcome.exit_code, outcome.stop_reason) == (75, f"max cost of {max_cost:.2f} in all")
        status = read_status(job.output)
        assert max_cost <= status["cost"]["total"] <= 1.02 * max_cost
        assert "\ncost    " in render_status(status)
    report = job.run(spec, before_step=step_of_a_second, max_num_seqs=1).report
    assert report is not None
    assert report["sessions"] == 5
    assert report["cost"]["total"] == pytest.approx(36 * report["device_s"] / 3600)
    assert report["cost"] == read_status(job.output)["cost"]
    plan = dry_run.make_plan(spec)
    assert plan["cost"]["total"] == pytest.approx(36 * plan["estimate"]["wall_s"] / 3600, abs=1e-5)
    assert "cost " in render_plan(plan)


@pytest.mark.parametrize(("rows", "kind"), [({}, "output"), ({"choices": [{"text": "a"}, {"text": "b"}]}, "prompt")])
def test_the_cost_is_the_reports_gpu_hours_of_all_workers_at_the_price(rows: dict[str, Any], kind: str) -> None:
    totals = RowTotals()
    totals.add_result(record(0, **rows))
    facts = ABOUT | {"numerics": {"device": "cuda"}, "price_per_hour": 2.1}
    report = build_report(totals, {"wall_s": 3600.0, "device_s": 3 * 3600.0}, facts)
    hours = report[f"device_hours_per_million_{kind}_tokens"]["hours"]
    assert report["cost"]["total"] == pytest.approx(6.3)
    assert report["cost"][f"per_million_{kind}_tokens"] == pytest.approx(2.1 * hours)
    shown = f"{2.1 * hours:,.2f}"
    assert {("cost", "6.30"), (f"cost per million {kind} tokens", shown)} <= {*figures(report)}
    assert f"6.30, {shown} per million {kind} tokens" in " ".join(render_report(report).split())


def test_a_run_without_a_price_has_no_cost_and_takes_no_max_cost(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(2))
    with pytest.raises(UsageError, match="--max-cost needs a price: give --price-per-hour"):
        job.run(options=quiet(max_cost=1.0))
    assert call(["run", str(job.toml()), "--max-cost", "1"]) == ExitCode.USAGE
    assert call(["run", str(job.toml()), "--max-cost", "nan", "--price-per-hour", "1"]) == ExitCode.USAGE
    assert not job.output.exists()
    report = job.run().report
    assert report is not None
    assert report.keys().isdisjoint({"cost", "price_per_hour"})
    assert read_status(job.output)["cost"] is None

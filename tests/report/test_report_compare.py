"""The gate of ``report --compare``: which figures count, and when a change is a regression."""

from __future__ import annotations

import json
from typing import Any

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.cli.main import call
from batchgen.core.errors import GateFailed
from batchgen.report.compare import compare_reports


def report(rate: float = 100.0, failed: int = 0, exact: float | None = 0.9, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "tokens_per_s": {"completion": rate, "total": 3 * rate},
        "rows": {"total": 100, "done": 100 - failed, "failed": failed},
        "accuracy": {"exact_match": exact},
        "wall_s": 1000 / rate,
        **more,
    }


def gate(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """True; raises GateFailed for a regression."""
    compare_reports(now, before).check(0.05)
    return True


def test_alike_reports_pass() -> None:
    assert gate(report(), report())


def test_a_rate_may_fall_by_the_share_given_and_no_more() -> None:
    gate(report(rate=95.1), report())
    with pytest.raises(GateFailed, match=r"output tokens/s 100\.0 -> 94\.0"):
        gate(report(rate=94), report())


def test_one_more_failed_row_is_a_regression() -> None:
    with pytest.raises(GateFailed, match="failed rows"):
        gate(report(failed=1), report())
    gate(report(), report(failed=1))


def test_accuracy_may_fall_by_the_share_given_and_no_more() -> None:
    gate(report(exact=0.86), report())
    with pytest.raises(GateFailed, match="exact match"):
        gate(report(exact=0.85), report())


def test_wall_time_and_latencies_do_not_count() -> None:
    assert gate(report(wall_s=1e6, latency_s={"ttft_s": {"p50": 9.0}}), report(latency_s={"ttft_s": {"p50": 0.1}}))


def test_a_figure_that_one_report_lacks_is_no_regression() -> None:
    assert gate(report(exact=None), report())


def test_another_model_is_pointed_out() -> None:
    assert "not alike: model" in compare_reports(report(model="other"), report()).render(None)


def test_the_table_fits_80_columns_and_marks_what_regressed() -> None:
    text = compare_reports(report(rate=10, model="x" * 100), report()).render(0.05)
    assert max(map(len, text.splitlines())) <= 80
    assert "REGRESSION" in text


def test_the_command_exits_4_on_a_regression_and_0_without_a_gate(
    job: JobMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(8))
    job.run()
    last = job.folder / "last"
    last.mkdir()
    found = json.loads((job.output / "report.json").read_text())
    found["tokens_per_s"]["completion"] *= 10
    (last / "report.json").write_text(json.dumps(found))
    command = ["report", str(job.output), "--compare", str(last)]
    assert call(command) == 0
    capsys.readouterr()
    assert call([*command, "--max-regress", "5%", "--json"]) == 4
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [figure["name"] for figure in figures if figure["is_regression"]] == ["output tokens/s"]


def test_a_limit_without_a_baseline_is_a_usage_error(job: JobMaker) -> None:
    job.write(rows_of(1))
    job.run()
    assert call(["report", str(job.output), "--max-regress", "5%"]) == 2


def test_a_baseline_may_be_a_report_that_was_kept(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(8))
    job.run()
    kept = job.folder / "baseline.json"
    kept.write_bytes((job.output / "report.json").read_bytes())
    assert call(["report", str(job.output), "--compare", str(kept), "--max-regress", "5%"]) == 0
    assert capsys.readouterr().out.count("passes") >= 3


@pytest.mark.parametrize("other", [["--html", "page.html"], ["--format", "prometheus"]])
def test_a_comparison_has_no_page_and_no_metrics(job: JobMaker, other: list[str]) -> None:
    job.write(rows_of(1))
    job.run()
    assert call(["report", str(job.output), "--compare", str(job.output), *other]) == 2
    assert not (job.folder / "page.html").exists()


def test_a_fine_limit_is_told_as_it_was_given() -> None:
    with pytest.raises(GateFailed, match=r"may fall by 0\.5%"):
        compare_reports(report(rate=90), report()).check(0.005)

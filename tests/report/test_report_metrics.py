"""Metrics for the textfile collector: read back by Prometheus' own parser, written whole, present for every ending."""

from __future__ import annotations

import pytest
from report_samples import made
from run_helpers import JobMaker, rows_of

from batchgen.cli.main import call
from batchgen.report.prometheus import render_metrics

parser = pytest.importorskip("prometheus_client.parser", reason="the extra batchgen[metrics] is not installed")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and further labels."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert {"run", "model"} <= sample.labels.keys()
            more = [value for name, value in sorted(sample.labels.items()) if name not in ("run", "model")]
            found[(sample.name, *more)] = sample.value
    return found


def test_figures_read_back_as_the_report_has_them() -> None:
    report = made(errors=3)
    report["structured"] = {"rows": 9, "samples": 9, "incomplete": 2, "forced_tokens": 5, "forced_share": 0.25}
    found = samples(render_metrics("runs/a", "m", report, exit_code=3))
    assert found["batchgen_rows", "done"] == 20
    assert found["batchgen_failed_rows", "too_long"] == 3
    assert found["batchgen_wall_seconds",] == report["wall_s"]
    assert found["batchgen_latency_seconds", "total", "0.5"] == report["latency_s"]["total_s"]["p50"]
    assert found["batchgen_exit_code",] == 3
    names = ("structured_answers", "incomplete_answers", "forced_tokens_ratio")
    assert [found[f"batchgen_{name}",] for name in names] == [9, 2, 0.25]


def test_names_with_quotes_and_newlines_are_escaped() -> None:
    text = render_metrics('a"b\nc', "m", None, exit_code=0)
    (family,) = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels["run"] == 'a"b\nc'


def test_a_run_leaves_its_metrics_and_so_does_one_that_was_done_already(job: JobMaker) -> None:
    job.write([*rows_of(5), "{"])
    job.run()
    file = job.folder / "job.prom"
    for _ in range(2):  # the second time in place of the first
        assert call(["run", str(job.toml()), "--metrics-file", str(file), "--quiet"]) == 3
    found = samples(file.read_text())
    assert found["batchgen_rows", "done"] == 5
    assert found["batchgen_exit_code",] == 3
    assert sorted(path.name for path in job.folder.glob("*.prom*")) == ["job.prom"]


@pytest.mark.parametrize("name", ["input.jsonl", "out/outputs.jsonl", "out/job.json", "."])
def test_metrics_replace_no_file_but_metrics(job: JobMaker, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = job.write(rows_of(5)).read_bytes()
    assert call(["run", str(job.toml()), "--metrics-file", str(job.folder / name)]) == 2
    assert "choose another path" in capsys.readouterr().err
    assert job.input.read_bytes() == before
    assert not job.output.exists()


def test_a_run_without_the_library_is_refused_before_it_starts(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(1))
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    assert call(["run", str(job.toml()), "--metrics-file", str(job.folder / "x.prom")]) == 2
    assert "pip install prometheus_client" in capsys.readouterr().err
    assert not job.output.exists()

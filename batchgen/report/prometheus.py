"""A run's figures as Prometheus metrics, for node_exporter's textfile collector (extra ``batchgen[metrics]``).

A batch job is gone before anybody could scrape it; a file outlives it. All figures are gauges of the last run, told
apart by the labels ``run`` (its directory) and ``model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchgen.core.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_RUN_LABELS = ("run", "model")
_QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}


def check_available() -> None:
    """Raises UsageError where prometheus_client is missing."""
    try:
        import prometheus_client  # noqa: F401 - whether it can be imported is all we want to know
    except ImportError:
        raise UsageError("Prometheus metrics need prometheus_client: pip install 'batchgen[metrics]'") from None


def render_metrics(run: str, model: str, report: Mapping[str, Any] | None, exit_code: int | None = None) -> str:
    """The metrics in Prometheus' text format. Raises UsageError where prometheus_client is missing."""
    check_available()
    from prometheus_client import CollectorRegistry, generate_latest

    gauges = _Gauges(CollectorRegistry(), run, model)
    if exit_code is not None:
        gauges.add("exit_code", "How the last invocation ended: 0 done, 3 rows failed, 75 stopped", exit_code)
    if report is not None:
        _add_report(gauges, report)
    return generate_latest(gauges.registry).decode()


class _Gauges:
    """Gauges of one run in a registry of their own."""

    def __init__(self, registry: CollectorRegistry, run: str, model: str) -> None:
        self.registry = registry
        self._labels = (run, model)

    def add(self, name: str, text: str, value: float) -> None:
        """One figure."""
        self.add_by(None, name, text, {"": value})

    def add_by(self, label: str | tuple[str, str] | None, name: str, text: str, values: Mapping[Any, float]) -> None:
        """Figures told apart by one or two further labels, the keys of ``values``."""
        from prometheus_client import Gauge

        extra = () if label is None else (label,) if isinstance(label, str) else label
        gauge = Gauge(f"batchgen_{name}", text, (*_RUN_LABELS, *extra), registry=self.registry)
        for key, value in values.items():
            more = () if label is None else key if isinstance(key, tuple) else (key,)
            gauge.labels(*self._labels, *more).set(value)


def _add_report(gauges: _Gauges, report: Mapping[str, Any]) -> None:
    rows = {state: report["rows"][state] for state in ("done", "failed")}
    kinds = {kind: report["tokens"][kind] for kind in ("prompt", "cached", "completion")}
    latencies = {
        (name.removesuffix("_s"), quantile): found[key]
        for name, found in report["latency_s"].items()
        for key, quantile in _QUANTILES.items()
        if found[key] is not None
    }
    finished_at = datetime.fromisoformat(report["finished_at"]).timestamp()
    gauges.add("finished_timestamp_seconds", "When the run was finished", finished_at)
    gauges.add("wall_seconds", "Wall time of all invocations", report["wall_s"])
    gauges.add_by("state", "rows", "Rows by what became of them", rows)
    gauges.add_by("code", "failed_rows", "Failed rows by error code", report["errors"])
    gauges.add_by("kind", "tokens", "Tokens of done rows", kinds)
    gauges.add_by("kind", "tokens_per_second", "Tokens over wall time", report["tokens_per_s"])
    gauges.add_by("phase", "phase_seconds", "Wall time by kind of work", report["seconds"])
    gauges.add_by(("phase", "quantile"), "latency_seconds", "Quantiles of row latencies", latencies)
    gauges.add("preemptions", "Preemptions of done rows", report["preemptions"])
    gauges.add("duplicates", "Rows answered with the result of an identical one", report["duplicates"])
    if report["tail_s"] is not None:
        gauges.add("tail_seconds", "Time at the end with less than half of the sequences", report["tail_s"])
    if report["prefix_cache"] is not None:
        gauges.add("prefix_cache_hit_ratio", "Share of prompt tokens found in it", report["prefix_cache"]["hit_rate"])
    if report["roofline"] and report["roofline"]["share"] is not None:
        gauges.add("roofline_ratio", "Share of this machine's measured rates", report["roofline"]["share"])
    gauges.add("sessions", "Invocations the run took", report["sessions"])
    gauges.add("max_rss_bytes", "Most memory the process held", report["max_rss_bytes"])
    accuracy = report.get("accuracy")
    if accuracy and accuracy["exact_match"] is not None:
        gauges.add("exact_match_ratio", "Share of compared rows that match exactly", accuracy["exact_match"])

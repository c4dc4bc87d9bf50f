"""A report as Prometheus metrics, for node_exporter's textfile collector (extra ``batchgen[metrics]``).

A batch job ends before Prometheus could scrape it; a file outlives it. All metrics are gauges of the last run, with
the labels ``run`` (its directory) and ``model``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.report.facts import at
from batchgen.report.rows import LATENCIES

_RUN_LABELS = ("run", "model")
_GAUGES = (  # name, help text, where the report has its figures, and the labels that their keys are values of
    ("wall_seconds", "Wall time of all invocations", "wall_s", ()),
    ("rows", "Rows by what became of them", "rows", ("state",)),
    ("failed_rows", "Failed rows by error code", "errors", ("code",)),
    ("tokens", "Tokens of done rows", "tokens", ("kind",)),
    ("tokens_per_second", "Tokens of computed rows over wall time", "tokens_per_s", ("kind",)),
    ("phase_seconds", "Wall time by kind of work", "seconds", ("phase",)),
    ("latency_seconds", "Quantiles of row latencies", "latency_s", ("phase", "quantile")),
    ("preemptions", "Preemptions of done rows", "preemptions", ()),
    ("duplicates", "Rows answered with a copy of an identical one's result", "duplicates", ()),
    ("tail_seconds", "Time at the end with less than half of the sequences", "tail_s", ()),
    ("prefix_cache_hit_ratio", "Share of prompt tokens found in it", "prefix_cache.hit_rate", ()),
    ("roofline_ratio", "Share of this machine's measured rates", "roofline.share", ()),
    ("sessions", "Invocations the run took", "sessions", ()),
    ("max_rss_bytes", "Most memory the process held", "max_rss_bytes", ()),
    ("structured_answers", "Answers with structured outputs", "structured.samples", ()),
    ("incomplete_answers", "Structured answers that ended before they were complete", "structured.incomplete", ()),
    ("forced_tokens_ratio", "Share of generated tokens that a grammar forced", "structured.forced_share", ()),
    ("exact_match_ratio", "Share of compared rows that match exactly", "accuracy.exact_match", ()),
)
_WITHOUT_TOTAL = ("rows", "tokens")  # a query adds up their parts
_LABEL_VALUES: dict[str, str] = {"p50": "0.5", "p90": "0.9", "p99": "0.99"} | {
    name: name.removesuffix("_s") for name in LATENCIES
}


def check_available() -> None:
    """Raises UsageError where prometheus_client is missing."""
    try:
        import prometheus_client  # noqa: F401 - only whether it can be imported matters
    except ImportError:
        raise UsageError("Prometheus metrics need prometheus_client: pip install prometheus_client") from None


def render_metrics(run: str, model: str, report: Mapping[str, Any] | None, exit_code: int) -> str:
    """The metrics in Prometheus' text format. Raises UsageError where prometheus_client is missing."""
    check_available()
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def add(name: str, text: str, found: Any, labels: tuple[str, ...] = ()) -> None:
        if found is None:
            return
        gauge = Gauge(f"batchgen_{name}", text, (*_RUN_LABELS, *labels), registry=registry)
        for keys, value in _flat(found):
            if value is not None and not (name in _WITHOUT_TOTAL and keys == ("total",)):
                gauge.labels(run, model, *keys).set(value)

    add("exit_code", "How the last invocation ended: 0 done, 3 rows failed, 75 stopped", exit_code)
    if report is not None:
        finished_at = datetime.fromisoformat(report["finished_at"]).timestamp()
        add("finished_timestamp_seconds", "When the run was finished", finished_at)
        for name, text, path, labels in _GAUGES:
            add(name, text, at(report, path), labels)
    return generate_latest(registry).decode()


def _flat(found: Any, *keys: str) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """The figures in a tree with the keys that lead to each, as values of labels."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _flat(value, *keys, _LABEL_VALUES.get(str(key), str(key)))
    else:
        yield keys, found

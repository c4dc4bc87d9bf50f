"""The report as text for a person, 80 columns wide at most: how long, how fast, what failed, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchgen.units import format_duration

_WIDTH = 80
_LABEL = 12
_ACCOUNTS = {"read": "reading", "load": "loading", "sample": "sampling", "host": "between steps", "write": "writing"}
_ERRORS_SHOWN = 10


def render_report(report: Mapping[str, Any]) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    table = list(_latencies(report["latency_s"]))
    return "\n".join([*_summary(report), *_details(report), *(["", *table] if len(table) > 1 else [])])


def _summary(report: Mapping[str, Any]) -> Iterator[str]:
    rows, tokens, rates = report["rows"], report["tokens"], report["tokens_per_s"]
    sessions = report["sessions"]
    over = f" over {sessions} invocations" if sessions > 1 else ""
    yield from _line(
        "took", f"{format_duration(report['wall_s'])}{over}: {rows['done']:,} done, {rows['failed']:,} failed"
    )
    yield from _line("speed", f"{rates['completion']:,.0f} tokens/s out, {rates['total']:,.0f} in and out")
    failed = sorted(report["errors"].items(), key=lambda item: -item[1])[:_ERRORS_SHOWN]
    codes = ", ".join(f"{code} {count:,}" for code, count in failed)
    yield from _line("failed", f"{rows['failed']:,} rows: {codes}" if rows["failed"] else "no row")
    yield from _line("exact match", _accuracy(report.get("accuracy")))
    yield from _line("bound by", report["bound_by"])
    for number, text in enumerate(report["advice"]):
        yield from _line("advice" if not number else "", text)
    yield from _line("tokens", f"{tokens['prompt']:,} in ({tokens['cached']:,} cached), {tokens['completion']:,} out")


def _details(report: Mapping[str, Any]) -> Iterator[str]:
    wall_s = report["wall_s"] or 1.0
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in report["finish_reasons"].items())
    yield from _line("finished by", reasons)
    spent = sorted(report["seconds"].items(), key=lambda item: -item[1])
    shares = (f"{_ACCOUNTS.get(name, name)} {s / wall_s:.0%}" for name, s in spent if s >= 0.005 * wall_s)
    yield from _line("time went to", ", ".join(shares))
    yield from _line("batch", ", ".join(_batch(report)))
    hours = report["device_hours_per_million_output_tokens"]
    if hours["hours"] is not None:
        yield from _line("cost", f"{hours['hours']:,.2f} {hours['unit'].upper()}-hours per million output tokens")
    yield from _line("ran on", _machine(report))


def _batch(report: Mapping[str, Any]) -> Iterable[str]:
    occupancy = report["occupancy"]
    if occupancy["sequences"] is not None:
        yield f"{occupancy['sequences']:,.1f} of {occupancy['max_num_seqs']:,} sequences"
        yield f"{occupancy['tokens_per_step']:,.1f} tokens a step"
        yield f"KV {occupancy['kv_use']:.0%} used, {occupancy['max_kv_use']:.0%} at most"
    if report["preemptions"]:
        yield f"{report['preemptions']:,} preemptions"


def _machine(report: Mapping[str, Any]) -> str:
    numerics, threads = report["numerics"], report["threads"]
    parts = [report["machine"]["processor"] or report["machine"]["platform"]]
    parts += [f"{threads} thread{'s' if threads > 1 else ''}"] if threads else []
    parts += [" on ".join(numerics.values())] if numerics else []
    return ", ".join(parts)


def _latencies(latencies: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    yield f"{'seconds':<{_LABEL}} {'p50':>9} {'p90':>9} {'p99':>9}"
    for name, found in latencies.items():
        values = [found[share] for share in ("p50", "p90", "p99")]
        if None not in values:
            yield f"{name.removesuffix('_s'):<{_LABEL}} " + " ".join(f"{value:>9.3f}" for value in values)


def _line(label: str, text: str) -> Iterator[str]:
    """A labelled line, wrapped behind its label; nothing where there is no text."""
    for part in textwrap.wrap(text, _WIDTH - _LABEL - 1):
        yield f"{label:<{_LABEL}} {part}"
        label = ""


def _accuracy(accuracy: Mapping[str, Any] | None) -> str:
    if accuracy is None:
        return ""
    if not accuracy["total"]:
        return "no row has the expected column"
    return f"{accuracy['exact_match']:.2%} ({accuracy['correct']:,} of {accuracy['total']:,})"

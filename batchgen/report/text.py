"""The report as text for a person, 80 columns wide at most: how long, how fast, what failed, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchgen.core.units import counted, format_duration, printable

_WIDTH = 80
_LABEL = 12
_ACCOUNTS = {"read": "reading", "load": "loading", "sample": "sampling", "host": "between steps", "write": "writing"}
_ERRORS_SHOWN = 10


def render_report(report: Mapping[str, Any]) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    table = list(_latencies(report["latency_s"]))
    lines = [*_summary(report), *_details(report), *(["", *table] if len(table) > 1 else [])]
    return "\n".join(map(printable, lines))


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
    yield from _line("spared", ", ".join(_spared(report)))


def _details(report: Mapping[str, Any]) -> Iterator[str]:
    wall_s = report["wall_s"] or 1.0
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in report["finish_reasons"].items())
    yield from _line("finished by", reasons)
    spent = sorted(report["seconds"].items(), key=lambda item: -item[1])
    shares = (f"{_ACCOUNTS.get(name, name)} {s / wall_s:.0%}" for name, s in spent if s >= 0.005 * wall_s)
    yield from _line("time went to", ", ".join(shares))
    yield from _line("batch", ", ".join(_batch(report)))
    yield from _line("tail", _tail(report))
    yield from _line("roofline", describe_roofline(report["roofline"]))
    yield from _line("memory", ", ".join(_memory(report)))
    hours = report["device_hours_per_million_output_tokens"]
    if hours["hours"] is not None:
        yield from _line("cost", f"{hours['hours']:,.2f} {hours['unit'].upper()}-hours per million output tokens")
    yield from _line("ran on", _machine(report))


def _batch(report: Mapping[str, Any]) -> Iterable[str]:
    occupancy = report["occupancy"]
    if occupancy["sequences"] is not None:
        yield f"{occupancy['sequences']:,.1f} of {occupancy['max_num_seqs']:,} sequences"
        yield f"{occupancy['tokens_per_step']:,.1f} of {occupancy['max_num_batched_tokens']:,} tokens a step"
        yield f"KV {occupancy['kv_use']:.0%} used, {occupancy['max_kv_use']:.0%} at most"
    if report["preemptions"]:
        yield f"{report['preemptions']:,} preemptions ({report['recomputed_tokens']:,} tokens recomputed)"


def _spared(report: Mapping[str, Any]) -> Iterator[str]:
    """What did not have to be computed."""
    cache = report["prefix_cache"]
    if cache and cache["hit"]:
        yield f"{cache['hit']:,} prompt tokens by the prefix cache ({cache['hit_rate']:.0%} of those looked up)"
    if report["duplicates"]:
        yield f"{counted(report['duplicates'], 'row')} like another one"


def _tail(report: Mapping[str, Any]) -> str:
    if not report["tail_s"]:
        return ""
    share = report["tail_s"] / (report["wall_s"] or 1.0)
    return f"{format_duration(report['tail_s'])} at the end with less than half of the sequences ({share:.0%})"


def describe_roofline(roofline: Mapping[str, Any] | None) -> str:
    """What was reached of this machine's measured rates, and where those come from."""
    if roofline is None:
        return ""
    if roofline["share"] is None:
        return "not known; batchgen bench measures it"
    flops = f"{roofline['flops_share']:.0%} of {roofline['flops_per_s'] / 1e9:,.0f} GFLOP/s"
    moved = f"{roofline['bytes_share']:.0%} of {roofline['memory_bytes_per_s'] / 1e9:,.0f} GB/s"
    return f"{flops}, {moved} while generating ({roofline['source']}, {roofline['measured_at'][:10]})"


def _memory(report: Mapping[str, Any]) -> Iterator[str]:
    if report["max_rss_bytes"]:
        yield f"{report['max_rss_bytes'] / 2**20:,.0f} MiB at most"
    if report["sizes"]:
        yield f"KV {report['sizes']['kv_bytes'] / 2**20:,.0f} MiB in blocks of {report['sizes']['block_size']} tokens"


def _machine(report: Mapping[str, Any]) -> str:
    numerics, threads = report["numerics"], report["threads"]
    parts = [report["machine"]["processor"] or report["machine"]["platform"]]
    parts += [counted(threads, "thread")] if threads else []
    parts += [describe_numerics(numerics)] if numerics else []
    parts += [f"{report['sizes']['kernels']} kernels"] if report["sizes"] else []
    return ", ".join(parts)


def describe_numerics(numerics: Mapping[str, str]) -> str:
    """Dtype, device and, where they are known, kernels as a person says them; empty where nothing is known."""
    named = " on ".join(value for key, value in numerics.items() if key != "kernels")
    return f"{named} ({numerics['kernels']})" if "kernels" in numerics else named


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

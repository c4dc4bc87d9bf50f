"""The report as one HTML file that needs nothing else: no script, no font, no request, light and dark, any width.

The page's policy forbids all loading, and every text of the job is escaped: ids and paths come from strangers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from batchgen.core.storage import check_replaceable, write_atomic
from batchgen.core.units import format_duration, shortened
from batchgen.report.plots import draw
from batchgen.report.text import describe_numerics, describe_roofline

_ID_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the page; one without a head lists names and texts."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]


def write_html(report: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Raises UsageError without matplotlib or where ``path`` is a file of another kind, StorageError where it cannot be
    written.
    """
    check_replaceable(path, b"<title>batchgen report:", "a report page")
    write_atomic(path, render_html(report).encode())


def render_html(report: Mapping[str, Any]) -> str:
    """The page as text; ``report`` is the content of ``report.json``. Raises UsageError without matplotlib."""
    source = files("batchgen.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    tables = [_errors(report), _latencies(report), _slowest(report), _about(report)]
    return environment.from_string(source).render(
        model=report["model"],
        subtitle=f"{', '.join(report['input'])} · finished {_clock(report['finished_at'])}",
        tiles=_tiles(report),
        bound_by=report["bound_by"],
        advice=report["advice"],
        pictures=[(title, Markup(svg)) for title, svg in draw(report).items()],
        tables=[table for table in tables if table.rows],
    )


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    rows, tokens, rates = report["rows"], report["tokens"], report["tokens_per_s"]
    hours = report["device_hours_per_million_output_tokens"]
    tiles = [
        ("wall time", format_duration(report["wall_s"]), False),
        ("tokens/s out", f"{rates['completion']:,.0f}", False),
        ("tokens/s in and out", f"{rates['total']:,.0f}", False),
        ("rows done", f"{rows['done']:,}", False),
        ("rows failed", f"{rows['failed']:,}", rows["failed"] > 0),
        ("tokens in", f"{tokens['prompt']:,}", False),
        ("tokens out", f"{tokens['completion']:,}", False),
    ]
    accuracy = report.get("accuracy")
    if accuracy and accuracy["total"]:
        tiles.append(("exact match", f"{accuracy['exact_match']:.1%}", False))
    if hours["hours"] is not None:
        tiles.append((f"{hours['unit'].upper()}-hours / M tokens out", f"{hours['hours']:,.2f}", False))
    return tiles


def _errors(report: Mapping[str, Any]) -> _Table:
    errors = sorted(report["errors"].items(), key=lambda item: -item[1])
    total = report["rows"]["total"]
    return _Table(
        "Failed rows",
        ("code", "rows", "share"),
        [(code, f"{count:,}", f"{count / total:.2%}") for code, count in errors],
    )


def _latencies(report: Mapping[str, Any]) -> _Table:
    rows = []
    for name, found in report["latency_s"].items():
        if found["p50"] is not None:
            rows.append((name.removesuffix("_s"), *(f"{found[share]:,.3f}" for share in ("p50", "p90", "p99"))))
    return _Table("Latency of a row, seconds", ("", "p50", "p90", "p99"), rows)


def _slowest(report: Mapping[str, Any]) -> _Table:
    head = ("id", "in", "out", "queue s", "prefill s", "decode s", "total s", "preempted")
    keys = ("prompt_tokens", "completion_tokens", "queue_s", "prefill_s", "decode_s", "total_s", "preemptions")
    rows = [(shortened(str(row["id"]), _ID_WIDTH), *(_number(row[key]) for key in keys)) for row in report["slowest"]]
    return _Table("Slowest rows", head, rows)


def _about(report: Mapping[str, Any]) -> _Table:
    machine, occupancy = report["machine"], report["occupancy"]
    rows = [
        ("processor", machine["processor"] or "not known"),
        ("platform", f"{machine['platform']}, Python {machine['python']}"),
        ("threads", report["threads"] or "not known"),
        ("numerics", describe_numerics(report["numerics"]) or "not known"),
        ("versions", ", ".join(f"{name} {found}" for name, found in report["versions"].items())),
        ("invocations", report["sessions"]),
        ("most memory", f"{report['max_rss_bytes'] / 2**20:,.0f} MiB"),
    ]
    if occupancy["sequences"] is not None:
        mean = f"{occupancy['sequences']:,.1f} sequences, {occupancy['tokens_per_step']:,.1f} tokens"
        limits = f"limits {occupancy['max_num_seqs']:,} and {occupancy['max_num_batched_tokens']:,}"
        rows.append(("mean step", f"{mean} ({limits})"))
    if report["sizes"]:
        sizes = report["sizes"]
        rows.append(("KV memory", f"{sizes['kv_bytes'] / 2**20:,.0f} MiB in blocks of {sizes['block_size']} tokens"))
    if report["tail_s"]:
        rows.append(("tail", f"{format_duration(report['tail_s'])} at the end with less than half of the sequences"))
    if report["roofline"]:
        rows.append(("roofline", describe_roofline(report["roofline"])))
    return _Table("Run and machine", (), rows)


def _clock(instant: str) -> str:
    return datetime.fromisoformat(instant).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"

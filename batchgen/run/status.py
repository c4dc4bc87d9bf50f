"""``batchgen status``: a run's progress, read from the files of its run directory without taking its lock.

A running process describes itself in ``progress.json``; for any other run the journal or the report is more accurate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.units import format_duration, printable
from batchgen.output.finalize import read_errors
from batchgen.output.journal import Journal
from batchgen.output.manifest import RECORD_VERSION, Manifest
from batchgen.output.rundir import RunDir
from batchgen.run.display import describe_rows
from batchgen.run.progress import NO_TOKENS, read_progress, row_counts
from batchgen.run.reports import read_report
from batchgen.run.stop import RESUME

WATCH_S = 2.0  # the interval at which a run writes its progress
START_S = 10.0
_SILENT_S = 10.0  # a process that has not written for longer may be hung
_SHOWN_WORKERS = 40


def read_status(folder: Path) -> dict[str, Any]:
    """State, rows, tokens, rate and time left of the run in ``folder``. Raises UsageError for a folder without a run.

    ``state`` is "running", "finished", "stopped" (on request), "failed" (by an error) or "interrupted" (by a kill,
    after which ``tokens`` are None: the saved count is older than the rows). ``tokens_per_s`` counts computed tokens,
    of the last half minute or of a finished run. ``eta_s`` is None unless a process runs.
    """
    run_dir = RunDir(folder)
    progress = read_progress(folder) or {}
    manifest, begun = run_dir.read_manifest(), run_dir.unfinished()
    if manifest is None and not begun and not progress:
        raise UsageError(f"{folder} is not a run directory: it has no job.json")
    holder = run_dir.holder()
    live = progress if holder else {}  # what only a running process knows
    status: dict[str, Any] = {
        "folder": str(folder),
        "state": _state(run_dir, progress, is_held=holder is not None, is_begun=bool(begun)),
        "phase": live.get("phase"),
        "reason": progress.get("reason"),
        "advice": None,
        "holder": {"pid": holder.pid, "host": holder.host} if holder else None,
        "rows": progress.get("rows", row_counts(None, 0, 0)),
        "tokens": progress.get("tokens", NO_TOKENS),
        "tokens_per_s": live.get("tokens_per_s", 0.0),
        "eta_s": live.get("eta_s"),
        "workers": live.get("workers", []),
        "updated_at": progress.get("updated_at"),
        "silent_s": _silent_s(progress) if holder and progress.get("pid") == holder.pid else None,
    }
    if status["state"] in ("stopped", "failed", "interrupted"):
        status["advice"] = progress.get("advice", RESUME)
        if run_dir.is_complete():
            status["advice"] = f"{status['advice'] or RESUME}; the outputs are from the previous job"
    if status["state"] == "finished":
        status |= {"reason": None, "advice": None}
        status |= _finished(run_dir, manifest)
    elif holder is None and begun and begun[-1].manifest.version == RECORD_VERSION:
        journal = Journal.read(begun[-1].folder, begun[-1].manifest.shard)
        counts, num_partial = journal.counts, len(journal.partials)
        total, reused = (status["rows"].get(name) for name in ("total", "reused"))
        status["rows"] = row_counts(total, counts.results, counts.errors, reused or 0)
        status["rows"] |= {"half_done": num_partial} if num_partial else {}
        if status["state"] == "interrupted":  # its tokens were counted earlier
            status["tokens"] = None
    return status


def watch_status(folder: Path, interval_s: float = WATCH_S) -> Iterator[dict[str, Any]]:
    """``read_status`` every ``interval_s`` seconds, until the run ends.

    If the run is not running, it waits up to ``START_S`` seconds for it to start.
    """
    has_run, until = False, time.monotonic() + START_S
    while True:
        status = read_status(folder)
        yield status
        is_running = status["state"] == "running"
        if not is_running and (has_run or status["state"] == "finished" or time.monotonic() > until):
            return
        has_run |= is_running
        time.sleep(interval_s)


def render_status(status: Mapping[str, Any]) -> str:
    """The status as a few lines of text."""
    holder, rows, tokens = status["holder"], status["rows"], status["tokens"]
    who = f", process {holder['pid']} on {holder['host']}" if holder else ""
    what = f": {status['phase']}" if status["phase"] else ""
    reason = f" ({status['reason']})" if status["reason"] and not holder else ""
    if status["state"] == "failed" and reason:
        reason = f": {status['reason']}"
    advice = f"; {status['advice']}" if status["advice"] else ""
    if (status.get("silent_s") or 0) > _SILENT_S:
        what += f", last progress {format_duration(status['silent_s'])} ago: the process or its machine may be hung"
    lines = [printable(f"{status['folder']}: {status['state']}{reason}{what}{who}{advice}")]
    left = "" if rows["left"] is None else f", {rows['left']:,} left"
    left = f", {rows['half_done']:,} half done{left}" if rows.get("half_done") else left
    reused = f" ({rows['reused']:,} kept)" if rows.get("reused") else ""
    finished = describe_rows(rows) if rows["total"] is not None else "total not known yet"
    lines.append(f"rows    {finished}: {rows['done']:,} done{reused}, {rows['failed']:,} failed{left}")
    if tokens is not None:
        lines.append(f"tokens  {tokens['prompt']:,} in, {tokens['completion']:,} out")
    if status["tokens_per_s"]:
        eta = "" if status["eta_s"] is None else f", about {format_duration(status['eta_s'])} left"
        lines.append(f"speed   {status['tokens_per_s']:,.0f} tok/s computed, of prompts and answers{eta}")
    return "\n".join([*lines, *_worker_lines(status["workers"])])


def _silent_s(progress: Mapping[str, Any]) -> float:
    """Seconds since a run last wrote its progress; while it works, it does so every ``WATCH_S``."""
    return max(0.0, round((datetime.now(UTC) - datetime.fromisoformat(progress["updated_at"])).total_seconds(), 1))


def _worker_lines(workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line per worker, in columns; if there are many, only the first ones and the number of the others."""
    named = [(printable(f"{worker['name']} on {worker['place']}"), worker) for worker in workers[:_SHOWN_WORKERS]]
    width = max((len(name) for name, _ in named), default=0)
    for name, worker in named:
        speed = f"{worker['rows']:>9,} rows {worker['tokens_per_s']:>7,.0f} tok/s {worker['in_flight']:>4,} in flight"
        yield f"worker  {name:<{width}} {speed}, {worker['state']}"
    if len(workers) > _SHOWN_WORKERS:
        yield f"worker  and {len(workers) - _SHOWN_WORKERS:,} more: see --json"


def _state(run_dir: RunDir, progress: Mapping[str, Any], *, is_held: bool, is_begun: bool) -> str:
    if is_held:
        return "running"
    if run_dir.is_complete() and not is_begun:
        return "finished"
    recorded = str(progress.get("state", "running"))
    return "interrupted" if recorded == "running" else recorded


def _finished(run_dir: RunDir, manifest: Manifest | None) -> dict[str, Any]:
    """Counts of a finished run: from its report, or else rows from ``job.json`` and ``errors.jsonl``."""
    try:
        report = read_report(run_dir)
    except UsageError:
        if manifest is None or manifest.num_rows is None:
            return {}
        total = len(manifest.shard.rows(manifest.num_rows))
        failed = sum(1 for _ in read_errors(run_dir))
        return {"rows": row_counts(total, total - failed, failed), "tokens": None}
    rows, tokens = report["rows"], report["tokens"]
    computed = report["computed_tokens"]
    return {
        "rows": row_counts(rows["total"], rows["done"], rows["failed"], report.get("reused", {}).get("rows", 0)),
        "tokens": NO_TOKENS | {key: tokens[key] for key in ("prompt", "completion")} | {"computed": computed},
        "tokens_per_s": round(computed / report["wall_s"], 1) if report["wall_s"] else 0.0,
        "updated_at": report["finished_at"],
    }

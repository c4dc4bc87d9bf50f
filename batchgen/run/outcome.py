"""Outcome of an invocation, and the lines that tell the user how it begins and ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.core.errors import NOT_READ, ExitCode
from batchgen.core.units import WHOLE, Shard, counted, format_share
from batchgen.output.finalize import read_errors
from batchgen.output.rundir import RunDir
from batchgen.report.build import warnings
from batchgen.report.facts import pace, samples_text
from batchgen.run.progress import Progress

_MAX_UNREAD = 3  # lines about rows that contain other rows' lines


@dataclass(frozen=True)
class Outcome:
    """End of an invocation: the exit code of the process, lines for the user, the report of a finished run.

    ``stop_reason`` says why a stop was requested, perhaps too late: see ``is_finished``, which means that the outputs
    are written. ``--quiet`` prints ``failures`` too: cron and systemd pass on the output, not the exit code.
    """

    exit_code: ExitCode
    lines: tuple[str, ...]
    failures: tuple[str, ...] = ()
    report: Mapping[str, Any] | None = field(default=None, repr=False)
    stop_reason: str | None = None
    is_finished: bool = True


def announcement(run_dir: RunDir, shard: Shard, num_rows: int | None, num_finished: int) -> str:
    """The first line of a run: what it computes, and where its outputs will be."""
    total = "rows" if num_rows is None else counted(num_rows, "row")
    part = "" if shard == WHOLE else f" of shard {shard}"
    resumed = f", {num_finished:,} of them finished already" if num_finished else ""
    return f"{total}{part} into {short(run_dir.path)}{resumed}"


def finished(run_dir: RunDir, output_format: str, report: Mapping[str, Any]) -> Outcome:
    """The outcome of a finished run."""
    rows, num_copies = report["rows"], report["duplicates"]
    copies = f" ({num_copies:,} as copies)" if num_copies else ""
    if num_kept := report.get("reused", {}).get("rows", 0):
        computed = f"{counted(rows['done'] - num_kept, 'row')} computed"
        lines = [f"{counted(rows['done'], 'row')} done, {num_kept:,} of them kept"]
    else:
        computed, lines = f"{counted(rows['done'], 'row')} done", []
    lines.append(f"{computed}{copies}, {pace(report)}")
    failures: tuple[str, ...] = ()
    if rows["failed"]:
        codes = ", ".join(f"{code} {count:,}" for code, count in report["errors"].items())
        failures = (f"{counted(rows['failed'], 'row')} failed: {codes}; see {short(run_dir.errors)}", *_unread(run_dir))
    lines += failures
    accuracy = report.get("accuracy")
    if accuracy and accuracy["total"]:
        correct, total = accuracy["correct"], accuracy["total"]
        share = f"exact match {format_share(correct / total, 2)} ({correct:,} of {total:,})"
        lines.append(", ".join([share, *samples_text(accuracy)]))
    lines += warnings(report)
    if not rows["total"]:
        lines.append("warning: the input has no rows")
    lines.append(f"outputs in {short(run_dir.outputs(output_format))}")
    return Outcome(ExitCode.ROWS_FAILED if failures else ExitCode.OK, tuple(lines), failures, report)


def _unread(run_dir: RunDir) -> Iterator[str]:
    """A line for each of the first failed rows that contain the lines of other rows."""
    errors = (json.loads(line) for _, line in read_errors(run_dir) if NOT_READ.encode() in line)
    rows = ((error, error.get("message") or error["error"]["message"]) for error in errors)
    yield from islice((f"warning: {row['source']}, {text}" for row, text in rows if NOT_READ in text), _MAX_UNREAD)


def already_done(run_dir: RunDir, output_format: str, edited: Sequence[str], *, has_failed: bool) -> Outcome:
    """The outcome of a job that was finished before, and whose files ``edited`` have been changed since then."""
    changed = f"{', '.join(edited)} was edited since, --update replaces it; " if edited else ""
    line = f"already done: outputs in {short(run_dir.outputs(output_format))}; {changed}--overwrite starts again"
    if not has_failed:
        return Outcome(ExitCode.OK, (line,))
    if num_failed := sum(1 for _ in read_errors(run_dir)):
        failed = f"{counted(num_failed, 'row')} failed: see {short(run_dir.errors)}"
    else:
        failed = f"some rows failed, and {short(run_dir.errors)} no longer lists them"
    failure = f"{failed}; correct them in the input and run again; --update runs them again unchanged"
    return Outcome(ExitCode.ROWS_FAILED, (line, failure), (failure,))


def stopped(run_dir: RunDir, progress: Progress) -> Outcome:
    """The outcome of an early stop, by request or because too many rows failed."""
    sink, stopper = progress.sink, progress.stopper
    reason, advice = stopper.reason or "", stopper.advice
    if sink is None:
        lines: tuple[str, ...] = (f"stopped ({reason}) before the first row; {advice}",)
        return Outcome(ExitCode.STOPPED, lines, is_finished=False)
    if stopper.exit_code == ExitCode.ROWS_FAILED:
        is_first = not run_dir.manifest.exists()
        files = f"see {short(run_dir.errors)}" if is_first else "the files are still from the previous job"
        lines = (f"stopped: {reason}", f"{files}; {advice}")
        return Outcome(ExitCode.ROWS_FAILED, lines, lines, is_finished=False)
    total = "" if progress.rows_total is None else f" of {progress.rows_total:,}"
    rows = f"{sink.num_done + sink.num_failed:,}{total} rows finished"
    if sink.journal.partials:
        rows += f", {len(sink.journal.partials):,} half done and saved"
    return Outcome(ExitCode.STOPPED, (f"stopped ({reason}): {rows}; {advice}",), is_finished=False)


def short(path: Path) -> str:
    """A path, relative to the working directory if that is shorter by more than the first slash."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return relative if not relative.startswith("..") and len(relative) < len(str(path)) - 1 else str(path)

"""How an invocation ended: an exit code, the words for it, and the report where there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.units import counted, format_duration
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.report.rows import RowTotals
from batchgen.run.loader import Backend
from batchgen.run.reports import read_report

if TYPE_CHECKING:
    from batchgen.run.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """What ``run_job`` returns: the process's exit code, lines for a person, the report of a finished run."""

    exit_code: ExitCode
    lines: tuple[str, ...]
    report: Mapping[str, Any] | None = None

    @staticmethod
    def shown(path: Path) -> str:
        """A path as short as it can be said from here."""
        try:
            relative = os.path.relpath(path)
        except OSError:  # the working directory has gone
            return str(path)
        return relative if not relative.startswith("..") else str(path)

    @classmethod
    def finished(cls, run_dir: RunDir, spec: JobSpec, report: Mapping[str, Any]) -> Outcome:
        """All rows have ended."""
        rows, tokens = report["rows"], report["tokens"]
        speed = f"{tokens['completion']:,} tokens out in {format_duration(report['wall_s'])}"
        lines = [f"{counted(rows['done'], 'row')} done, {speed} ({report['tokens_per_s']['completion']:,.0f} tok/s)"]
        if rows["failed"]:
            codes = ", ".join(f"{code} {count:,}" for code, count in report["errors"].items())
            lines.append(f"{counted(rows['failed'], 'row')} failed: {codes}; see {cls.shown(run_dir.errors)}")
        accuracy = report.get("accuracy")
        if accuracy and accuracy["total"]:
            share = f"{accuracy['exact_match']:.2%}"
            lines.append(f"exact match {share} ({accuracy['correct']:,} of {accuracy['total']:,})")
        if not rows["total"]:
            lines.append("warning: the input has no rows")
        lines.append(f"outputs in {cls.shown(run_dir.outputs(spec.output.format))}")
        code = ExitCode.ROWS_FAILED if rows["failed"] else ExitCode.OK
        return cls(code, tuple(lines), report)

    @classmethod
    def already_done(cls, run_dir: RunDir, spec: JobSpec) -> Outcome:
        """An earlier invocation finished; the exit code is the one it ended with."""
        where = cls.shown(run_dir.outputs(spec.output.format))
        line = f"already done: outputs in {where}; --overwrite runs it anew"
        if not _has_failed_rows(run_dir):
            return cls(ExitCode.OK, (line,))
        shown = cls.shown(run_dir.path)
        failed = f"some rows failed: see {cls.shown(run_dir.errors)}; batchgen retry {shown} runs those again"
        return cls(ExitCode.ROWS_FAILED, (line, failed))

    @classmethod
    def stopped(cls, run_dir: RunDir, reason: str, progress: Progress) -> Outcome:
        """Stopped early: by request, or because too many rows failed."""
        ledger = progress.ledger
        if ledger is None:
            return cls(ExitCode.STOPPED, (f"stopped ({reason}) before the first row; run again",))
        finished = ledger.num_done + ledger.num_failed
        total = "" if progress.rows_total is None else f" of {progress.rows_total:,}"
        if progress.stopper.exit_code == ExitCode.ROWS_FAILED:
            advice = f"see {cls.shown(run_dir.errors)}; {progress.stopper.advice}"
            return cls(ExitCode.ROWS_FAILED, (f"stopped: {reason}", advice))
        half_done = len(ledger.journal.partials)
        saved = f", {half_done:,} half done and saved" if half_done else ""
        return cls(
            ExitCode.STOPPED, (f"stopped ({reason}): {finished:,}{total} rows finished{saved}; run again to resume",)
        )


def _has_failed_rows(run_dir: RunDir) -> bool:
    """Whether a finished run has failed rows, also where somebody has taken ``errors.jsonl`` away."""
    if run_dir.errors.exists():
        return True
    try:
        return bool(read_report(run_dir)["rows"]["failed"])
    except UsageError:
        return False


def journal_totals(journal: Journal, expected: str | None) -> RowTotals:
    """What the finished rows add up to. Raises StorageError if one no longer reads back."""
    totals = RowTotals(expected)
    for index in journal.indexes(errors=False):
        totals.add_result(json.loads(journal.payload(index)))
    for index in journal.indexes(errors=True):
        totals.add_error(json.loads(journal.payload(index)))
    return totals


def about_job(spec: JobSpec, manifest: Manifest, backend: Backend | None) -> dict[str, Any]:
    """What the report says about the job: what ran, on what, how."""
    return {
        "model": spec.model.path,
        "input": list(spec.input.path),
        "shard": str(manifest.shard),
        "created_at": manifest.created_at,
        "numerics": manifest.fingerprints.get("numerics", {}),
        "threads": backend.threads if backend else None,
        **(backend.facts() if backend else {}),
    }

"""A finished run whose input has grown: it is opened again, and the rows that came behind join its outputs.

Meanwhile the outputs stay as they were, and ``job.json`` has no number of rows: that marks the run as unfinished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.input.source import Growth
from batchgen.output.finalize import finalize_grown
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.report.build import write_report
from batchgen.run.reports import following_report, read_report


def reopen(run_dir: RunDir, manifest: Manifest, growth: Growth) -> Manifest:
    """Mark a finished run, whose journal is gone, as unfinished. Raises UsageError while a retry is under way."""
    assert manifest.num_rows is not None, "it is finished"
    if run_dir.retry.is_dir():
        what = f"{run_dir.path} has a retry that was interrupted, and its input has grown"
        raise UsageError(f"{what}: batchgen retry {run_dir.path}, then run the job again")
    num_kept = max(manifest.num_rows - growth.is_cut, 0)
    manifest = replace(manifest, num_rows=None, num_kept=num_kept)
    run_dir.write_manifest(manifest)
    return manifest


def how_to_grow(differences: Iterable[str]) -> str:
    """What may happen to an input without a new run, as a line behind ``differences`` that are about its files."""
    if not any(line.startswith("input.files[") for line in differences):
        return ""
    return "  (an input may gain files, and the last of its text files lines at its end)\n"


def finish_grown(
    run_dir: RunDir,
    spec: JobSpec,
    journal: Journal,
    manifest: Manifest,
    usage: Mapping[str, Any],
    facts: Mapping[str, Any],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Put the journal's rows into the outputs, write the report, then ``manifest``, which has the number of rows.

    Returns the report. A kill in between leaves a run that does the same when run again, but for a report that counts
    these rows already: their time is in it. Raises as ``finalize``.
    """
    assert manifest.num_rows is not None, "the input was read to its end"
    finalize_grown(run_dir, spec, journal, num_rows=manifest.num_rows)
    report = following_report(run_dir, spec, usage, facts, note)
    report["rows"]["new"] = len(journal.done)
    with suppress(UsageError):
        if all((before := read_report(run_dir))[key] == report[key] for key in ("rows", "tokens")):
            report = before
    write_report(run_dir.report, report)
    run_dir.remove_spool()
    run_dir.write_manifest(manifest)
    return report

"""The report of shards that were merged: their rows together, their times as if one machine had run one after another.

It reads finished run directories only. A rate in it is thus that of one machine, not of all of them at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen.config.job import OutputSpec, job_from_dict
from batchgen.core.errors import UsageError
from batchgen.output.finalize import read_errors, read_records
from batchgen.output.rundir import RunDir
from batchgen.report.build import build_report, write_report
from batchgen.report.rows import RowTotals
from batchgen.report.usage import follow, spent_in
from batchgen.run.reports import read_report

_ABOUT = (
    "model",
    "input",
    "created_at",
    "numerics",
    "threads",
    "sizes",
    "roofline",
)  # what the shards of one job have in common


def count_outputs(run_dir: RunDir, output: OutputSpec) -> RowTotals:
    """What the rows in a finished run's outputs and dead letters add up to. Raises StorageError if one is damaged."""
    totals = RowTotals(output.expected)
    for _, record in read_records(run_dir, output.format):
        totals.add_result(record)
    for _, line in read_errors(run_dir):
        totals.add_error(json.loads(line))
    return totals


def write_merged_report(folders: Sequence[Path], target: Path) -> list[str]:
    """Write ``report.json`` of the merged run in ``target`` if it is not there.

    Without a report of each shard there is none; returns why, a line per shard that has none to be read. Raises
    LockedError if another process is at it, StorageError.
    """
    run_dir = RunDir(target)
    with run_dir.lock():
        if run_dir.report.exists():
            return []
        reports, problems = [], []
        for folder in folders:
            try:
                reports.append(read_report(RunDir(folder)))
            except UsageError as error:
                problems.append(str(error))
        if not problems:
            _write_report(run_dir, reports)
        return problems


def _write_report(run_dir: RunDir, reports: Sequence[dict[str, Any]]) -> None:
    manifest = run_dir.read_manifest()
    assert manifest is not None, "a merged run has a manifest"
    spent: dict[str, Any] = {}
    for report in reports:
        spent = follow(spent, spent_in(report))
    about = {name: next((r[name] for r in reports if r[name] is not None), None) for name in _ABOUT}
    about["numerics"] = manifest.fingerprints.get("numerics", about["numerics"])  # with the kernels of all shards
    totals = count_outputs(run_dir, job_from_dict(manifest.job, run_dir.manifest).output)
    write_report(run_dir.report, build_report(totals, spent, about | {"shard": "1/1"}))

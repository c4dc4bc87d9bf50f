"""The report of a run directory, and the metrics file of a run: where they lie and when they may be written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.storage import check_replaceable, write_atomic
from batchgen.output.rundir import RunDir
from batchgen.report import prometheus
from batchgen.report.build import read_report_file


def read_report(run_dir: RunDir) -> dict[str, Any]:
    """The report of a finished run. Raises UsageError where there is none."""
    if not run_dir.report.exists():
        hint = "not a run directory"
        if run_dir.is_complete():
            hint = "its outputs are there: the command that made them writes it when run again"
        elif run_dir.manifest.exists():
            hint = "the run is not finished: see batchgen status"
        raise UsageError(f"no report.json in {run_dir.path} ({hint})")
    return read_report_file(run_dir.report)


def check_metrics_file(path: Path, run: str) -> None:
    """Raises UsageError where metrics of the run in directory ``run`` cannot be written to ``path``.

    It is asked before a run rather than after it.
    """
    prometheus.check_available()
    if RunDir(Path(run)).owns(path):
        raise UsageError(f"{path} is a file of the run itself; choose another path for the metrics")
    check_replaceable(path, b"# HELP batchgen_", "a metrics file")


def write_metrics(path: Path, run: str, model: str, report: Mapping[str, Any] | None, exit_code: int) -> None:
    """Replace ``path``, atomically, as the collector wants it.

    Without a ``report`` that of the directory ``run`` is taken, where there is one: the run was done already.
    Raises StorageError where the file cannot be written.
    """
    if report is None:
        with suppress(UsageError):
            report = read_report(RunDir(Path(run)))
    write_atomic(path, prometheus.render_metrics(run, model, report, exit_code).encode())

"""A job in one Python call: ``generate`` gives rows of a list, DataFrame, dataset, table or path to ``run_job``.

Rows in memory become the run's standard input, so all that holds for ``batchgen run --input -`` holds for them: the
same reader, journal and resume. Nothing is computed here. The names are exported by ``batchgen``.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from batchgen.config.job import KEYS, JobSpec
from batchgen.config.load import job_from_values
from batchgen.core.errors import RunStopped, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.keys import nearest
from batchgen.core.units import counted
from batchgen.executors.backend import run_job
from batchgen.input.in_memory import json_lines
from batchgen.output.finalize import read_errors, read_records
from batchgen.output.rundir import RunDir
from batchgen.report.facts import figures
from batchgen.run.invocation import Outcome, RunOptions
from batchgen.run.loader import EngineFactory
from batchgen.run.reports import read_report
from batchgen.run.stdin import in_temporary_folder, temporary_folder

_LINES_FORMATS = ("auto", "jsonl", "openai-batch")
_NOT_KEPT = "nothing is kept without an output folder"


class Run:
    """A finished run: ``rows``, ``errors``, ``report``, and ``path``, the run directory if it was kept.

    ``rows`` are the output records in the order of the input, ``errors`` the lines of ``errors.jsonl``: a row of the
    input, known by its ``index``, is in one of them. Both are read when they are first asked for.
    """

    def __init__(self, spec: JobSpec, outcome: Outcome, labels: Any = None) -> None:
        self._spec = spec
        self._labels = labels  # the index of the pandas rows that were given
        self._run_dir = RunDir(Path(spec.output.path))
        self.report: Mapping[str, Any] = outcome.report or read_report(self._run_dir)
        self.path: Path | None = self._run_dir.path

    def __repr__(self) -> str:
        counts, shown = self.report["rows"], dict(figures(self.report))
        speed = next((f"{shown[name]} {name}" for name in ("tokens/s out", "tokens/s in") if name in shown), "")
        match = f", exact match {shown['exact match']}" if "exact match" in shown else ""
        rows = f"{counted(counts['done'], 'row')} done, {counts['failed']:,} failed"
        return f"<Run: {rows}; {shown['wall time']}, {speed}{match}>"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records one by one, in the order of their file, read from the run directory if it was kept."""
        return iter(self.rows) if self.path is None else (row for _, row in read_records(self._run_dir, self._spec))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        found = read_records(self._run_dir, self._spec)
        return [record for _, record in sorted(found, key=lambda item: item[0])]

    def read(self) -> None:
        """Read ``rows`` and ``errors`` now, before the run directory is removed."""
        _ = self.rows, self.errors
        self.path = None

    @cached_property
    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in read_errors(self._run_dir)]

    def to_arrow(self) -> Any:
        """``rows`` as a ``pyarrow.Table``, with the columns and types of ``outputs.parquet``."""
        import pyarrow.parquet as pq

        from batchgen.output.formats.parquet import ParquetFormat, fixed_types

        file = BytesIO()
        ParquetFormat(fixed_types(self._spec)).write(file, [encode_json(row) for row in self.rows])
        return pq.read_table(file)

    def to_pandas(self) -> Any:
        """``to_arrow`` as a ``pandas.DataFrame`` whose index is the number of each row in the input.

        So a column of it fits the rows that were given, with NaN where one failed, if their own index counts from 0.
        Warns of an integer index that does not, since pandas would put answers beside other rows.
        """
        if self._labels is not None and _misleads(self._labels):
            warnings.warn(
                "to_pandas() counts rows from 0, and the index of the rows given has such numbers in other places: "
                "for t = run.to_pandas(), df.iloc[t.index] are their rows",
                stacklevel=2,
            )
        return self.to_arrow().to_pandas().set_index("index")

    def to_dataset(self) -> Any:
        """``to_arrow`` as a ``datasets.Dataset``."""
        from datasets import Dataset

        return Dataset(self.to_arrow())


def generate(
    rows: Any,
    *,
    model: str | os.PathLike[str] | Mapping[str, Any],
    prompt: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
    engine_factory: EngineFactory | None = None,
    **keys: Mapping[str, Any],
) -> Run:
    """Run a model over all rows and return what came of them.

    ``rows`` is a path, as ``input.path`` takes it, or rows in memory: a list, column or other iterable of strings
    (column ``prompt``), mappings of columns and chats (lists of messages), a pandas or Polars DataFrame, a
    ``datasets.Dataset``, an Arrow table. Dates and other values of rows in memory that JSON lacks become
    text, NaN becomes null.

    All other keys are those of the job file: ``sampling``, ``engine``, ``input``, ``cluster`` are its tables, and
    ``model`` and ``output`` are its tables or their ``path``. With an ``output`` the same call goes on with a run that
    was interrupted, and finds a finished one done; without, nothing is kept. ``options`` are those of ``run_job``; by
    default progress is shown on a terminal and in a notebook only. Each call loads the model.

    In the main thread SIGINT, SIGTERM and SIGHUP stop the run as they do a command: what is done is journalled, then
    the signal has its usual effect, which of Ctrl-C is KeyboardInterrupt.

    Warns of failed rows. Raises UsageError for an impossible job, RunStopped if ``options`` ended it before its last
    row, and as ``run_job`` does.

    Example:
        >>> run = batchgen.generate(["What is 2 + 3?"], model="LiquidAI/LFM2-350M")  # doctest: +SKIP
        >>> run.rows[0]["text"]  # doctest: +SKIP
    """
    is_path = isinstance(rows, str | os.PathLike)
    given = {"model": model, "sampling": sampling or {}, "output": output or {}, **keys}
    tables = {name: _table(value) for name, value in given.items()}
    spec = _spec(os.fspath(rows) if is_path else None, prompt, tables)
    options = replace(options or RunOptions(progress="bar"), may_exit=False)
    is_kept = bool(spec.output.path)
    with ExitStack() as stack:
        if not is_kept:
            spec = replace(spec, output=replace(spec.output, path=str(stack.enter_context(temporary_folder()))))
            stack.enter_context(in_temporary_folder())
        lines = None if is_path else json_lines(rows, spec.input.request_columns)
        outcome = run_job(spec, options, engine_factory=engine_factory, lines=lines)
        _pass_on_signal(outcome)
        if not outcome.is_finished:
            lost = f"{outcome.lines[0].partition('; ')[0]}; {_NOT_KEPT}"
            raise RunStopped("; ".join(outcome.lines) if is_kept else lost)
        run = Run(spec, outcome, rows.index if hasattr(rows, "iloc") else None)
        if not is_kept:
            run.read()
    counts = run.report["rows"]
    if counts["failed"]:
        failed = f"{counts['failed']:,} of {counted(counts['total'], 'row')} failed"
        warnings.warn(f"{failed}: Run.errors has them, and Run.rows does not", stacklevel=2)
    return run


def _misleads(labels: Any) -> bool:
    """Whether a pandas index has the number of a row as the label of another row."""
    import numpy as np

    if labels.nlevels > 1 or labels.dtype.kind not in "iufO":
        return False
    places = np.arange(len(labels))
    return bool(((labels != places) & labels.isin(places)).any())


def _table(value: Any) -> Any:
    """A table of the job file, of which a path alone may be given; its paths are strings then."""
    if isinstance(value, str | os.PathLike):
        value = {"path": value}
    if not isinstance(value, Mapping):
        return value  # refused later
    return {key: os.fspath(item) if isinstance(item, os.PathLike) else item for key, item in value.items()}


def _spec(path: str | None, prompt: str | None, tables: Mapping[str, Mapping[str, Any]]) -> JobSpec:
    """The job; ``path`` is None for rows in memory. Raises UsageError."""
    for name in tables:
        if name not in KEYS:
            homes = [section for section, keys in KEYS.items() if name in keys]
            known = [*KEYS, "prompt", "options"]
            hint = f": give it as {homes[0]}={{{name!r}: ...}}" if homes else nearest(name, known)
            raise UsageError(f"generate: unknown argument {name!r}{hint}")
    given = dict(tables.get("input", {}))
    if "path" in given:
        raise UsageError("generate: input has a path, and the rows are given as the first argument")
    if path is None and given.get("format", "auto") not in _LINES_FORMATS:
        raise UsageError(f"generate: input.format = {given['format']!r} is a format of files, not of rows in memory")
    given |= {"path": "-" if path is None else path} | ({} if prompt is None else {"prompt": prompt})
    return job_from_values({**tables, "input": given}, "generate")


def _pass_on_signal(outcome: Outcome) -> None:
    """Let a signal that stopped the run, or came too late to, have the effect that it has outside of it."""
    if outcome.stop_reason and outcome.stop_reason in signal.Signals.__members__:
        number = signal.Signals[outcome.stop_reason]
        if signal.getsignal(number) is signal.default_int_handler:
            raise KeyboardInterrupt(outcome.lines[0])
        signal.raise_signal(number)

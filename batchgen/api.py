"""The commands as Python functions, and ``generate``, a job over rows in memory; ``batchgen`` exports the names.

Rows in memory become standard input, with the same reader, journal and resume as ``batchgen run --input -``.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_values, sections_of
from batchgen.config.record_fields import packed_keys
from batchgen.core.errors import RunStopped, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import unpacked
from batchgen.core.units import WHOLE, Shard, counted, parse_clock, parse_count, parse_duration, parse_share, shown
from batchgen.input.in_memory import json_lines
from batchgen.output.finalize import read_errors, read_records
from batchgen.output.rundir import RunDir
from batchgen.plan.dry_run import make_plan
from batchgen.report.facts import figures
from batchgen.run import reports
from batchgen.run.argument import is_run_folder, load_spec
from batchgen.run.invocation import RunOptions
from batchgen.run.loader import EngineFactory
from batchgen.run.outcome import Outcome
from batchgen.run.stdin import in_temporary_folder, temporary_folder
from batchgen.run.stop import Limits
from batchgen.workers import placement

_LINES_FORMATS = ("auto", "jsonl", "openai-batch")
_NOT_KEPT = "nothing is kept without an output folder"


class Run:
    """A finished run: ``rows``, ``errors``, ``report``, and ``path``, the run directory if it was kept.

    ``rows`` are the output records in the order of the input, ``errors`` the lines of ``errors.jsonl``; each row of the
    input is in one of them, under its ``index``. Both are read on first use.
    """

    def __init__(self, spec: JobSpec, outcome: Outcome, labels: Any = None) -> None:
        self._labels = labels  # the index of the pandas rows that were given
        self._run_dir = RunDir(Path(spec.output.path))
        manifest = self._run_dir.read_manifest()
        self._spec = manifest.spec(self._run_dir.manifest) if manifest else spec
        self.report: Mapping[str, Any] = outcome.report or reports.read_report(self._run_dir)
        self.path: Path | None = self._run_dir.path

    def __repr__(self) -> str:
        counts, shown = self.report["rows"], dict(figures(self.report))
        speed = next((f"{shown[name]} {name}" for name in ("tokens/s out", "tokens/s in") if name in shown), "")
        match = f", exact match {shown['exact match']}" if "exact match" in shown else ""
        rows = f"{counted(counts['done'], 'row')} done, {counts['failed']:,} failed"
        return f"<Run: {rows}; {shown['wall time']}, {speed}{match}>"

    def __len__(self) -> int:
        return int(self.report["rows"]["done"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records one by one, in the order of their file, read from the run directory if it was kept."""
        return (
            iter(self.rows)
            if self.path is None
            else (self._record(row) for _, row in read_records(self._run_dir, self._spec))
        )

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        """The records as they were journalled, in the order of the input."""
        records = read_records(self._run_dir, self._spec)
        return [record for _, record in sorted(records, key=lambda item: item[0])]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [*map(self._record, self._records)]

    def _record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return unpacked(record, packed_keys(self._spec))

    def read(self) -> None:
        """Read ``rows`` and ``errors`` now, before the run directory is removed with its copy of rows in memory."""
        _ = self.rows
        for error in self.errors:
            if error["source"] == str(self._run_dir.spool):
                error["source"] = "memory"
        self.path = None

    @cached_property
    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in read_errors(self._run_dir)]

    def to_arrow(self) -> Any:
        """``rows`` as a ``pyarrow.Table``, with the columns and types of ``outputs.parquet``."""
        from batchgen.output.formats.parquet import fixed_types, table_of

        return table_of([encode_json(record) for record in self._records], fixed_types(self._spec))

    def to_pandas(self) -> Any:
        """``to_arrow`` as a ``pandas.DataFrame`` whose index is the number of each row in the input.

        Columns align with the given rows if their index counts from 0; failed rows then have NaN. Warns of another
        integer index, since pandas would put answers next to other rows.
        """
        if self._labels is not None and _misleads(self._labels):
            warnings.warn(
                "to_pandas() counts rows from 0, and the index of the rows given has such numbers in other places: "
                "for t = run.to_pandas(), df.iloc[t.index] are their rows",
                stacklevel=2,
            )
        return self.to_arrow().to_pandas(use_threads=False).set_index("index")


def generate(
    rows: Any,
    model: str | os.PathLike[str] | Mapping[str, Any],
    prompt: str | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    **keys: Any,
) -> Run:
    """Run a model over all rows and return the results.

    ``rows`` is a path, as ``input.path`` takes it, or rows in memory: a list, column or other iterable of strings
    (column ``prompt``), mappings of columns and chats (lists of messages), a dict of columns, a pandas or Polars
    DataFrame, a ``datasets.Dataset``, an Arrow table. Values in memory that JSON lacks, such as dates, become text;
    NaN becomes null.

    ``keys`` may be any keys of the job file, such as ``max_tokens`` or ``output``, its sections as mappings (or
    ``SamplingParams`` for ``sampling``), and options of the command, such as ``max_runtime="55m"`` and
    ``overwrite=True``. With an ``output``, the same call continues an interrupted run and returns at once for a
    finished one; without an ``output``, nothing is kept. Progress is shown on a terminal and in a notebook only. Each
    call loads the model: ``LLM`` keeps one.

    In the main thread SIGINT, SIGTERM and SIGHUP stop the run as they do a command: finished rows are journalled, then
    the signal has its usual effect; for Ctrl-C that is KeyboardInterrupt.

    Warns of failed rows. Raises UsageError for an impossible job, RunStopped if an option ended it before its last
    row, and as the command does.

    Example:
        >>> run = batchgen.generate(["What is 2 + 3?"], "LiquidAI/LFM2-350M", max_tokens=8)  # doctest: +SKIP
        >>> run[0]["text"]  # doctest: +SKIP
    """
    is_path = isinstance(rows, str | os.PathLike)
    options = _take_options(keys)
    sections = sections_of({"model": model, "prompt": prompt, **keys}, "generate")
    spec = _spec(os.fspath(rows) if is_path else None, sections)
    with ExitStack() as stack:
        if is_kept := bool(spec.output.path):
            lost = ""
        else:
            spec = replace(spec, output=replace(spec.output, path=str(stack.enter_context(temporary_folder()))))
            stack.enter_context(in_temporary_folder())
            lost = _NOT_KEPT
        lines = None if is_path else json_lines(rows, spec.input.request_columns)
        outcome = placement.run_placed(spec, options, engine_factory=engine_factory, lines=lines)
        run = _finished(spec, outcome, lost, rows.index if hasattr(rows, "iloc") else None)
        if not is_kept:
            run.read()
    return _with_warning(run)


def run_job(
    job: str | os.PathLike[str] | None = None, *, engine_factory: EngineFactory | None = None, **keys: Any
) -> Run:
    """Run a job, as ``batchgen run`` does: a job file, data, or the folder of a run. Call it again to resume.

    ``keys`` are as in ``generate``, and override the job's. Warnings, errors and signals are the same as in
    ``generate``.

    Example:
        >>> batchgen.run_job("job.toml", limit=10, max_runtime="55m")  # doctest: +SKIP
    """
    options = _take_options(keys)
    name = None if job is None else os.fspath(job)
    flags = sections_of(keys, "run_job")
    spec, shard = load_spec(name, flags, None if options.shard == WHOLE else options.shard)
    keeps_stdin = is_run_folder(name) and "path" not in flags.get("input", {})
    options = replace(options, shard=shard, keeps_stdin=keeps_stdin)
    return _with_warning(_finished(spec, placement.run_placed(spec, options, engine_factory=engine_factory), "", None))


def plan_job(job: str | os.PathLike[str] | None = None, *, calibrates: bool = False, **keys: Any) -> dict[str, Any]:
    """The plan that ``batchgen plan JOB --json`` prints: rows, bad rows, tokens, memory and time of a job."""
    options = _take_options({name: keys.pop(name) for name in ("shard", "overwrite") if name in keys})
    name = None if job is None else os.fspath(job)
    shard = None if options.shard == WHOLE else options.shard
    spec, shard = load_spec(name, sections_of(keys, "plan_job"), shard, ("model", "input"))
    return make_plan(spec, calibrates=calibrates, shard=shard, overwrites=options.overwrite)


def read_report(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``report.json`` of a finished run. Raises UsageError if it is missing."""
    return dict(reports.read_report(RunDir(Path(folder))))


_SWITCHES = ("overwrite", "update", "allow_mixed_kernels", "quiet")  # options of the command ``run``
_OPTIONS: dict[str, Callable[[str], Any]] = {  # options with a value, and how it is read
    "max_error_rate": parse_share,
    "shard": Shard.parse,
    "deadline": lambda text: parse_clock(text, datetime.now().astimezone()),
    "max_runtime": parse_duration,
    "max_total_tokens": parse_count,
}


def _option(name: str, value: Any) -> Any:
    """The value of an option. Raises ValueError if the command would refuse it."""
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise ValueError("must be True or False")
        return value
    return _OPTIONS[name](value.isoformat() if isinstance(value, datetime) else str(value))


def _take_options(keys: dict[str, Any]) -> RunOptions:
    """Remove the command's options from the arguments of a call and return them. Raises UsageError."""
    chosen: dict[str, Any] = {}
    for name in [name for name in (*_SWITCHES, *_OPTIONS) if name in keys]:
        value = keys.pop(name)
        try:
            if value is not None:
                chosen[name] = _option(name, value)
        except ValueError as error:
            raise UsageError(f"{name} = {shown(value, 60)}: {error}") from None
    limits = Limits(chosen.pop("deadline", None), chosen.pop("max_runtime", None), chosen.pop("max_total_tokens", None))
    progress: Literal["quiet", "bar"] = "quiet" if chosen.pop("quiet", False) else "bar"
    return RunOptions(limits=limits, progress=progress, may_exit=False, **chosen)


def _finished(spec: JobSpec, outcome: Outcome, lost: str, labels: Any) -> Run:
    """The finished run. Raises RunStopped for a run that was stopped; its message says what is ``lost``."""
    _pass_on_signal(outcome)
    if not outcome.is_finished:
        raise RunStopped(f"{outcome.lines[0].partition('; ')[0]}; {lost}" if lost else "; ".join(outcome.lines))
    return Run(spec, outcome, labels)


def _with_warning(run: Run) -> Run:
    counts = run.report["rows"]
    if counts["failed"]:
        failed = f"{counts['failed']:,} of {counted(counts['total'], 'row')} failed"
        warnings.warn(f"{failed}: Run.errors has them, and Run.rows does not", stacklevel=3)
    return run


def _misleads(labels: Any) -> bool:
    """Whether a pandas index labels a row with the number of another row."""
    import numpy as np

    if labels.nlevels > 1 or labels.dtype.kind not in "iufO":
        return False
    positions = np.arange(len(labels))
    return bool(((labels != positions) & labels.isin(positions)).any())


def _spec(path: str | None, sections: Mapping[str, Any]) -> JobSpec:
    """The job; ``path`` is None for rows in memory. Raises UsageError."""
    values = sections.get("input", {})
    if not isinstance(values, Mapping):
        return job_from_values(sections, "generate")  # raises UsageError for it
    if "path" in values:
        raise UsageError("generate: input has a path, and the rows are given as the first argument")
    if path is None and values.get("format", "auto") not in _LINES_FORMATS:
        raise UsageError(f"generate: input.format = {values['format']!r} is a format of files, not of rows in memory")
    return job_from_values({**sections, "input": {**values, "path": "-" if path is None else path}}, "generate")


def _pass_on_signal(outcome: Outcome) -> None:
    """Give a signal that stopped the run, or came too late to stop it, its usual effect."""
    if outcome.stop_reason and outcome.stop_reason in signal.Signals.__members__:
        number = signal.Signals[outcome.stop_reason]
        if signal.getsignal(number) is signal.default_int_handler:
            raise KeyboardInterrupt(outcome.lines[0])
        signal.raise_signal(number)

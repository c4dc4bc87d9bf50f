"""One invocation of a job: options in, outcome out, and between them what surrounds the work on its rows.

That is: lock and sweep the run directory, listen for signals, show progress, load the engine, pass rows through it into
the journal, and publish. Which rows run and how the outputs are written is left to the subclass in ``job``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from batchgen.config.job import JobSpec
from batchgen.core.answers import MAX_CPU_S
from batchgen.core.errors import (
    BatchgenError,
    ExitCode,
    ResumeMismatch,
    StorageError,
    UsageError,
)
from batchgen.core.fingerprint import Digests
from batchgen.core.machine import memory_errors
from batchgen.core.records import Row
from batchgen.core.remote import refusals_as_usage
from batchgen.core.shard import WHOLE, Shard
from batchgen.core.units import counted
from batchgen.input.validator import RowValidator
from batchgen.output.journal import Journal
from batchgen.output.manifest import KERNELS, Manifest, without_kernels
from batchgen.output.publish import Publication, open_destination
from batchgen.output.rundir import Begun, RunDir, tidy_on_refusal
from batchgen.report.advice import warnings
from batchgen.report.facts import numerics_text, pace, samples_text
from batchgen.run.backend import Backend, RunContext
from batchgen.run.display import make_display
from batchgen.run.loader import EngineFactory, ModelInfo, load_engine
from batchgen.run.progress import Progress
from batchgen.run.reports import last_report
from batchgen.run.requests import RequestStream
from batchgen.run.results import ResultSink
from batchgen.run.stop import Limits, Stopper, StopRequested


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one invocation, as opposed to the job: none of them changes a row's output.

    ``update`` lets a job take the place of another one, or of much of its input, and keeps each row that cannot differ.
    ``max_error_rate`` is a fraction; ``allow_mixed_kernels`` lets a run go on with kernels that round differently.
    ``progress`` is a bar on a terminal or in a notebook, and elsewhere a line every ``heartbeat_s`` seconds ("auto") or
    nothing ("bar"); or it is JSON lines ("json"), or nothing ("quiet"). ``shard`` may be given as ``(i, n)``. If it
    ``may_exit``, a stop that takes too long and a second SIGINT end the process. If it ``keeps_stdin``, standard input
    is not read, and its rows are those of an earlier start.
    """

    overwrite: bool = False
    update: bool = False
    max_error_rate: float | None = None
    shard: Shard = WHOLE
    allow_mixed_kernels: bool = False
    limits: Limits = field(default_factory=Limits)
    progress: Literal["auto", "bar", "json", "quiet"] = "auto"
    heartbeat_s: float = 30.0
    may_exit: bool = True
    keeps_stdin: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shard, Shard):
            object.__setattr__(self, "shard", Shard(*self.shard))
        if self.overwrite and self.update:
            raise UsageError("--overwrite and --update exclude each other: one drops what is there, the other keeps it")


@dataclass(frozen=True)
class Outcome:
    """End of an invocation: the exit code of the process, lines for the user, the report of a finished run.

    ``stop_reason`` is why it was asked to stop, such as the name of a signal; one may come too late to have an effect:
    ``is_finished`` says whether the outputs are there.
    """

    exit_code: ExitCode
    lines: tuple[str, ...]
    report: Mapping[str, Any] | None = field(default=None, repr=False)
    stop_reason: str | None = None
    is_finished: bool = True


class Invocation(ABC):
    """Holds a run directory while ``execute`` works in it; to be executed once.

    ``manifest``, ``begun`` (where it is kept), ``digests`` (of input and model files) and ``model`` are set by the
    subclass before they are needed.
    """

    manifest: Manifest
    begun: Begun
    digests: Digests
    model: ModelInfo

    def __init__(
        self, spec: JobSpec, options: RunOptions, run_dir: RunDir, engine_factory: EngineFactory | None
    ) -> None:
        self.spec = spec
        self.options = options
        self.run_dir = run_dir
        self.engine_factory = engine_factory or load_engine
        self.backend: Backend | None = None
        self._num_told = 0  # of its notes
        self.stopper = Stopper(options.limits, may_exit=options.may_exit)
        self.progress = Progress(run_dir.path, make_display(options.progress, options.heartbeat_s), self.stopper)

    @memory_errors("running this job")
    def execute(self) -> Outcome:
        """Do the work of the subclass under the lock, up to its end or a request to stop."""
        with self.stopper.listening(), tidy_on_refusal(self.run_dir.path):
            self.run_dir.create()
            with self.run_dir.lock():
                self.run_dir.sweep()
                try:
                    with self.progress, self.stopper.interruptible():
                        outcome = self.work()
                        self.progress.finish(outcome.report or last_report(self.run_dir))
                except StopRequested:
                    outcome = self.stopped()
                finally:
                    if self.backend is not None:
                        self.backend.close()
        return replace(outcome, stop_reason=self.stopper.reason)

    @abstractmethod
    def work(self) -> Outcome:
        """Begin, resume, or find that all is done."""

    def load(self) -> Backend:
        """The engine, loaded once. Raises ModelError if files of the model have changed since they were read."""
        if self.backend is None:
            with self.progress.phase("loading the model", "load"):
                self.backend = self.engine_factory(self.spec, replace(self.model, context=self._context()))
                self.model.check_unchanged(self.digests)
            with self.progress.phase("compiling kernels for this machine, once", "load"):
                self.backend.prepare()
            self._tell_notes(self.backend)
        return self.backend

    def _tell_notes(self, backend: Backend) -> None:
        """Show what the engine has noted since the last call: it may find out late that it must go slower."""
        for line in backend.notes[self._num_told :]:
            self.progress.display.note(line)
        self._num_told = len(backend.notes)

    def _context(self) -> RunContext:
        fingerprints = self.manifest.fingerprints
        return RunContext(
            self.manifest.rendered_at,
            fingerprints["model"],
            self.digests.to_plain(),
            fingerprints.get("numerics"),
            self.progress.rows_total,
            self.progress.display.note,
            self.options.allow_mixed_kernels,
        )

    def generate(self, rows: Iterable[Row], validator: RowValidator, journal: Journal) -> bool:
        """Run the rows and record their results in the journal; returns whether all of them ended.

        The engine is loaded only if a row needs it. On a stop the tokens of half-done rows are saved, also if no worker
        is left.
        """
        record_builder = self.model.record_builder(self.spec)
        charge = self.progress.clock.on
        before, limit, template = self.progress.sink, self.options.max_error_rate, validator.builder.finder.template
        sink = ResultSink(journal, record_builder, limit, charge, template)
        self.progress.follow(sink)
        if before is not None:  # of rows that were taken over
            sink.empty_fields += before.empty_fields
        stream = RequestStream(sink, validator, self.stopper, charge)
        tasks = stream.tasks(rows)
        self.stopper.check_limits(0)  # before a model is loaded for nothing
        with self.progress.phase("reading the input", "read"):
            first = next(tasks, None)
        if first is not None:
            backend = self._agreed_backend()
            engine = backend.engine
            if backend.takes_rows:
                stream.gives_rows = True
                first = replace(stream.pending[first.key], output_token_ids=first.output_token_ids)
            try:
                with self.progress.generating(backend), self.stopper.drain_with(engine.stop):
                    for result in engine.run(chain([first], tasks)):
                        sink.finish(stream.pending.pop(result.key), result)
                        self.stopper.check_limits(self.progress.computed_tokens)
                        sink.check_error_rate(self.stopper)
            except BatchgenError as error:
                if error.exit_code == ExitCode.STOPPED:  # the last worker is lost: a resume goes on from what it told
                    journal.save_partials(engine.unfinished())
                    journal.commit()
                raise
            finally:
                self._tell_notes(backend)
                sink.close()
            if stream.pending:
                journal.save_partials(engine.unfinished())
        if num_unsearched := record_builder.num_unsearched:
            which = f"eval.extract takes more than {MAX_CPU_S:g} s over {counted(num_unsearched, 'text')}"
            self.progress.display.note(f"{which}, whose answer is null now: give an expression with less repetition")
        journal.commit()
        return stream.is_exhausted and not stream.pending

    def _agreed_backend(self) -> Backend:
        """The engine, which computes as the run did so far; an allowed mix of kernels is recorded in the manifest.

        Raises ResumeMismatch if rows would come out differently. Kernels that are not known may be any.
        """
        backend, folder = self.load(), self.run_dir.path
        begun: dict[str, str] = self.manifest.fingerprints.get("numerics", backend.numerics)
        was, now = without_kernels(begun), without_kernels(backend.numerics)
        if was != now:
            others = [name for name in was | now if was.get(name) != now.get(name)]
            flags = " ".join(
                f"llguidance=={was.get(name)}"
                if name == "llguidance"
                else f"--{name.replace('_', '-')} {was.get(name, 'auto')}"
                for name in others
            )
            raise ResumeMismatch(
                f"{folder} was begun in {numerics_text(was)}, here the model runs in {numerics_text(now)}, "
                f"which gives other tokens: go on with {flags}, or start anew with --overwrite"
            )
        kernels = {numerics[KERNELS] for numerics in (begun, backend.numerics) if KERNELS in numerics}
        if len(kernels) < 2 or self.options.allow_mixed_kernels:
            return backend
        raise ResumeMismatch(
            f"{folder} was begun with the kernels {begun[KERNELS]}, here they are {backend.numerics[KERNELS]}, "
            "which add up in another order, so tokens may differ: go on where it was begun, give "
            "--allow-mixed-kernels, or start anew with --overwrite"
        )

    def write_begun(self, manifest: Manifest) -> None:
        """Take a manifest as that of the job under way, and store it with its journal."""
        self.manifest = manifest
        self.begun = Begun(self.begun.folder, manifest)
        self.run_dir.write_begun(self.begun)

    def set_numerics(self, numerics: dict[str, str]) -> None:
        """Put the numerics that rows are computed with into the manifest."""
        self.manifest = replace(self.manifest, fingerprints={**self.manifest.fingerprints, "numerics": numerics})

    def finished(self, report: Mapping[str, Any]) -> Outcome:
        """The outcome of a finished run."""
        self.progress.finish(report)
        self.progress.keep_file(False)
        rows, num_copies = report["rows"], report["duplicates"]
        copies = f" ({num_copies:,} as copies)" if num_copies else ""
        if num_kept := report.get("reused", {}).get("rows", 0):
            computed = f"{counted(rows['done'] - num_kept, 'row')} computed"
            lines = [f"{counted(rows['done'], 'row')} done, {num_kept:,} of them kept"]
        else:
            computed, lines = f"{counted(rows['done'], 'row')} done", []
        lines.append(f"{computed}{copies}, {pace(report)}")
        if rows["failed"]:
            codes = ", ".join(f"{code} {count:,}" for code, count in report["errors"].items())
            lines.append(f"{counted(rows['failed'], 'row')} failed: {codes}; see {short(self.run_dir.errors)}")
        accuracy = report.get("accuracy")
        if accuracy and accuracy["total"]:
            share = f"{accuracy['exact_match']:.2%} ({accuracy['correct']:,} of {accuracy['total']:,})"
            lines.append(", ".join([f"exact match {share}", *samples_text(accuracy)]))
        lines += warnings(report)
        if not rows["total"]:
            lines.append("warning: the input has no rows")
        lines.append(f"outputs in {short(self.run_dir.outputs(self.spec.output.format))}")
        return Outcome(ExitCode.ROWS_FAILED if rows["failed"] else ExitCode.OK, tuple(lines), report)

    def claim(self) -> None:
        """See that the finished files can be published, before anything is computed. Raises UsageError, RemoteError."""
        if self.spec.output.publish:
            with self.progress.phase("checking output.publish", "read"), refusals_as_usage():
                self._publication().claim(overwrite=self.options.overwrite)

    def published(self, outcome: Outcome) -> Outcome:
        """The outcome of a finished run whose files are where the job wants them too; what is there is not copied.

        Raises StorageError: the run stays finished, and the next invocation tries again.
        """
        if not self.spec.output.publish:
            return outcome
        try:
            with self.progress.phase("publishing", "write"):
                lines = self._publication().publish()
        except BatchgenError as error:
            advice = "the run is finished and its files are kept; run again to publish them"
            raise StorageError(f"{error}; {advice}") from error
        return replace(outcome, lines=(*outcome.lines, *lines))

    def _publication(self) -> Publication:
        return Publication(open_destination(self.spec.output.publish), self.run_dir, self.manifest)

    def stopped(self) -> Outcome:
        """The outcome of an early stop, by request or because too many rows failed."""
        self.progress.stop()
        sink, reason, advice = self.progress.sink, self.stopper.reason or "", self.stopper.advice
        if sink is None:
            lines: tuple[str, ...] = (f"stopped ({reason}) before the first row; {advice}",)
            return Outcome(ExitCode.STOPPED, lines, is_finished=False)
        if self.stopper.exit_code == ExitCode.ROWS_FAILED:
            is_first = not self.run_dir.manifest.exists()
            where = f"see {short(self.run_dir.errors)}" if is_first else "the files are still those of the job before"
            return Outcome(ExitCode.ROWS_FAILED, (f"stopped: {reason}", f"{where}; {advice}"), is_finished=False)
        total = "" if self.progress.rows_total is None else f" of {self.progress.rows_total:,}"
        rows = f"{sink.num_done + sink.num_failed:,}{total} rows finished"
        if sink.journal.partials:
            rows += f", {len(sink.journal.partials):,} half done and saved"
        return Outcome(ExitCode.STOPPED, (f"stopped ({reason}): {rows}; {advice}",), is_finished=False)


def short(path: Path) -> str:
    """A path relative to the working directory, where that is shorter."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return relative if not relative.startswith("..") else str(path)

"""One invocation of a job: its options, progress and requests to stop, and its work around an engine.

It passes rows through the engine into the journal; ``job`` decides which rows run and the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from batchgen.core.errors import BatchgenError, ExitCode, ResumeMismatch, StorageError, UsageError
from batchgen.core.numerics import Numerics
from batchgen.core.records import Request, Row
from batchgen.core.remote import refusals_as_usage
from batchgen.core.units import WHOLE, Shard
from batchgen.input.ids import RowValidator
from batchgen.input.rows import Prepared, prepared
from batchgen.input.source import RowRange
from batchgen.output.manifest import Manifest
from batchgen.output.publish import Bucket, Publication
from batchgen.output.rundir import RunDir
from batchgen.run.display import make_display
from batchgen.run.loaded_engine import LoadedEngine, RunContext
from batchgen.run.loader import EngineFactory, load_engine
from batchgen.run.opened import OpenJob
from batchgen.run.outcome import Outcome
from batchgen.run.progress import Progress
from batchgen.run.results import Charge, ResultSink, Turns
from batchgen.run.stop import Limits, Stopper
from batchgen.run.vectors import cut_note


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one invocation, as opposed to the job: none of them changes a row's output.

    ``update`` lets a job replace another one, or change much of its input. ``max_error_rate`` is a fraction;
    ``allow_mixed_kernels`` lets kernels differ that round differently. ``progress``: a bar on a terminal or in a
    notebook, and elsewhere a line every ``heartbeat_s`` seconds ("auto") or nothing ("bar"); "json" lines; or "quiet".
    ``shard`` may be ``(i, n)``. Only if it ``may_exit`` do a late stop and a second SIGINT end the process. If it
    ``keeps_stdin``, rows that an earlier start read from standard input are used.
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
            raise UsageError("--overwrite and --update exclude each other: only --update keeps earlier results")


class OtherNumerics(ResumeMismatch):
    """The engine's numerics differ from the numerics of the job's rows so far."""


class Invocation:
    """One start of a job in ``run_dir``: its options, progress, engine and ``output.publish``; ``job._Job`` uses it."""

    def __init__(
        self, publish: str, options: RunOptions, run_dir: RunDir, engine_factory: EngineFactory | None
    ) -> None:
        self._publish = publish
        self.options = options
        self.run_dir = run_dir
        self.loaded: LoadedEngine | None = None
        self._engine_factory = engine_factory or load_engine
        self._num_told = 0  # of its notes
        self.stopper = Stopper(options.limits, may_exit=options.may_exit)
        display = make_display(options.progress, options.heartbeat_s)
        self.progress = Progress(run_dir.path, display, self.stopper)
        self.note = display.note  # shows a line to the user

    def load(self, job: OpenJob, manifest: Manifest) -> LoadedEngine:
        """The engine, loaded once. Raises ModelError if files of the model have changed since they were read."""
        if self.loaded is None:
            with self.progress.phase("loading the model", "load"):
                context = RunContext(
                    manifest.rendered_at,
                    manifest.fingerprints["model"],
                    job.digests.to_plain(),
                    manifest.fingerprints.get("numerics"),
                    self.progress.rows_total,
                    self.note,
                    self.options.allow_mixed_kernels,
                )
                self.loaded = self._engine_factory(job.spec, replace(job.model, context=context))
                job.model.files.check_unchanged(job.digests)
            with self.progress.phase("compiling kernels for this machine, once", "load"):
                self.loaded.prepare()
            self._tell_notes(self.loaded)
        return self.loaded

    def _tell_notes(self, loaded: LoadedEngine) -> None:
        """Show the engine's notes since the last call, such as a late fallback to slower kernels."""
        for line in loaded.notes[self._num_told :]:
            self.note(line)
        self._num_told = len(loaded.notes)

    def count(self, rows: RowRange) -> None:
        """Count the rows of this shard, if they are not counted yet."""
        if self.progress.rows_total is None:
            with self.progress.phase("counting the rows", "read"):
                self.progress.rows_total = rows.count()

    def generate(
        self, job: OpenJob, manifest: Manifest, rows: Iterable[Row], validator: RowValidator, sink: ResultSink
    ) -> bool:
        """Run the rows of a job and record their results in the sink's journal; returns whether all of them ended.

        The engine is loaded only if a row needs it. On a stop the tokens of half-done rows are saved, even if no worker
        is left.
        """
        self.progress.sink = sink
        sink.cut_at = job.builder.cut_at
        journal, stream = sink.journal, RequestStream(sink, validator, self.stopper, self.progress.clock.on)
        tasks = stream.tasks(rows)
        self.stopper.check_limits(0)  # before a model is loaded for nothing
        with self.progress.phase("reading the input", "read"):
            first = next(tasks, None)
        if first is not None:
            loaded = self._agreed_engine(job, manifest)
            engine = loaded.engine
            if loaded.takes_rows:
                stream.gives_rows = True
                first = stream.pending[first.key]  # it is a request already, but workers take rows
            turns = Turns(None if loaded.takes_rows else validator.builder, stream.pending, sink.save_turns)
            try:
                with self.progress.generating(loaded), self.stopper.drain_with(engine.stop):
                    for result in engine.run(turns.requests(chain([first], tasks))):
                        if (ended := turns.take(result)) is not None:
                            sink.finish(*ended)
                        self.stopper.check_limits(self.progress.computed_tokens)
                        sink.check_error_rate(self.stopper)
            except BatchgenError as error:
                if error.exit_code == ExitCode.STOPPED:  # the last worker is lost: a resume continues from there
                    journal.save_partials(turns.unfinished(engine.unfinished()))
                    journal.commit()
                raise
            finally:
                self._tell_notes(loaded)
                sink.close()
            if stream.pending:
                journal.save_partials(turns.unfinished(engine.unfinished()))
        for line in cut_note(sink.num_cut, sink.cut_at):
            self.note(line)
        journal.commit()
        return stream.is_exhausted and not stream.pending

    def _agreed_engine(self, job: OpenJob, manifest: Manifest) -> LoadedEngine:
        """The engine. Raises OtherNumerics if its numerics differ from the numerics of the run's rows so far."""
        loaded = self.load(job, manifest)
        now = Numerics.of(loaded.numerics)
        begun = manifest.numerics or now
        if why := begun.refusal(now, may_mix_kernels=self.options.allow_mixed_kernels):
            flags = begun.flags(now)
            remedy = f"continue with {flags}; " if flags else ""
            again = "--update computes all rows again, --overwrite drops them first"
            raise OtherNumerics(f"{self.run_dir.path} cannot be continued here: {why}; {remedy}{again}")
        return loaded

    def claim(self, manifest: Manifest) -> None:
        """Check that the finished files can be published; call it before the run. Raises UsageError, RemoteError."""
        if self._publish:
            with self.progress.phase("checking output.publish", "read"), refusals_as_usage():
                Publication(Bucket(self._publish), self.run_dir, manifest).claim(overwrite=self.options.overwrite)

    def published(self, outcome: Outcome, manifest: Manifest) -> Outcome:
        """Publish the files of a finished run, except those already there; adds a line about it to the outcome.

        Raises StorageError: the run stays finished, and the next invocation tries again.
        """
        if not self._publish:
            return outcome
        try:
            with self.progress.phase("publishing", "write"):
                lines = Publication(Bucket(self._publish), self.run_dir, manifest).publish()
        except BatchgenError as error:
            advice = "the run is finished and its files are kept; run again to publish them"
            raise StorageError(f"{error}; {advice}") from error
        return replace(outcome, lines=(*outcome.lines, *lines))


class RequestStream:
    """The requests of one invocation, made as the engine asks for them; memory does not grow with the input.

    ``pending`` holds the rows that are with the engine, by index. If ``gives_rows`` is set, ``tasks`` yields rows with
    claimed ids, which workers make into requests. Reading, checking and tokenizing are charged to "read".
    """

    def __init__(self, sink: ResultSink, validator: RowValidator, stopper: Stopper, charge: Charge) -> None:
        self._sink = sink
        self._validator = validator
        self._stopper = stopper
        self._charge = charge
        self.pending: dict[int, Row] = {}
        self.is_exhausted = False
        self.gives_rows = False

    def tasks(self, rows: Iterable[Row]) -> Iterator[Request | Row]:
        """Requests for ``rows``, or the rows, in order, with their tokens so far; ends early on a stop."""
        answers = prepared(map(self._with_tokens, rows), self._build)
        while not self._stopper.requested:
            with self._charge("read"):
                answer = next(answers, None)
            if answer is None:  # the run is over, whatever its error rate
                self.is_exhausted = True
                return
            self._sink.check_error_rate(self._stopper)
            if self._stopper.requested:
                return
            row, request = answer
            num_read = self._sink.journal.done.num_below(row.index + 1)
            self._sink.num_read = max(self._sink.num_read, num_read)
            if row.error is not None:
                self._sink.fail(row)
            else:
                self.pending[row.key] = row
                yield row if self.gives_rows or request is None else request

    def _build(self, rows: list[Row]) -> Iterator[Prepared]:
        if self.gives_rows:
            return ((row, None) for row in self._validator.claim(rows))
        return self._validator.build(rows)

    def _with_tokens(self, row: Row) -> Row:
        tokens = self._sink.journal.partials.get(row.key, ())
        return replace(row, output_token_ids=tokens) if tokens else row

"""One invocation of a job: its options, and the parts of its work around an engine.

That is: load the engine, pass rows through it into the journal, and publish. Which rows run, in what order all is done
and how the outputs are written is decided in ``job``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import kept_columns
from batchgen.core.errors import BatchgenError, ExitCode, ResumeMismatch, StorageError, UsageError
from batchgen.core.fingerprint import Digests
from batchgen.core.numerics import OTHER_ORDER, Numerics
from batchgen.core.records import Request, Row
from batchgen.core.remote import refusals_as_usage
from batchgen.core.shard import WHOLE, Shard
from batchgen.core.units import shown
from batchgen.input.ids import RowValidator, may_have_ids, rebuild_ids
from batchgen.input.rows import CHUNK_ROWS, chunked
from batchgen.input.source import RowRange, Source
from batchgen.output.bucket import Bucket
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest
from batchgen.output.publish import Publication
from batchgen.output.rundir import Begun, RunDir
from batchgen.run.backend import Backend, RunContext
from batchgen.run.display import make_display
from batchgen.run.loader import EngineFactory, ModelInfo, load_engine
from batchgen.run.outcome import Outcome
from batchgen.run.progress import Progress
from batchgen.run.results import Charge, ResultSink
from batchgen.run.stop import Limits, Stopper

_SLOW_CHUNK_S = 2.0  # a chat template may take seconds per row, and a stop loses the chunk that it interrupts


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


class OtherNumerics(ResumeMismatch):
    """The engine computes otherwise than the rows of a job so far."""


class Invocation:
    """A job with its run directory, progress and engine.

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
        display = make_display(options.progress, options.heartbeat_s)
        self.progress = Progress(run_dir.path, display, self.stopper)
        self.note = display.note  # shows a line to the user

    def load(self) -> Backend:
        """The engine, loaded once. Raises ModelError if files of the model have changed since they were read."""
        if self.backend is None:
            with self.progress.phase("loading the model", "load"):
                self.backend = self.engine_factory(self.spec, replace(self.model, context=self._context()))
                self.model.files.check_unchanged(self.digests)
            with self.progress.phase("compiling kernels for this machine, once", "load"):
                self.backend.prepare()
            self._tell_notes(self.backend)
        return self.backend

    def _tell_notes(self, backend: Backend) -> None:
        """Show what the engine has noted since the last call: it may find out late that it must go slower."""
        for line in backend.notes[self._num_told :]:
            self.note(line)
        self._num_told = len(backend.notes)

    def _context(self) -> RunContext:
        fingerprints = self.manifest.fingerprints
        return RunContext(
            self.manifest.rendered_at,
            fingerprints["model"],
            self.digests.to_plain(),
            fingerprints.get("numerics"),
            self.progress.rows_total,
            self.note,
            self.options.allow_mixed_kernels,
        )

    def count(self, rows: RowRange) -> None:
        """Count the rows of this shard, if they are not counted yet."""
        if self.progress.rows_total is None:
            with self.progress.phase("counting the rows", "read"):
                self.progress.expect(rows.count())

    def check_read(self, source: Source) -> None:
        """Name the kept columns whose cells could not all be read. Raises InputError if a file has changed."""
        source.check_unchanged()
        for name in kept_columns(self.spec, dict.fromkeys(sorted(source.unread))):
            self.note(f"column {shown(name)} has cells that cannot be read: they are null in the outputs")

    def restore_ids(self, source: Source, journal: Journal, validator: RowValidator) -> None:
        """Make all rows up to the last finished one claim their ids again: they are not kept across invocations."""
        if may_have_ids(self.spec.input):
            with self.progress.phase("reading ids again", "read"):
                rebuild_ids(source.read(), max(journal.done), validator)

    def generate(self, rows: Iterable[Row], validator: RowValidator, sink: ResultSink) -> bool:
        """Run the rows and record their results in the sink's journal; returns whether all of them ended.

        The engine is loaded only if a row needs it. On a stop the tokens of half-done rows are saved, also if no worker
        is left.
        """
        self.progress.follow(sink)
        journal, stream = sink.journal, RequestStream(sink, validator, self.stopper, self.progress.clock.on)
        tasks = stream.tasks(rows)
        self.stopper.check_limits(0)  # before a model is loaded for nothing
        with self.progress.phase("reading the input", "read"):
            first = next(tasks, None)
        if first is not None:
            backend = self._agreed_backend()
            engine = backend.engine
            if backend.takes_rows:
                stream.gives_rows = True
                first = stream.pending[first.key]
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
        journal.commit()
        return stream.is_exhausted and not stream.pending

    def _agreed_backend(self) -> Backend:
        """The engine, which computes as the run did so far.

        Raises OtherNumerics if rows would come out differently. Kernels that are not known may be any.
        """
        backend, folder = self.load(), self.run_dir.path
        now = Numerics.of(backend.numerics)
        begun = self.manifest.numerics or now
        again = "--update computes all rows again, --overwrite drops them first"
        if begun.base != now.base:
            flags = begun.flags(now)
            raise OtherNumerics(
                f"{folder} was begun in {begun.base}, here the model runs in {now.base}, which gives other tokens: "
                f"{f'continue with {flags}; ' if flags else ''}{again}"
            )
        if begun.has_other_kernels(now) and not self.options.allow_mixed_kernels:
            raise OtherNumerics(
                f"{folder} was begun with the kernels {begun.kernels}, here they are {now.kernels}, {OTHER_ORDER}: "
                f"continue where it was begun, or give --allow-mixed-kernels; {again}"
            )
        return backend

    def write_begun(self, manifest: Manifest) -> None:
        """Take a manifest as that of the job under way, and store it with its journal."""
        self.manifest = manifest
        self.begun = Begun(self.begun.folder, manifest)
        self.run_dir.write_begun(self.begun)

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
        return Publication(Bucket(self.spec.output.publish), self.run_dir, self.manifest)


class RequestStream:
    """The requests of one invocation, read and made in chunks as the engine asks for them.

    Memory does not grow with the input. Where workers make rows into requests, it yields rows whose ids are claimed.
    ``pending`` holds the rows that are with the engine, by index. ``is_exhausted`` says that the input has no more
    rows. Once ``gives_rows`` is set, ``tasks`` yields rows. Reading, checking and tokenizing are charged to "read".
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
        """The requests of ``rows`` in order, with the tokens of earlier invocations; ends early on a stop."""
        max_rows = 1
        chunks = chunked(rows, lambda: max_rows)
        while not self._stopper.requested:
            began_at = time.monotonic()
            with self._charge("read"):
                chunk = [self._begun(row) for row in next(chunks, [])]
                claimed = ((row, None) for row in self._validator.claim(chunk))
                answers = claimed if self.gives_rows else self._validator.validate(chunk)
                answer = next(answers, None)
            max_rows = min(2 * max_rows, CHUNK_ROWS) if time.monotonic() - began_at < _SLOW_CHUNK_S else 1
            if not chunk:
                self.is_exhausted = True
                return
            if answer is not None:  # without rows left the run is over, whatever its error rate
                self._sink.check_error_rate(self._stopper)
            num_read = self._sink.journal.done.num_below(chunk[-1].index + 1)
            self._sink.num_read = max(self._sink.num_read, num_read)
            while answer is not None and not self._stopper.requested:
                row, request = answer
                if row.error is not None:
                    self._sink.fail(row)
                else:
                    self.pending[row.key] = row
                    yield row if self.gives_rows or request is None else request
                with self._charge("read"):
                    answer = next(answers, None)

    def _begun(self, row: Row) -> Row:
        tokens = self._sink.journal.partials.get(row.key, ())
        return replace(row, output_token_ids=tokens) if tokens else row

"""The composition root of ``batchgen run``: the one place that sees reader, engine, journal, outputs and report.

It decides the order of things, so that a refusal comes before anything is written and a kill at any moment leaves a
run that resumes. What each thing does is said elsewhere.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from batchgen.config.job import SAMPLING_COLUMNS, JobSpec
from batchgen.core.errors import ExitCode, ResumeMismatch, StorageError, UsageError
from batchgen.core.fingerprint import Digests
from batchgen.core.records import WHOLE
from batchgen.core.units import counted
from batchgen.core.version import __version__
from batchgen.input.columns import check_columns, check_taken_columns
from batchgen.input.ids import UniqueIds, may_have_ids
from batchgen.input.requests import RequestBuilder
from batchgen.input.source import RowRange, Source, open_source
from batchgen.input.validator import RowValidator, rebuild_ids, refuse_bad_rows
from batchgen.output.finalize import finalize, write_errors
from batchgen.output.journal import Journal
from batchgen.output.manifest import KERNELS, Manifest, compare
from batchgen.output.payloads import Payloads
from batchgen.output.rundir import IDS_NAME, RunDir
from batchgen.report.build import build_report, write_report
from batchgen.run.display import make_display
from batchgen.run.folders import tidy_on_refusal
from batchgen.run.generate import generate
from batchgen.run.loader import Backend, EngineFactory, ModelInfo, load_engine, read_model
from batchgen.run.options import RunOptions
from batchgen.run.outcome import Outcome, about_job, journal_totals
from batchgen.run.progress import Progress
from batchgen.run.requests import Feed
from batchgen.run.results import Ledger
from batchgen.run.stdin import Spool
from batchgen.run.stop import Stopper, StopRequested


def run_job(
    spec: JobSpec, options: RunOptions | None = None, *, engine_factory: EngineFactory | None = None
) -> Outcome:
    """Run a job, or what is left of it, and say how it ended.

    ``engine_factory`` makes the engine, by default the model's own. Handles SIGINT and SIGTERM while it works, when
    called from the main thread. Raises UsageError before anything is written, LockedError if another process is at
    it, StorageError and other BatchgenErrors for what goes wrong later.
    """
    options = options or RunOptions()
    run_dir = RunDir(Path(spec.output.path))
    stopper = Stopper(options.limits)
    progress = Progress(run_dir.path, make_display(options.progress, options.heartbeat_s), stopper)
    with stopper.listening(), tidy_on_refusal(run_dir.path):
        run_dir.create()
        with run_dir.lock():
            run_dir.sweep()
            try:
                with progress, stopper.interruptible():
                    return _Job(spec, options, run_dir, progress, engine_factory or load_engine).run()
            except StopRequested:
                return Outcome.stopped(run_dir, stopper.reason or "", progress)


@dataclass(frozen=True)
class _Inputs:
    """What can be known of a job before its run directory is touched."""

    source: Source
    model: ModelInfo
    builder: RequestBuilder
    manifest: Manifest


class _Job:
    """One invocation, holding the lock of its run directory."""

    def __init__(
        self, spec: JobSpec, options: RunOptions, run_dir: RunDir, progress: Progress, engine_factory: EngineFactory
    ) -> None:
        self.spec = spec
        self.options = options
        self.run_dir = run_dir
        self.progress = progress
        self.engine_factory = engine_factory
        self.backend: Backend | None = None
        self.digests = Digests()
        self.spool = Spool(run_dir.spool) if spec.input.path == ("-",) else None

    def run(self) -> Outcome:
        """Begin, resume, or find that all is done."""
        begun = self._begun()
        with ExitStack() as stack:
            if self.spool is not None:
                stack.callback(self.spool.drop)
            self.digests = Digests(begun.file_states if begun else None)
            source = self._find_input(begun)
            model, manifest = self._identify(source, begun)
            if begun is not None:
                if self.run_dir.is_complete():
                    self._refuse_other_form(begun)
                manifest = self._agreed(begun, manifest)
                if self.run_dir.is_complete():
                    with suppress(StorageError):  # a disk that is full by now
                        self._with_file_states(begun)
                    return self._already_done(manifest)
            if source is None:
                raise UsageError(f"{self.run_dir.spool} has gone; pipe the same rows in again, or --overwrite")
            builder = model.builder(self.spec.input, self.spec.sampling, self.spec.sampling_columns)
            inputs = _Inputs(source, model, builder, manifest)
            if begun is None:
                check_columns(source.read(), self.spec, builder.finder)
                inputs = self._prepare(inputs)
                self._begin(inputs.manifest)
            elif SAMPLING_COLUMNS not in begun.output_keys and not self.spec.sampling_columns:
                check_taken_columns(source.read(), builder.finder)
            if self.spool is not None:
                self.spool.keep()
                inputs = replace(inputs, source=self._open_source(self.run_dir.spool))
            journal = Journal.open(self.run_dir.journal, self.options.shard)
            stack.callback(journal.close)
            for line in journal.recovery.messages():
                self.progress.display.note(line)
            return self._work(inputs, journal, stack, is_resumed=begun is not None)

    def _find_input(self, begun: Manifest | None) -> Source | None:
        """The rows; None where they came on standard input once and are not given again. Raises UsageError."""
        if self.spool is None:
            source = self._open_source()
            for path in source.paths:
                if self.run_dir.owns(path):
                    raise UsageError(f"the input {path} would be overwritten by this run; choose another output.path")
            return source
        is_resumed = begun is not None and begun.job["input"]["path"] == ["-"]
        with self.progress.phase("reading standard input", "read"):
            found = self.spool.read(is_resumed=is_resumed)
        if is_resumed and found in (None, self.run_dir.spool):
            self.progress.display.note("nothing on standard input: going by the rows that this run was begun with")
        return None if found is None else self._open_source(found)

    def _open_source(self, path: Path | None = None) -> Source:
        """The rows of what the job names, or of the file that stands for it."""
        where = self.spec.input if path is None else replace(self.spec.input, path=(str(path),))
        with self.progress.phase("opening the input", "read"):
            return open_source(where, self.run_dir.owns)

    def _identify(self, source: Source | None, begun: Manifest | None) -> tuple[ModelInfo, Manifest]:
        """Find the model, and what a resume is held against. Raises UsageError."""
        with self.progress.phase("finding the model", "load"):
            model = read_model(self.spec)
        with self.progress.phase("checking the input", "read"):
            if source is not None:
                found = source.fingerprint(self.digests)
            else:
                found = begun.fingerprints["input"] if begun is not None else {}
            if self.spool is not None and source is not None:
                found = {"files": [{**file, "file": "-"} for file in found["files"]]}
        with self.progress.phase("checking the model", "load"):
            fingerprints = {"input": found, "model": model.fingerprint(self.digests), "code": {"batchgen": __version__}}
        return model, Manifest(
            job=self.spec.to_dict(),
            output_keys=self.spec.output_keys(),
            fingerprints=fingerprints,
            shard=self.options.shard,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            file_states=self.digests.to_plain(),
        )

    def _agreed(self, begun: Manifest, now: Manifest) -> Manifest:
        """The manifest to go on with. Raises ResumeMismatch when outputs would differ."""
        numerics = begun.fingerprints.get("numerics")
        if numerics is not None:  # what "auto" comes to is known once the weights are loaded, and compared then
            named = {"dtype": self.spec.model.dtype, "device": self.spec.model.device.partition(":")[0]}
            numerics = numerics | {name: value for name, value in named.items() if value != "auto"}
            now = replace(now, fingerprints={**now.fingerprints, "numerics": numerics})
        found = compare(begun, now)
        found = replace(found, refused=(*found.refused, *self._other_ids(begun)))
        if found.refused:
            raise ResumeMismatch(
                f"{self.run_dir.path} was begun with another job; what changes its outputs:\n"
                + "".join(f"  {line}\n" for line in found.refused)
                + "put back what changed, or run with --overwrite to start anew, or choose another output.path"
            )
        for line in found.allowed if not self.run_dir.is_complete() else ():
            self.progress.display.note(f"resuming with {line}")
        return replace(now, created_at=begun.created_at, num_rows=begun.num_rows)

    def _other_ids(self, begun: Manifest) -> tuple[str, ...]:
        """The change of output format, where rows have ids and it decides which of them are equal."""
        was, now = begun.job["output"]["format"], self.spec.output
        if not may_have_ids(self.spec.input) or replace(now, format=was).has_text_ids == now.has_text_ids:
            return ()
        return (f'output.format: was "{was}", now "{now.format}" (only openai-batch has 5 and "5" for one id)',)

    def _prepare(self, inputs: _Inputs) -> _Inputs:
        """Load the weights before anything is written: unusable ones leave no trace, and no old run is lost."""
        self._refuse_model_folder(inputs.model)
        if self.options.strict:
            with closing(UniqueIds(None, as_text=self.spec.output.has_text_ids)) as ids:
                self._refuse_bad_rows(self._rows(inputs, None), self._validator(inputs, ids))
        self.backend = self._load(inputs.model)
        fingerprints = {**inputs.manifest.fingerprints, "numerics": self.backend.numerics}
        return replace(inputs, manifest=replace(inputs.manifest, fingerprints=fingerprints))

    def _begin(self, manifest: Manifest) -> None:
        """Start from nothing. ``job.json`` comes first: a directory with any other file of a run has one."""
        self.run_dir.refuse_strays()
        if self.options.overwrite:
            self.progress.begin_anew()
            self.run_dir.clear()
        else:
            self.run_dir.clear_beginnings()
        if self.spool is not None:
            self.spool.keep()
        self.run_dir.write_manifest(manifest)

    def _begun(self) -> Manifest | None:
        """What the run directory was begun with; None to start from nothing. Raises UsageError."""
        if not self.run_dir.manifest.exists():
            self.progress.begin_anew()
        if not self.options.overwrite:
            return self.run_dir.read_manifest()
        self.run_dir.refuse_foreign_manifest()
        return None

    def _refuse_model_folder(self, model: ModelInfo) -> None:
        """Raises UsageError where the run would write into the folder of its model or tokenizer."""
        for folder in (model.folder, model.tokenizer_folder):
            if folder is None:
                continue
            if folder.resolve() == self.run_dir.path.resolve():
                raise UsageError(f"output.path = {self.run_dir.path} is the model's own folder; choose another one")
            if self.run_dir.owns(folder):
                raise UsageError(f"the model in {folder} would be removed by this run; choose another output.path")

    def _load(self, model: ModelInfo) -> Backend:
        with self.progress.phase("loading the model", "load"):
            backend = self.engine_factory(self.spec, model)
            model.check_unchanged(self.digests)
        for line in backend.notes:
            self.progress.display.note(line)
        return backend

    def _resumed_backend(self, inputs: _Inputs) -> Backend:
        """The engine, loaded now if it was not yet. Raises ResumeMismatch if it computes otherwise than before."""
        self.backend = self.backend or self._load(inputs.model)
        with_numerics(inputs.manifest, self.backend, self.run_dir, self.progress, self.options)
        return self.backend

    def _work(self, inputs: _Inputs, journal: Journal, stack: ExitStack, *, is_resumed: bool) -> Outcome:
        """Generate what the journal does not hold, then write the outputs."""
        spec, progress = self.spec, self.progress
        rows = self._rows(inputs, journal)
        ids = UniqueIds(self.run_dir.journal / IDS_NAME, as_text=spec.output.has_text_ids)
        stack.callback(ids.close)
        validator = self._validator(inputs, ids)
        self._complete(ids, inputs.source, journal, validator)
        if is_resumed:
            if self.options.strict:
                self._refuse_bad_rows(rows, validator)
            self.run_dir.write_manifest(inputs.manifest)
        progress.keeps_file = True
        if progress.rows_total is None:
            with progress.phase("counting the rows", "read"):
                progress.rows_total = rows.count()
        tokenizer = inputs.model.tokenizer
        payloads = Payloads(spec, tokenizer.decode if tokenizer else None)
        ledger = progress.ledger = Ledger(journal, payloads, self.options.max_error_rate, progress.clock)
        progress.display.note(self._announcement(ledger))
        feed = Feed(ledger, validator, progress.stopper, progress.clock)
        is_done = generate(rows.read(), feed, ledger, progress, lambda: self._resumed_backend(inputs))
        ids.close()
        if not is_done:
            progress.state = "stopped"
            if progress.stopper.exit_code == ExitCode.ROWS_FAILED:
                write_errors(self.run_dir, spec.output, journal)
            return Outcome.stopped(self.run_dir, progress.stopper.reason or "", progress)
        manifest = self._checked_again(inputs)
        with progress.phase("writing the outputs", "write"):
            finalize(
                self.run_dir, spec.output, journal, num_rows=rows.num_rows, model=spec.model.path, chat=spec.input.chat
            )
        return self._finish(manifest, journal)

    def _checked_again(self, inputs: _Inputs) -> Manifest:
        """The manifest as it is now. Raises InputChanged if the input is not what it says, before anything appears."""
        inputs.source.check_unchanged()
        manifest = self.run_dir.read_manifest() or inputs.manifest  # which may have other kernels by now
        return self._with_file_states(manifest)

    def _with_file_states(self, manifest: Manifest) -> Manifest:
        """The manifest, saved with what is known of the files by now, so that the next start need not read them."""
        known = replace(manifest, file_states=self.digests.to_plain())
        if known != manifest:
            self.run_dir.write_manifest(known)
        return known

    def _complete(self, ids: UniqueIds, source: Source, journal: Journal, validator: RowValidator) -> None:
        """Make sure that all rows read so far have claimed their ids, should the file of ids have been lost."""
        if ids.is_complete:
            return
        if journal.done and may_have_ids(self.spec.input):
            with self.progress.phase("reading ids again", "read"):
                rebuild_ids(source.read(), max(journal.done), validator)
        ids.mark_complete()

    def _refuse_other_form(self, begun: Manifest) -> None:
        """Raises ResumeMismatch: the journal of a finished run is gone, so its outputs cannot be written again."""
        for key in ("format", "order"):
            was, now = begun.job["output"][key], getattr(self.spec.output, key)
            if was != now:
                raise ResumeMismatch(
                    f"{self.run_dir.path} is finished with output.{key} = {was!r}, and now {now!r} is asked for; "
                    "--overwrite runs it anew"
                )

    def _already_done(self, manifest: Manifest) -> Outcome:
        """Nothing to do but what a kill just after the outputs appeared may have left undone."""
        if self.run_dir.journal.is_dir():
            self._finish(manifest, Journal.open(self.run_dir.journal, self.options.shard))
        self.progress.keeps_file = self.run_dir.retry.is_dir()  # a retry under way goes on counting in it
        return Outcome.already_done(self.run_dir, self.spec)

    def _finish(self, manifest: Manifest, journal: Journal) -> Outcome:
        """Write the report; then the journal has served, and the copy of standard input before it."""
        with self.progress.phase("writing the report", "write"):
            totals = journal_totals(journal, self.spec.output.expected)
        about = about_job(self.spec, manifest, self.backend)
        report = build_report(totals, self.progress.spent(), about)
        write_report(self.run_dir.report, report)
        if self.spool is not None:
            self.run_dir.remove_spool()
        journal.remove()
        self.progress.state = "finished"
        self.progress.keeps_file = False
        return Outcome.finished(self.run_dir, self.spec, report)

    def _rows(self, inputs: _Inputs, journal: Journal | None) -> RowRange:
        finished = (journal.done, journal.resume_cursor) if journal else ()
        return RowRange(inputs.source, self.options.shard, *finished, has_ids=may_have_ids(self.spec.input))

    def _validator(self, inputs: _Inputs, ids: UniqueIds) -> RowValidator:
        return RowValidator(self.spec.input, inputs.builder, ids, self.options.shard)

    def _refuse_bad_rows(self, rows: RowRange, validator: RowValidator) -> None:
        with self.progress.phase("checking all rows (--strict)", "read"):
            refuse_bad_rows(rows.read(), validator)

    def _announcement(self, ledger: Ledger) -> str:
        finished = ledger.num_done + ledger.num_failed
        total = "rows" if self.progress.rows_total is None else counted(self.progress.rows_total, "row")
        part = "" if self.options.shard == WHOLE else f" of shard {self.options.shard}"
        resumed = f", {finished:,} of them finished already" if finished else ""
        return f"{total}{part} into {Outcome.shown(self.run_dir.path)}{resumed}"


def with_numerics(
    manifest: Manifest, backend: Backend, run_dir: RunDir, progress: Progress, options: RunOptions
) -> Manifest:
    """The manifest of a run that goes on with ``backend``; a mix of kernels that is allowed is written down.

    Raises ResumeMismatch if rows would come out otherwise.
    """
    begun = manifest.fingerprints.get("numerics")
    numerics = backend.check(begun, run_dir.path, allow_mixed_kernels=options.allow_mixed_kernels)
    if begun is None or numerics == begun:
        return manifest
    mixed = replace(manifest, fingerprints={**manifest.fingerprints, "numerics": numerics})
    run_dir.write_manifest(mixed)
    progress.display.note(f"rows come from several kernel sets now: {numerics[KERNELS]}")
    return mixed

"""``batchgen run``: runs a job, continues it, brings its folder up to date, or finds that it is done.

Refusals come before anything is written; a kill at any moment leaves a folder whose job can be run again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, StorageError, UsageError
from batchgen.core.machine import memory_errors
from batchgen.core.numerics import Numerics
from batchgen.core.units import WHOLE, counted
from batchgen.core.version import RESULTS
from batchgen.input.ids import RowValidator, rebuild_ids
from batchgen.input.source import RowRange, Source, open_source
from batchgen.output.finalize import EXACT_FORMAT, finalize, write_errors
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest, compare
from batchgen.output.rundir import JournalledJob, RunDir, tidy_on_failure
from batchgen.report.build import build_report, write_report
from batchgen.run.earlier_results import EarlierResults, earlier_runs, refuse_own_rows, rendered_at
from batchgen.run.invocation import Invocation, OtherNumerics, RunOptions
from batchgen.run.loader import EngineFactory, read_model
from batchgen.run.opened import OpenJob
from batchgen.run.outcome import Outcome, already_done, announcement, finished, stopped
from batchgen.run.reports import job_facts, journal_totals, last_report
from batchgen.run.results import ResultSink
from batchgen.run.stdin import StdinCopy
from batchgen.run.stop import StopRequested
from batchgen.run.update import FolderJobs, inherited_numerics, take_over

_SHARDS_DATE = (
    "the chat template may print a date, here the day on which this shard was begun: begin all shards on the same "
    "day, or fix the date if the template takes one, such as by chat_template_kwargs = { date_string = '1 May 2026' }"
)


def run_job(
    spec: JobSpec,
    options: RunOptions | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    lines: Iterable[bytes] | None = None,
) -> Outcome:
    """Run a job, or what is left of it; handles SIGINT and SIGTERM meanwhile, if called from the main thread.

    ``engine_factory`` replaces the model's own engine, ``lines`` standard input. Raises UsageError before anything is
    written, LockedError if another process holds the run directory, StorageError and other BatchgenErrors later.
    """
    return _Job(spec, options or RunOptions(), engine_factory, lines).execute()


class _Job:
    def __init__(
        self, spec: JobSpec, options: RunOptions, engine_factory: EngineFactory | None, lines: Iterable[bytes] | None
    ) -> None:
        self.spec = spec
        self.options = options
        self.lines = lines
        self.stdin: StdinCopy | None = None
        self.run_dir = RunDir(Path(spec.output.path))
        self.invocation = Invocation(spec.output.publish, options, self.run_dir, engine_factory)
        self.progress, self.note = self.invocation.progress, self.invocation.note
        self.stopper = self.invocation.stopper

    @memory_errors("running this job")
    def execute(self) -> Outcome:
        """Run what is left of the job under the lock, up to its end or a request to stop; see ``run_job``."""
        with self.stopper.listening(), tidy_on_failure(self.run_dir.path):
            self.run_dir.create()
            with self.run_dir.lock():
                self.run_dir.sweep()
                try:
                    with self.progress, self.stopper.interruptible():
                        outcome = self._work()
                        self.progress.finish(outcome.report or last_report(self.run_dir))
                except StopRequested:
                    outcome = self._stopped()
                finally:
                    if self.invocation.loaded is not None:
                        self.invocation.loaded.close()
        return replace(outcome, stop_reason=self.stopper.reason)

    def _work(self) -> Outcome:
        with ExitStack() as stack:
            self._find_jobs()
            if self.spec.input.path == ("-",):
                self.stdin = StdinCopy(self.run_dir.spool, self.lines)
                stack.callback(self.stdin.drop)
            source = self._find_input()
            self._identify(source)
            resumable, done = self.jobs.find(self.manifest, self.spec), self.jobs.finished
            retries = self.options.update and (self.jobs.has_failed or self.jobs.has_lost_rows())
            if done and resumable is None and not retries and self.jobs.is_done(self.manifest, self.spec, self.digests):
                return self._already_done(done)
            if source is None:
                raise UsageError(f"{self.run_dir.spool} is gone; pipe the same rows in again, or --overwrite")
            if resumable is None and not self.options.update:
                self.jobs.refuse_unasked(self.manifest, self.digests)
            self.invocation.claim(self.manifest)
            try:
                return self._run(source, resumable)
            except OtherNumerics:
                if resumable is None:
                    self.run_dir.remove_job(self.begun)
                    self.progress.keep_file(False)
                if not self.options.update:
                    raise
            return self._run(source, None)  # with the numerics of the loaded engine

    def _run(self, source: Source, resumable: JournalledJob | None) -> Outcome:
        """Begin the job, or continue it from the journal ``resumable``, and write its outputs."""
        self.opened = OpenJob(self.spec, self.model, source, self.digests)
        self.begun = self._begin() if resumable is None else self._continue(resumable)
        earlier = None if self.begun.manifest.taken else self._earlier_results()
        sources = nullcontext() if earlier is None else closing(earlier)
        with sources, closing(Journal.open(self.begun.folder, self.options.shard)) as journal:
            for line in journal.recovery:
                self.note(line)
            return self._run_rows(journal, earlier, is_resumed=resumable is not None)

    def _find_jobs(self) -> None:
        """Find the jobs of the run directory, unless this one overwrites them. Raises UsageError."""
        if self.options.overwrite:
            refuse_own_rows(self.spec)
            self.run_dir.refuse_foreign_manifest()
        self.jobs = FolderJobs(self.run_dir, overwrites=self.options.overwrite)
        if not (self.run_dir.manifest.exists() or self.run_dir.journals.exists()):
            self.progress.reset()
        self.digests = self.jobs.digests()

    def _find_input(self) -> Source | None:
        """The rows; None if an earlier start got them on standard input and this one does not. Raises UsageError."""
        if self.stdin is None:
            source = self._open_source()
            for path in source.paths:
                if self.run_dir.owns(path):
                    raise UsageError(f"the input {path} would be overwritten by this run; choose another output.path")
            return source
        is_resumed = any(manifest.job["input"]["path"] == ["-"] for manifest in self.jobs.manifests)
        with self.progress.phase("reading standard input", "read"):
            spool = self.stdin.path if self.options.keeps_stdin else self.stdin.read(is_resumed=is_resumed)
        if is_resumed and spool in (None, self.run_dir.spool) and not self.options.keeps_stdin:
            self.note("stdin is empty: using the rows saved at the first start")
        return self._open_source(spool) if spool is not None and spool.is_file() else None

    def _open_source(self, path: Path | None = None) -> Source:
        """The rows that the job names, or the copy of them at ``path``."""
        input_spec = self.spec.input if path is None else replace(self.spec.input, path=(str(path),))
        with self.progress.phase("opening the input", "read"):
            return open_source(input_spec, self.run_dir.owns)

    def _reopen(self) -> None:
        """Open the rows of standard input in the kept copy, to which they move once the job is accepted."""
        if self.stdin is not None:
            self.opened.source = self._open_source(self.stdin.path)

    def _identify(self, source: Source | None) -> None:
        """Find the model and set the manifest, to compare with the manifests of the folder. Raises UsageError."""
        base = self.jobs.base
        if self.spec.output.format == "auto":
            form = source.output_format if source else base.job["output"]["format"] if base else "jsonl"
            self.spec = replace(self.spec, output=replace(self.spec.output, format=form))
        now = datetime.now().astimezone()
        printed_at = (base.rendered_at if base else rendered_at(self.spec)) or now
        with self.progress.phase("finding the model", "load"):
            self.model = read_model(self.spec, printed_at)
        if base is None and (hint := self.model.recommended_hint(self.spec)):
            self.note(hint)
        self.spec = self.model.resolved(self.spec)
        with self.progress.phase("checking the input", "read"):
            rows: dict[str, Any] = base.fingerprints["input"] if base is not None and source is None else {}
            if source is not None:
                rows = source.fingerprint(self.digests)
                if self.stdin is not None:
                    rows = {"files": [{**file, "file": "-"} for file in rows["files"]]}
        with self.progress.phase("checking the model", "load"):
            model = self.model.files.fingerprint(self.digests)
        self.manifest = Manifest(
            job=self.spec.to_dict(),
            output_keys=self.spec.output_keys(),
            fingerprints={"input": rows, "model": model, "code": {"results": RESULTS}},
            shard=self.options.shard,
            created_at=base.created_at if base else now.isoformat(),
            rendered_at=printed_at,
            file_states=self.digests.to_plain(),
        )

    def _already_done(self, done: Manifest) -> Outcome:
        """Complete the steps that a kill just after the outputs appeared has left undone."""
        edited = self.jobs.edited(self.digests)
        self.progress.keep_file(bool(self.run_dir.unfinished()), is_idle=True)
        states = replace(done, file_states=self.digests.to_plain())  # so that the next start need not read the files
        with suppress(StorageError):  # the disk may be full by now
            if states != done:
                self.run_dir.write_manifest(states)
        form, has_failed = self.spec.output.format, self.jobs.has_failed
        return self.invocation.published(already_done(self.run_dir, form, edited, has_failed=has_failed), done)

    def _begin(self) -> JournalledJob:
        """Begin the job: check that it can run, and make its journal.

        In a new folder the weights are loaded before anything is written, so that unusable weights do not leave a
        folder. In another folder, numerics that the job does not change are compared once a row needs the weights.
        """
        for line in self.opened.check_columns():
            self.note(line)
        self.model.refuse_as_target(self.run_dir)
        if self.spec.cluster.bounds is None and self.spec.cluster.is_used:  # as many workers as rows at most
            self.invocation.count(self.opened.rows(self.options.shard))
        earlier_runs(self.spec)  # refuses folders of output.reuse before the weights are loaded
        base = self.jobs.base
        numerics = inherited_numerics(base, self.spec) if base and self.invocation.loaded is None else None
        numerics = numerics or Numerics.of(self.invocation.load(self.opened, self.manifest).numerics)
        self.manifest = self.manifest.with_numerics(numerics)
        if base is None:
            self.run_dir.refuse_foreign_files()
            if self.options.overwrite:
                self.run_dir.clear()
            if self.stdin is not None:
                self.stdin.keep()
        self.progress.reset()
        self.manifest = replace(self.manifest, taken=base is None and not self.spec.output.reuse)
        begun = self.run_dir.begin(self.manifest)
        self.progress.count_for(begun.folder.name)
        if self.options.shard != WHOLE and self.model.prints_date:
            self.note(_SHARDS_DATE)
        return begun

    def _continue(self, resumable: JournalledJob) -> JournalledJob:
        """Continue the unfinished job. Print a note for each difference that does not affect the output."""
        before = resumable.manifest
        if before.numerics is not None:
            self.manifest = self.manifest.with_numerics(before.numerics)
        has_more = self.spec.output.reuse != tuple(before.job["output"]["reuse"])
        self.manifest = replace(
            self.manifest,
            created_at=before.created_at,
            rendered_at=before.rendered_at,
            num_rows=before.num_rows,
            num_good=before.num_good,
            taken=before.taken and not (has_more and self.spec.output.reuse),
        )
        for line in () if resumable.has_all_rows else compare(before, self.manifest).allowed:
            self.note(f"resuming with {line}")
        self.progress.count_for(resumable.folder.name)
        return JournalledJob(resumable.folder, self.manifest)

    def _earlier_results(self) -> EarlierResults:
        """The results that rows can be taken from, without the results of a folder that is overwritten."""
        own = self.run_dir if self.jobs.base else None
        with self.progress.phase("reading earlier results", "read"):
            earlier = EarlierResults(self.opened, self.manifest, own, skip=self.begun.folder)
        for line in earlier.lines:
            self.note(line)
        return earlier

    def _run_rows(self, journal: Journal, earlier: EarlierResults | None, *, is_resumed: bool) -> Outcome:
        """Keep existing rows, generate the missing ones, then write the outputs."""
        num_rows = self.manifest.num_rows
        if num_rows is not None and journal.done.covers(num_rows):  # all rows are here, unless the disk damaged some
            return self._finish(journal, num_rows)
        progress, template = self.progress, self.opened.builder.finder.template
        progress.keep_file(True)
        sink = ResultSink(journal, self.opened.records, self.options.max_error_rate, progress.clock.on, template)
        self._reopen()
        rows = self.opened.rows(self.options.shard)
        rows.done, rows.start = journal.done, journal.resume_cursor
        with self.opened.validator(self.options.shard) as validator:
            if rows.has_ids and len(journal.done):
                with progress.phase("reading ids again", "read"):
                    rebuild_ids(rows.source.read(), max(journal.done), validator)
            if is_resumed:
                self._write_job(self.manifest)
            if earlier is not None:
                self._take_over(earlier, rows, validator, sink)
                if self.stopper.requested:
                    return self._stopped()
            if self.stdin is not None:
                self.stdin.keep()
                self._reopen()
                rows.source = self.opened.source
            self.invocation.count(rows)
            self.note(announcement(self.run_dir, self.options.shard, progress.rows_total, len(journal.done)))
            if not self.invocation.generate(self.opened, self.manifest, rows.read(), validator, sink):
                if self.stopper.exit_code == ExitCode.ROWS_FAILED and self.jobs.finished is None:
                    write_errors(self.run_dir, self.begun, self.spec, journal)
                return self._stopped()
        self.opened.check_read(self.note)
        self.manifest = replace(self.manifest, file_states=self.digests.to_plain())
        return self._finish(journal, rows.num_rows)

    def _take_over(self, earlier: EarlierResults, rows: RowRange, validator: RowValidator, sink: ResultSink) -> None:
        """Keep the rows with earlier results. Raises UsageError if too many would be lost without ``--update``."""
        counts = None
        if len(earlier):
            counts = take_over(earlier, rows, validator, sink, self.progress)
            if self.stopper.requested:
                return
            if not self.options.update and (why := self.jobs.losses(counts, earlier.sources, self.manifest, self.spec)):
                sink.journal.close()
                self.run_dir.remove_job(self.begun)
                self.progress.keep_file(False)
                raise UsageError(f"{self.run_dir.path}: {why}: fix the input, or continue with --update")
            rest = f"{counted(counts.num_kept, 'row')} kept, {counts.num_new:,} to compute"
            self.note(f"{self.jobs.what_changed(self.manifest, self.spec)}{rest}")
        self._write_job(replace(self.manifest, taken=True, num_good=counts.num_good if counts else None))

    def _write_job(self, manifest: Manifest) -> None:
        """Make ``manifest`` the manifest of the job under way, and store it with its journal."""
        self.manifest = manifest
        self.begun = JournalledJob(self.begun.folder, manifest)
        self.run_dir.write_job(self.begun)

    def _finish(self, journal: Journal, num_rows: int) -> Outcome:
        """Write the outputs and the report; then name them in the folder's ``job.json``, and remove the journals."""
        with self.progress.phase("writing the outputs", "write"):
            self.begun = finalize(
                self.run_dir, JournalledJob(self.begun.folder, self.manifest), self.spec, journal, num_rows=num_rows
            )
        with self.progress.phase("writing the report", "write"):
            totals = journal_totals(journal, self.spec)
            facts = job_facts(self.spec, self.manifest, self.invocation.loaded)
            report = build_report(totals, self.progress.usage(), facts)
            write_report(self.run_dir.report, report)
            journal.close()
            keeps_rows = self.spec.output.format != EXACT_FORMAT
            self.manifest = self.run_dir.finish(self.begun, self.digests, keeps_rows=keeps_rows)
        self.progress.finish(report)
        self.progress.keep_file(False)
        return self.invocation.published(finished(self.run_dir, self.spec.output.format, report), self.manifest)

    def _stopped(self) -> Outcome:
        self.progress.state = "stopped"
        return stopped(self.run_dir, self.progress)

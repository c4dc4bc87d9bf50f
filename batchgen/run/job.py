"""``batchgen run``: runs a job, resumes what is left of it, or finds that it is done.

It decides the order of steps, so that a refusal comes before anything is written and a kill at any moment leaves a
run that resumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode, StorageError, UsageError
from batchgen.core.fingerprint import Digests
from batchgen.core.shard import WHOLE
from batchgen.core.units import counted
from batchgen.core.version import __version__
from batchgen.input.columns import check_columns
from batchgen.input.ids import UniqueIds, may_have_ids
from batchgen.input.requests import RequestBuilder
from batchgen.input.source import Growth, RowRange, Source, open_source
from batchgen.input.validator import RowValidator, rebuild_ids, refuse_bad_rows
from batchgen.output.finalize import finalize, finalize_grown, write_errors
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import IDS_NAME, RunDir
from batchgen.report.build import build_report, write_report
from batchgen.run.invocation import Invocation, Outcome, RunOptions, short
from batchgen.run.loader import EngineFactory, read_model
from batchgen.run.reports import has_failed_rows, job_facts, journal_totals, result_ids
from batchgen.run.results import ResultSink
from batchgen.run.resume import continued, reopen
from batchgen.run.reuse import Reuse, earlier_runs, refuse_own_rows, rendered_at, reuse_rows
from batchgen.run.stdin import StdinCopy

_SHARDS_DATE = (
    "the chat template may print a date, here that on which this shard was begun: begin all shards on one day, or fix "
    "the date where the template takes one, such as by chat_template_kwargs = { date_string = '1 May 2026' }"
)


def run_job(
    spec: JobSpec,
    options: RunOptions | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    lines: Iterable[bytes] | None = None,
) -> Outcome:
    """Run a job, or what is left of it.

    ``engine_factory`` replaces the model's own engine. ``lines`` are read in place of standard input. Handles SIGINT
    and SIGTERM meanwhile, if called from the main thread. Raises UsageError before anything is written, LockedError if
    another process holds the run directory, StorageError and other BatchgenErrors for what goes wrong later.
    """
    job = _Job(spec, options or RunOptions(), RunDir(Path(spec.output.path)), engine_factory)
    job.lines = lines
    return job.execute()


class _Job(Invocation):
    builder: RequestBuilder
    lines: Iterable[bytes] | None = None
    stdin: StdinCopy | None = None
    growth: Growth | None = None  # of the input, since the run was begun or last resumed

    def work(self) -> Outcome:
        """Run what is left of the job; see ``run_job``."""
        if self.spec.input.path == ("-",):
            self.stdin = StdinCopy(self.run_dir.spool, self.lines)
        begun = self.remotes.begun(self._begun())
        self.digests = Digests(begun.file_states if begun else None)
        with ExitStack() as stack:
            if self.stdin is not None:
                stack.callback(self.stdin.drop)
            source = self._find_input(begun)
            self._identify(source, begun)
            if begun is not None:
                self._agree_with(begun)
                self.progress.resume(self.remotes.restore())
                if self.growth is not None:
                    self.progress.rows_total = None
                if self.run_dir.is_complete() and self.growth is None:
                    return self._already_done(begun)
            if source is None:
                raise UsageError(f"{self.run_dir.spool} has gone; pipe the same rows in again, or --overwrite")
            earlier_runs(self.spec)
            self.remotes.claim(self.manifest)
            if begun is not None and self.run_dir.is_complete():
                self._clear_up(begun)
                self.remotes.refuse_earlier(self.manifest)
                self.progress.state = "running"
                assert self.manifest.num_rows is not None, "it is finished"
                num_kept = source.num_kept(self.manifest.num_rows, self.growth or Growth())
                self.manifest = reopen(self.run_dir, self.manifest, num_kept)
            self.builder = self.model.builder(self.spec)
            if begun is None:
                self._begin(source)
            if self.stdin is not None:
                self.stdin.keep()
                source = self._open_source(self.run_dir.spool)
            if not self.run_dir.has_outputs():  # a mirror keeps the finished files until there are new ones
                self.remotes.begin(self.manifest)
            journal = self._open_journal()
            stack.callback(journal.close)
            if self.growth is not None and self.growth.is_cut:
                self.run_dir.forget_ids()  # what a row had for its id may have been the beginning of one
                journal.run_again([*journal.partials, *([max(journal.done)] if len(journal.done) else ())])
            for line in journal.recovery:
                self.progress.display.note(line)
            return self._finish_rows(source, journal, is_resumed=begun is not None)

    def _begun(self) -> Manifest | None:
        """The manifest that the run directory was begun with; None to start anew. Raises UsageError."""
        if not self.run_dir.manifest.exists():
            self.progress.begin_anew()
        if not self.options.overwrite:
            return self.run_dir.read_manifest()
        refuse_own_rows(self.spec)
        self.run_dir.refuse_foreign_manifest()
        return None

    def _find_input(self, begun: Manifest | None) -> Source | None:
        """The rows; None if they came on standard input once and are not given again. Raises UsageError."""
        if self.stdin is None:
            source = self._open_source()
            for item in self.spec.input.path if begun is None else ():
                if item.startswith("hf:/"):
                    self.progress.display.note(
                        f"the input {item} is a folder on this machine, not a dataset of the Hub"
                    )
            for path in source.paths:
                if self.run_dir.owns(path):
                    raise UsageError(f"the input {path} would be overwritten by this run; choose another output.path")
            return source
        is_resumed = begun is not None and begun.job["input"]["path"] == ["-"]
        with self.progress.phase("reading standard input", "read"):
            found = self.stdin.read(is_resumed=is_resumed)
        if is_resumed and found in (None, self.run_dir.spool):
            self.progress.display.note("stdin is empty: using the rows saved at the first start")
        return None if found is None else self._open_source(found)

    def _open_source(self, path: Path | None = None) -> Source:
        """The rows that the job names, or those of the file that stands for them."""
        where = self.spec.input if path is None else replace(self.spec.input, path=(str(path),))
        with self.progress.phase("opening the input", "read"):
            return open_source(where, self.run_dir.owns)

    def _identify(self, source: Source | None, begun: Manifest | None) -> None:
        """Find the model and set the manifest, which a resume is compared with. Raises UsageError."""
        now = datetime.now().astimezone().replace(microsecond=0)
        begun_at = (begun.begun_at if begun else rendered_at(self.spec)) or now
        with self.progress.phase("finding the model", "load"):
            self.model = read_model(self.spec, begun_at)
        if begun is None and (hint := self.model.preset_hint(self.spec)):
            self.progress.display.note(hint)
        self.spec = self.model.resolved(self.spec)
        with self.progress.phase("checking the input", "read"):
            rows: dict[str, Any] = begun.fingerprints["input"] if begun is not None and source is None else {}
            if source is not None:
                was = begun.fingerprints["input"].get("files", []) if begun else []
                rows = source.fingerprint(self.digests, was)
                if self.stdin is not None:
                    rows = {"files": [{**file, "file": "-"} for file in rows["files"]]}
                self.growth = source.growth(was, rows["files"]) if begun else None
        with self.progress.phase("checking the model", "load"):
            model = self.model.fingerprint(self.digests)
        self.manifest = Manifest(
            job=self.spec.to_dict(),
            output_keys=self.spec.output_keys(),
            fingerprints={"input": rows, "model": model, "code": {"batchgen": __version__}},
            shard=self.options.shard,
            created_at=now.isoformat(),
            rendered_at=begun_at.isoformat(),
            file_states=self.digests.to_plain(),
        )

    def _agree_with(self, begun: Manifest) -> None:
        """Go on with the run that was begun. Raises ResumeMismatch if its outputs would differ from this job's."""
        is_complete = self.run_dir.has_outputs() or self.remotes.is_finished
        if self.growth is not None:
            begun = replace(begun, fingerprints={**begun.fingerprints, "input": self.manifest.fingerprints["input"]})
        self.manifest, changes = continued(self.run_dir, self.spec, begun, self.manifest, is_complete=is_complete)
        if self.growth is not None:
            self.progress.display.note("the input has grown: running the new rows")
        for line in changes:
            self.progress.display.note(f"resuming with {line}")

    def _already_done(self, begun: Manifest) -> Outcome:
        """Complete what a kill just after the outputs appeared has left undone."""
        with suppress(StorageError):  # the disk may be full by now
            self._keep_file_states(begun)
        self._clear_up(begun)
        self.progress.keeps_file = self.run_dir.retry.is_dir()  # an unfinished retry goes on counting in it
        outputs = short(self.run_dir.outputs(self.spec.output.format))
        line = f"already done: outputs in {outputs}; --overwrite runs it anew"
        if not has_failed_rows(self.run_dir):
            return self.published(Outcome(ExitCode.OK, (line,)))
        folder, errors = short(self.run_dir.path), short(self.run_dir.errors)
        failed = f"some rows failed: see {errors}; batchgen retry {folder} runs those again"
        return self.published(Outcome(ExitCode.ROWS_FAILED, (line, failed)))

    def _clear_up(self, begun: Manifest) -> None:
        """Remove the journal of a finished run, once the report is there."""
        if self.run_dir.journal.is_dir():
            journal = self._open_journal()
            if begun.num_kept:
                journal.remove()
            else:
                self._finish(journal)

    def _open_journal(self) -> Journal:
        return Journal.open(self.run_dir.journal, self.options.shard, first=self.manifest.num_kept)

    def _begin(self, source: Source) -> None:
        """Start anew. The weights are loaded before anything is written: unusable ones cost no earlier run.

        ``job.json`` is written first: a directory with any other file of a run has one.
        """
        for line in check_columns(source.read(), self.spec, self.builder.finder):
            self.progress.display.note(line)
        self.model.refuse_as_target(self.run_dir)
        if self.options.strict:
            with closing(UniqueIds(None, as_text=self.spec.output.has_text_ids)) as ids:
                self._refuse_bad_rows(self._rows(source, None), self._validator(ids))
        if self.spec.cluster.bounds is None and self.spec.cluster.is_used:  # so many rows, so many workers
            self._count(self._rows(source, None))
        self.set_numerics(self.load().numerics)
        self.run_dir.refuse_foreign_files()
        self.remotes.clear()  # first: the results that it holds would come back
        if self.options.overwrite:
            self.progress.begin_anew()
            self.run_dir.clear()
        else:
            self.run_dir.clear_beginnings()
        if self.stdin is not None:
            self.stdin.keep()
        self.run_dir.write_manifest(self.manifest)
        if self.options.shard != WHOLE and self.model.prints_date:
            self.progress.display.note(_SHARDS_DATE)

    def _finish_rows(self, source: Source, journal: Journal, *, is_resumed: bool) -> Outcome:
        """Generate what the journal lacks, then write the outputs."""
        progress = self.progress
        rows = self._rows(source, journal)
        ids_path = self.run_dir.journal / IDS_NAME
        with closing(UniqueIds(ids_path, as_text=self.spec.output.has_text_ids)) as ids:
            validator = self._validator(ids)
            if not ids.is_complete:
                self._restore_ids(source, journal, validator)
                ids.mark_complete()
            if is_resumed:
                if self.options.strict:
                    self._refuse_bad_rows(rows, validator)
                self.run_dir.write_manifest(self.manifest)
            progress.keeps_file = True
            self._count(rows)
            progress.display.note(self._announcement(journal))
            self._reuse(rows, validator, journal)
            is_done = self.generate(rows.read(), validator, journal)
        if not is_done:
            if self.stopper.exit_code == ExitCode.ROWS_FAILED:
                write_errors(self.run_dir, self.spec, journal)
            return self.stopped()
        source.check_unchanged()
        self._keep_file_states(self.manifest)
        if self.run_dir.has_outputs():
            return self.published(self._finish_grown(journal, rows.num_rows))
        with progress.phase("writing the outputs", "write"):
            finalize(self.run_dir, self.spec, journal, num_rows=rows.num_rows)
        return self.published(self._finish(journal))

    def _reuse(self, rows: RowRange, validator: RowValidator, journal: Journal) -> None:
        """Take over the rows that earlier runs have results of."""
        if self.spec.output.reuse:
            builder = self.model.record_builder(self.spec)
            with self.progress.phase("reading earlier runs", "read"):
                reuse = Reuse(self.spec, self.manifest, builder, self.run_dir.journal, self.model.prints_date)
            sink = ResultSink(journal, builder, None, self.progress.clock.on, self.builder.finder.template)
            with closing(reuse):
                reuse_rows(reuse, rows, validator, sink, self.progress)

    def _count(self, rows: RowRange) -> None:
        if self.progress.rows_total is None:
            with self.progress.phase("counting the rows", "read"):
                self.progress.rows_total = rows.count()

    def _restore_ids(self, source: Source, journal: Journal, validator: RowValidator) -> None:
        """Make all rows read so far claim their ids again: the file of ids was lost, or the run was finished."""
        last = max(journal.done, default=journal.done.first - 1)
        if last >= 0 and may_have_ids(self.spec.input):
            with self.progress.phase("reading ids again", "read"):
                rebuild_ids(source.read(), last, validator)
                if self.run_dir.has_outputs():  # a retry may have given a row another id than it has in the input
                    kept = journal.done.first  # the rows from there on run anew
                    validator.ids.claim(known for known in result_ids(self.run_dir, self.spec) if known[0] < kept)

    def _keep_file_states(self, manifest: Manifest) -> None:
        """Save in the manifest what is known of the files by now, so that the next start need not read them."""
        known = replace(manifest, file_states=self.digests.to_plain())
        if known != manifest:
            self.run_dir.write_manifest(known)

    def _finish(self, journal: Journal) -> Outcome:
        """Write the report; then the journal and the copy of standard input are no longer needed."""
        with self.progress.phase("writing the report", "write"):
            totals = journal_totals(journal, self.spec)
        report = build_report(totals, self.progress.usage(), job_facts(self.spec, self.manifest, self.backend))
        write_report(self.run_dir.report, report)
        if self.stdin is not None:
            self.run_dir.remove_spool()
        return self.finished(journal, report)

    def _finish_grown(self, journal: Journal, num_rows: int) -> Outcome:
        """Add the rows that came behind to the outputs and the report; then ``job.json`` gets the number of rows.

        A kill in between leaves a run that does the same when run again.
        """
        num_new = len(journal.done)
        with self.progress.phase("writing the outputs", "write"):
            finalize_grown(self.run_dir, self.spec, journal, num_rows=num_rows)
            report = self.follow_report(self.run_dir.journal, {"new": num_new})
            self.run_dir.remove_spool()
            self.manifest = replace(self.manifest, num_rows=num_rows)
            self.run_dir.write_manifest(self.manifest)
        outcome = self.finished(journal, report)
        return replace(outcome, lines=(f"{counted(num_new, 'new row')}; in all:", *outcome.lines))

    def _rows(self, source: Source, journal: Journal | None) -> RowRange:
        rows = RowRange(source, self.options.shard, has_ids=may_have_ids(self.spec.input))
        if journal is not None:
            rows.done, rows.start, rows.first = journal.done, journal.resume_cursor, journal.done.first
        return rows

    def _validator(self, ids: UniqueIds) -> RowValidator:
        return RowValidator(self.spec.input, self.builder, ids, self.options.shard)

    def _refuse_bad_rows(self, rows: RowRange, validator: RowValidator) -> None:
        with self.progress.phase("checking all rows (--strict)", "read"):
            refuse_bad_rows(rows.read(), validator)

    def _announcement(self, journal: Journal) -> str:
        finished = len(journal.done)
        total = "rows" if self.progress.rows_total is None else counted(self.progress.rows_total, "row")
        part = "" if self.options.shard == WHOLE else f" of shard {self.options.shard}"
        resumed = f", {finished:,} of them finished already" if finished else ""
        return f"{total}{part} into {short(self.run_dir.path)}{resumed}"

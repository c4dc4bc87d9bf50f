"""``batchgen retry``: the dead letters of a finished run once more, and those that succeed into its outputs.

Rows come from ``errors.jsonl``, so a row mended there by hand is run as mended; the input is not read. The file is
held against the rows that have no result before anything is run (see ``data.dead_letters``).
It uses the same feed, engine and journal as a run, in a journal of its own, so it can be killed and resumed alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec, job_from_dict
from batchgen.config.load import override
from batchgen.core.errors import ExitCode, ResumeMismatch, RowErrorCode, UsageError
from batchgen.core.fingerprint import Digests
from batchgen.core.paths import absolute
from batchgen.core.records import BadRow, Record
from batchgen.core.units import counted
from batchgen.input.dead_letters import DeadLetters
from batchgen.input.ids import Claim, UniqueIds
from batchgen.input.validator import RowValidator
from batchgen.output.finalize import finalize_retry, read_records
from batchgen.output.journal import Journal
from batchgen.output.manifest import Manifest, differences
from batchgen.output.payloads import Payloads
from batchgen.output.rundir import RunDir
from batchgen.report.build import build_report, write_report
from batchgen.report.usage import follow, spent_in
from batchgen.run.display import make_display
from batchgen.run.generate import generate
from batchgen.run.job import with_numerics
from batchgen.run.loader import Backend, EngineFactory, load_engine, read_model
from batchgen.run.merge_report import count_outputs
from batchgen.run.options import RunOptions
from batchgen.run.outcome import Outcome, about_job
from batchgen.run.progress import Progress
from batchgen.run.reports import read_report
from batchgen.run.requests import Feed
from batchgen.run.results import Ledger
from batchgen.run.stop import Stopper, StopRequested


def retry_job(
    folder: Path,
    options: RunOptions,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    engine_factory: EngineFactory | None = None,
) -> Outcome:
    """Run the failed rows of the finished run in ``folder`` again; ``flags`` may change its engine sizes.

    Raises UsageError if there is no finished run, ResumeMismatch if the model is another one now, LockedError.
    """
    run_dir = RunDir(absolute(folder))
    manifest = run_dir.read_manifest()
    if manifest is None:
        raise UsageError(f"{folder} is not a run directory: it has no job.json")
    if not run_dir.is_complete():
        raise UsageError(f"{folder} is not finished: run its job again first, retry comes after")
    spec = override(job_from_dict(manifest.job, run_dir.manifest), flags)
    stopper = Stopper(options.limits)
    progress = Progress(run_dir.path, make_display(options.progress, options.heartbeat_s), stopper)
    with stopper.listening(), run_dir.lock():
        run_dir.sweep()
        try:
            with progress, stopper.interruptible():
                return _Retry(spec, options, run_dir, manifest, progress, engine_factory or load_engine).run()
        except StopRequested:
            return Outcome.stopped(run_dir, stopper.reason or "", progress)


class _Retry:
    """One invocation, holding the lock of the run directory."""

    def __init__(
        self,
        spec: JobSpec,
        options: RunOptions,
        run_dir: RunDir,
        manifest: Manifest,
        progress: Progress,
        engine_factory: EngineFactory,
    ) -> None:
        self.spec = spec
        self.options = options
        self.run_dir = run_dir
        self.manifest = manifest
        self.progress = progress
        self.engine_factory = engine_factory
        self.backend: Backend | None = None

    def run(self) -> Outcome:
        """Run, resume, or find nothing to do."""
        is_begun = self.run_dir.retry.is_dir()
        with ExitStack() as stack:
            stack.callback(self._remove_empty_journal)
            journal = Journal.open(self.run_dir.retry, self.manifest.shard)
            stack.callback(journal.close)
            journal.partials.clear()  # a row may have been mended since: its half-done tokens may be of another prompt
            ids = UniqueIds(None, as_text=self.spec.output.has_text_ids)
            stack.callback(ids.close)
            progress = self.progress
            with progress.phase("checking errors.jsonl", "read"):
                letters = self._letters(journal, ids)
                progress.rows_total = sum(1 for _ in letters.read())
            if not progress.rows_total and not is_begun:
                journal.remove()
                return Outcome(ExitCode.OK, ("no row has failed: nothing to retry",))
            if not self._generate(letters, journal, ids):
                progress.state = "stopped"
                return Outcome.stopped(self.run_dir, progress.stopper.reason or "", progress)
            return self._merge(journal)

    def _remove_empty_journal(self) -> None:
        """A retry that has run no row leaves nothing to go on with."""
        with suppress(OSError):
            self.run_dir.retry.rmdir()

    def _letters(self, journal: Journal, ids: UniqueIds) -> DeadLetters:
        """The dead letters to run, held against the rows that have results, whose ids they may not take."""
        output = self.spec.output
        if self.manifest.num_rows is None:
            raise UsageError(f'{self.run_dir.manifest} lacks "num_rows", so which rows failed is not known')

        def has_succeeded(index: int) -> bool:
            return index in journal.done and not journal.done.place(index).is_error

        outputs = self.run_dir.outputs(output.format)
        shard, num_rows = self.manifest.shard, self.manifest.num_rows
        letters = DeadLetters(self.run_dir.errors, outputs, num_rows, shard, has_succeeded, self.spec.input)

        def known_ids() -> Iterator[Claim]:
            for index, record in read_records(self.run_dir, output.format):
                letters.add_result(index)
                yield index, record.get("id", index)
            for index in journal.done:
                record = json.loads(journal.payload(index))
                is_duplicate = journal.done.place(index).is_error and record["code"] == RowErrorCode.DUPLICATE_ID
                if record["id"] is not None and not is_duplicate:  # whose id is that of a row still to come, perhaps
                    yield index, record["id"]

        ids.restore(known_ids())
        return letters

    def _generate(self, letters: DeadLetters, journal: Journal, ids: UniqueIds) -> bool:
        spec, progress = self.spec, self.progress
        with progress.phase("checking the model", "load"):
            model = read_model(spec)
            digests = Digests(self.manifest.file_states)
            found = differences(self.manifest.fingerprints.get("model", {}), model.fingerprint(digests))
            if found:
                raise ResumeMismatch(
                    f"{spec.model.path} is not the model that {self.run_dir.path} was run with; a run has one model:"
                    + "".join(f"\n  {line}" for line in found)
                )
        builder = model.builder(spec.input, spec.sampling, spec.sampling_columns)
        payloads = Payloads(spec, model.tokenizer.decode if model.tokenizer else None)
        ledger = progress.ledger = Ledger(journal, payloads, None, progress.clock)
        validator = RowValidator(spec.input, builder, ids)  # every dead letter is of this run, whatever its shard
        feed = Feed(ledger, validator, progress.stopper, progress.clock)

        def load() -> Backend:
            with progress.phase("loading the model", "load"):
                self.backend = backend = self.engine_factory(spec, model)
            model.check_unchanged(digests)
            self.manifest = with_numerics(self.manifest, backend, self.run_dir, progress, self.options)
            return backend

        progress.keeps_file = True
        todo = (row for row in letters.read() if not _is_run(row, journal))
        return generate(todo, feed, ledger, progress, load)

    def _merge(self, journal: Journal) -> Outcome:
        spec, run_dir = self.spec, self.run_dir
        num_mended = journal.counts.results
        with self.progress.phase("writing the outputs", "write"):
            finalize_retry(run_dir, spec.output, journal, model=spec.model.path, chat=spec.input.chat)
            report = self._report()
            write_report(run_dir.report, report)
        journal.remove()
        self.progress.state = "finished"
        self.progress.keeps_file = False
        outcome = Outcome.finished(run_dir, spec, report)
        return replace(outcome, lines=(f"{counted(num_mended, 'failed row')} mended", *outcome.lines))

    def _report(self) -> dict[str, Any]:
        """The report anew, from the outputs as they are now; times of the first run and of retries add up."""
        totals = count_outputs(self.run_dir, self.spec.output)
        try:
            before = read_report(self.run_dir)
        except UsageError as error:  # merged without reports, or written by another version
            self.progress.display.note(f"the new report counts the time of this retry only: {error}")
            before = {}
        spent = follow(spent_in(before) if before else {}, self.progress.spent())
        report = build_report(totals, spent, about_job(self.spec, self.manifest, self.backend))
        if totals.num_untimed:  # OpenAI outputs of an earlier build, without times and kept columns
            kept = ("latency_s", "histograms", "slowest", "preemptions", "accuracy")
            report |= {key: before[key] for key in kept if key in before}
        return report


def _is_run(row: Record | BadRow, journal: Journal) -> bool:
    """Whether this retry has run a row already: one that failed again and was mended since is to be run as mended."""
    if row.index not in journal.done:
        return False
    columns = row.columns if isinstance(row, Record) else row.raw
    is_error = journal.done.place(row.index).is_error
    return not is_error or bool(json.loads(journal.payload(row.index))["row"] == columns)

"""``batchgen retry``: the dead letters of a finished run once more, and those that succeed into its outputs.

Rows come from ``errors.jsonl`` as it stands, so a row mended there by hand is run as mended; the input is not read.
It uses the same feed, engine and journal as a run, in a journal of its own, so it can be killed and resumed alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.data.journal import Journal
from batchgen.data.manifest import Manifest
from batchgen.data.output_formats import output_format
from batchgen.data.rundir import RunDir
from batchgen.data.writer import finalize_retry, read_errors
from batchgen.errors import ExitCode, ResumeMismatch, RowError, RowErrorCode, UsageError
from batchgen.merge_report import count_outputs
from batchgen.records import BadRow, Cursor, Record
from batchgen.report import build_report, read_report, write_report
from batchgen.report_spent import follow, spent_in
from batchgen.run.display import make_display
from batchgen.run.feed import Feed, Screen
from batchgen.run.generate import generate
from batchgen.run.ledger import Ledger
from batchgen.run.model import Backend, EngineFactory, load_engine, read_model
from batchgen.run.options import RunOptions
from batchgen.run.outcome import Outcome, about_job
from batchgen.run.payloads import Payloads
from batchgen.run.progress import Progress
from batchgen.run.stop import Stopper, StopRequested
from batchgen.run.unique_ids import Claim, UniqueIds
from batchgen.spec import JobSpec, job_from_dict
from batchgen.spec_load import override
from batchgen.units import counted


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
    run_dir = RunDir(folder.absolute())
    manifest = run_dir.read_manifest()
    if manifest is None:
        raise UsageError(f"{folder} is not a run directory: it has no job.json")
    if not run_dir.is_complete():
        raise UsageError(f"{folder} is not finished: run its job again first, retry comes after")
    spec = override(job_from_dict(manifest.job), flags)
    stopper = Stopper(options.limits)
    progress = Progress(run_dir.path, make_display(options.progress, options.heartbeat_s), stopper)
    with stopper.listening(), run_dir.lock():
        run_dir.sweep()
        try:
            with progress, stopper.interruptible():
                return _Retry(spec, run_dir, manifest, progress, engine_factory or load_engine).run()
        except StopRequested:
            return Outcome.stopped(run_dir, stopper.reason or "", progress)


class _Retry:
    """One invocation, holding the lock of the run directory."""

    def __init__(
        self, spec: JobSpec, run_dir: RunDir, manifest: Manifest, progress: Progress, engine_factory: EngineFactory
    ) -> None:
        self.spec = spec
        self.run_dir = run_dir
        self.manifest = manifest
        self.progress = progress
        self.engine_factory = engine_factory
        self.backend: Backend | None = None
        self.form = output_format(spec.output.format, model=spec.model.path, chat=spec.input.chat)

    def run(self) -> Outcome:
        """Run, resume, or find nothing to do."""
        num_failed = sum(1 for _ in read_errors(self.run_dir))
        if not num_failed and not self.run_dir.retry.is_dir():
            return Outcome(ExitCode.OK, ("no row has failed: nothing to retry",))
        with ExitStack() as stack:
            journal = Journal.open(self.run_dir.retry, self.manifest.shard)
            stack.callback(journal.close)
            progress = self.progress
            progress.keeps_file = True
            progress.rows_total = num_failed
            if not self._generate(journal, stack):
                progress.state = "stopped"
                return Outcome.stopped(self.run_dir, progress.stopper.reason or "", progress)
            return self._merge(journal)

    def _generate(self, journal: Journal, stack: ExitStack) -> bool:
        spec, progress = self.spec, self.progress
        with progress.phase("checking the model", "load"):
            model = read_model(spec)
            if model.fingerprint() != self.manifest.fingerprints.get("model"):
                raise ResumeMismatch(
                    f"{spec.model.path} is not the model that {self.run_dir.path} was run with; a run has one model"
                )
        builder = model.builder(spec.input, spec.sampling)
        payloads = Payloads(spec, model.tokenizer.decode if model.tokenizer else None)
        ledger = progress.ledger = Ledger(journal, payloads, None, progress.clock)
        ids = UniqueIds(None)
        stack.callback(ids.close)
        ids.restore(self._known_ids())
        screen = Screen(spec.input, builder, ids, _EveryRow())
        feed = Feed(ledger, screen, progress.stopper, progress.clock)

        def load() -> Backend:
            with progress.phase("loading the model", "load"):
                self.backend = backend = self.engine_factory(spec, model)
            backend.check(self.manifest.fingerprints.get("numerics"), self.run_dir.path)
            return backend

        return generate(self._rows(journal), feed, ledger, progress, load)

    def _rows(self, journal: Journal) -> Iterator[Record | BadRow]:
        """The failed rows that this retry has not run yet; what was never readable keeps its error."""
        for index, line in read_errors(self.run_dir):
            if index in journal.done:
                continue
            try:
                yield _failed_row(index, json.loads(line))
            except (KeyError, TypeError, ValueError) as error:  # the file may have been mended by hand
                raise UsageError(
                    f"{self.run_dir.errors}: the line of row {index} is not as written: {error!r}"
                ) from None

    def _known_ids(self) -> Iterator[Claim]:
        """The ids of the rows that have results: no retried row may take one of them."""
        for index, row in self.form.read(self.run_dir.outputs(self.spec.output.format)):
            record = json.loads(row)
            yield index, record.get("custom_id", record["id"])

    def _merge(self, journal: Journal) -> Outcome:
        spec, run_dir = self.spec, self.run_dir
        num_mended = journal.counts.results
        with self.progress.phase("writing the outputs", "write"):
            finalize_retry(run_dir, spec.output, journal, model=spec.model.path, chat=spec.input.chat)
            report = self._report()
            write_report(run_dir, report)
        journal.remove()
        self.progress.state = "finished"
        self.progress.keeps_file = False
        outcome = Outcome.finished(run_dir, spec, report)
        return replace(outcome, lines=(f"{counted(num_mended, 'failed row')} mended", *outcome.lines))

    def _report(self) -> dict[str, Any]:
        """The report anew, from the outputs as they are now; times of the first run and of retries add up."""
        totals = count_outputs(self.run_dir, self.spec.output)
        before = read_report(self.run_dir)
        spent = follow(spent_in(before), self.progress.spent())
        report = build_report(totals, spent, about_job(self.spec, self.manifest, self.backend))
        if self.spec.output.format == "openai-batch":  # its outputs hold no times: they stay as of the first run
            kept = ("latency_s", "histograms", "slowest", "preemptions", "accuracy")
            report |= {key: before[key] for key in kept if key in before}
        return report


class _EveryRow:
    """All dead letters of a run directory are its own, whatever the shard."""

    def is_ours(self, index: int) -> bool:
        """Always."""
        return True

    def num_ours_until(self, index: int) -> int:
        """As many as there are indexes."""
        return index + 1


def _failed_row(index: int, letter: dict[str, Any]) -> Record | BadRow:
    """The row of a dead letter, to be run again if it could be read at all."""
    where = (index, str(letter.get("source", "")), int(letter.get("line", 0)))
    after = Cursor(0, 0, 0, index + 1)
    if isinstance(letter.get("row"), dict):
        return Record(*where, letter["row"], after)
    error = letter.get("error") or letter  # an OpenAI error file nests them
    known = RowError(RowErrorCode(error["code"]), str(error["message"]))
    return BadRow(*where, known, letter.get("row"), after, letter.get("custom_id", letter.get("id")))

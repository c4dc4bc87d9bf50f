"""``batchgen retry``: runs the failed rows of a finished run again and puts those that succeed into its outputs.

Rows come from ``errors.jsonl``, so a row that was fixed there by hand runs as fixed; the input is not read. The file
is first compared with the rows that have no result (see ``input.dead_letters``). A retry writes a journal of its own,
so it can be killed and resumed like a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.load import RawSettings, job_from_dict, override
from batchgen.core.errors import ExitCode, LockedError, ResumeMismatch, RowErrorCode, UsageError
from batchgen.core.fingerprint import Digests
from batchgen.core.records import BadRow, Record
from batchgen.core.storage import absolute
from batchgen.core.units import counted
from batchgen.input.dead_letters import DeadLetters
from batchgen.input.ids import Claim, UniqueIds
from batchgen.input.validator import RowValidator
from batchgen.output.finalize import finalize_retry, read_records
from batchgen.output.journal import Journal
from batchgen.output.manifest import differences
from batchgen.output.rundir import RunDir
from batchgen.run.again import RunAgain, interrupted
from batchgen.run.invocation import Invocation, Outcome, RunOptions
from batchgen.run.loader import EngineFactory, read_model


def retry_job(
    folder: Path,
    options: RunOptions,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    engine_factory: EngineFactory | None = None,
    where: str = "failed",
) -> Outcome:
    """Run the failed rows of the finished run in ``folder`` again; ``flags`` may change its engine sizes.

    ``where`` "length" or "incomplete" takes the rows that were cut off instead, with the sampling values of ``flags``.
    Without flags, an interrupted retry of these goes on. Raises UsageError if there is no finished run, ResumeMismatch
    if the model has changed, LockedError.
    """
    run_dir = RunDir(absolute(folder))
    manifest = run_dir.read_manifest()
    if manifest is None:
        raise UsageError(f"{folder} is not a run directory: it has no job.json")
    if not run_dir.is_complete():
        if holder := run_dir.holder():
            raise LockedError(f"{folder} is in use by {holder}, and not finished: wait for it, retry comes after")
        raise UsageError(f"{folder} is not finished: run its job again first, retry comes after")
    spec = override(job_from_dict(manifest.job, run_dir.manifest), flags)
    options, values = replace(options, max_error_rate=None), _sampling_values(flags)
    retry: _Retry | RunAgain = _Retry(spec, options, run_dir, engine_factory)
    begun = interrupted(run_dir)
    if not values and begun is not None and begun[1] is not None and where in ("failed", begun[0]):
        where, values = begun[0], dict(begun[1].values)
    if where != "failed":
        if not values:
            raise UsageError(f"--where {where} needs a value that is tried, such as --max-tokens 1024")
        retry = RunAgain(spec, options, run_dir, engine_factory)
        retry.where, retry.values = where, values
    elif values:
        raise UsageError(f"--{next(iter(values)).replace('_', '-')} needs --where length or --where incomplete")
    retry.manifest, retry.digests = manifest, Digests(manifest.file_states)
    return retry.execute()


def _sampling_values(flags: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    given, settings = flags.get("sampling", {}), RawSettings(flags)
    return {name: settings.parsed("sampling", name) for name, value in given.items() if value is not None}


class _Retry(Invocation):
    def work(self) -> Outcome:
        self.remotes.refuse_earlier(self.manifest)
        is_begun = self.run_dir.retry.is_dir()
        try:
            with closing(Journal.open(self.run_dir.retry, self.manifest.shard)) as journal:
                journal.partials.clear()  # a row may have been fixed since: its tokens may be of another prompt
                return self._retry(journal, is_begun=is_begun)
        finally:
            with suppress(OSError):  # an empty journal is nothing to resume from
                self.run_dir.retry.rmdir()

    def _retry(self, journal: Journal, *, is_begun: bool) -> Outcome:
        with closing(UniqueIds(None, as_text=self.spec.output.has_text_ids)) as ids:
            with self.progress.phase("checking errors.jsonl", "read"):
                letters = self._letters(journal, ids)
                self.progress.rows_total = sum(1 for _ in letters.read())
            if not self.progress.rows_total and not is_begun:
                journal.remove()
                return self.published(Outcome(ExitCode.OK, ("no row has failed: nothing to retry",)))
            self._find_model()
            builder = self.model.builder(self.spec)
            self.progress.keeps_file = True
            todo = _todo(letters, journal)
            validator = RowValidator(self.spec.input, builder, ids)  # failed rows are this run's, whatever its shard
            if not self.generate(todo, validator, journal):
                return self.stopped()
        num_fixed = journal.counts.results
        with self.progress.phase("writing the outputs", "write"):
            finalize_retry(self.run_dir, self.spec, journal)
            report = self.follow_report(self.run_dir.retry)
        outcome = self.finished(journal, report)
        return self.published(replace(outcome, lines=(f"{counted(num_fixed, 'failed row')} fixed", *outcome.lines)))

    def _letters(self, journal: Journal, ids: UniqueIds) -> DeadLetters:
        """The failed rows. They may not take the ids of rows with results, which ``ids`` holds afterwards."""
        output = self.spec.output
        if self.manifest.num_rows is None:
            raise UsageError(f'{self.run_dir.manifest} lacks "num_rows", so which rows failed is not known')

        def has_succeeded(index: int) -> bool:
            return index in journal.done and not journal.done.location(index).is_error

        outputs = self.run_dir.outputs(output.format)
        shard, num_rows = self.manifest.shard, self.manifest.num_rows
        letters = DeadLetters(self.run_dir.errors, outputs, num_rows, shard, journal.done.__contains__, self.spec.input)

        def known_ids() -> Iterator[Claim]:
            for index, record in read_records(self.run_dir, self.spec):
                letters.add_result(index)
                yield index, record.get("id", index)
            for row in letters.read():
                if not _is_run(row, journal):
                    continue
                record = json.loads(journal.payload(row.index))
                is_duplicate = record.get("code") == RowErrorCode.DUPLICATE_ID and not has_succeeded(row.index)
                if record["id"] is not None and not is_duplicate:  # a duplicate's id may be that of a row still to come
                    yield row.index, record["id"]

        ids.claim(known_ids())
        return letters

    def _find_model(self) -> None:
        """Find the model. Raises ResumeMismatch if it is not the one that the run was made with."""
        with self.progress.phase("checking the model", "load"):
            self.model = read_model(self.spec, self.manifest.begun_at)
            found = differences(self.manifest.fingerprints.get("model", {}), self.model.fingerprint(self.digests))
        if found:
            raise ResumeMismatch(
                f"{self.spec.model.path} is not the model that {self.run_dir.path} was run with; a run has one model:"
                + "".join(f"\n  {line}" for line in found)
            )


def _is_run(row: Record | BadRow, journal: Journal) -> bool:
    """Whether this retry has run a row already; one that was fixed since is run as fixed."""
    return row.index in journal.done and journal.cursor(row.index) == row.after


def _todo(letters: DeadLetters, journal: Journal) -> Iterator[Record | BadRow]:
    """The rows to be run. Until such a row ends, the journal on disk keeps what it has of its earlier text."""
    for row in letters.read():
        if not _is_run(row, journal):
            journal.done.discard(row.index)
            yield row

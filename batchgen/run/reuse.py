"""Rows taken over from earlier runs, before any row is computed: those whose fingerprint is equal (``output.reuse``).

That is sound because a row's result depends on nothing but its own request, the model, and how that computes: the
facts that a resume compares. Rows that an earlier run failed, or whose record lacks what this job asks for, are left to
be computed. A pass that is killed is gone on with: what it has taken over lies in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict
from batchgen.core.errors import LockedError, StorageError, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.records import BadRow, Record
from batchgen.core.units import counted
from batchgen.input.rows import chunked
from batchgen.input.source import RowRange
from batchgen.input.validator import Pending, RowValidator
from batchgen.output.earlier_rows import EarlierRows
from batchgen.output.journal import JournalEntry
from batchgen.output.manifest import RECORD_VERSION, Manifest, OtherVersion, differences
from batchgen.output.record_builder import RecordBuilder, fingerprint
from batchgen.output.rundir import RunDir
from batchgen.run.progress import Progress
from batchgen.run.results import ResultSink

_CHUNK_ROWS = 4096  # at once, with an fsync of their ids
_SLOW_CHUNK_S = 1.0  # a stop waits for the chunk under way
# Keys that decide what a record says, whatever its row asks.
_FORMS = ("model.", "engine.", "embed.", "output.split_reasoning")


class Reuse:
    """The rows of the runs that a job names, for the run of ``manifest``.

    ``lines`` says of each run that differs how; of one that computes otherwise no row is taken. Where the chat template
    ``prints_date``, it says which one. Without numerics in the manifest, as in a plan, these are not compared. Close
    it. Raises UsageError as ``earlier_runs``, and for files that cannot be read.
    """

    def __init__(
        self,
        spec: JobSpec,
        manifest: Manifest,
        builder: RecordBuilder,
        scratch: Path | None = None,
        prints_date: bool = False,
    ) -> None:
        self.lines: list[str] = []
        self._printed_at = manifest.begun_at if prints_date and spec.input.chat else None
        self._builder = builder
        self._rows = EarlierRows(scratch)
        for run_dir, earlier in earlier_runs(spec):
            self._add(run_dir, earlier, manifest)
        self._rows.seal()
        self.close = self._rows.close

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, row: Pending) -> dict[str, Any] | None:
        """The output record of a row that was made into a request, if an earlier run has its result."""
        known = fingerprint(row.index, row.params, row.prompt_token_ids)
        earlier = self._rows.find(known)
        if earlier is None:
            return None
        try:
            return self._builder.reused(row.record, row.id, row.params, known, earlier)
        except (KeyError, TypeError, AttributeError):  # it was edited
            return None

    def _add(self, run_dir: RunDir, earlier: Manifest | OtherVersion, manifest: Manifest) -> None:
        if isinstance(earlier, OtherVersion):
            why = f"record version: was {earlier.version!r}, now {RECORD_VERSION}"
            self.lines.append(f"no row of {run_dir.path} can be reused: {why}")
            return
        has_numerics = "numerics" in manifest.fingerprints
        was, now = (_facts(found, with_numerics=has_numerics) for found in (earlier, manifest))
        if found := differences(was, now):
            self.lines.append(f"no row of {run_dir.path} can be reused: {'; '.join(found)}")
            return
        try:
            self._rows.add(run_dir, job_from_dict(earlier.job, run_dir.manifest))
        except StorageError as error:
            raise UsageError(f"output.reuse: {error}") from None
        if self._printed_at and earlier.begun_at:
            its, own = (f"{at:%Y-%m-%d}" for at in (earlier.begun_at, self._printed_at))
            more = f"that of {run_dir.path}" if its == own else f"and {its} in {run_dir.path}, whose chats differ"
            self.lines.append(f"the chat template prints a date: {own}, {more}")
        others = differences({"": earlier.output_keys}, {"": manifest.output_keys})
        if others:
            self.lines.append(f"since {run_dir.path} the job has changed: {'; '.join(others)}")


def rendered_at(spec: JobSpec) -> datetime | None:
    """The time that chat templates print in the newest of the runs that ``output.reuse`` names; None without any.

    A job that reuses rows prints it too: else no prompt of another day would be equal. Raises as ``earlier_runs``.
    """
    times = [earlier.begun_at for _, earlier in earlier_runs(spec) if isinstance(earlier, Manifest)]
    return max(filter(None, times), key=datetime.timestamp, default=None)


def earlier_runs(spec: JobSpec) -> list[tuple[RunDir, Manifest | OtherVersion]]:
    """The runs that ``output.reuse`` names. The job's own run directory is passed over: a script may name it too.

    One of another record version has no manifest to compare. Raises UsageError for a folder that holds no run,
    LockedError for one that is in use.
    """
    found: list[tuple[RunDir, Manifest | OtherVersion]] = []
    for folder in dict.fromkeys(spec.output.reuse):
        run_dir = RunDir(Path(folder))
        if is_own(spec, folder):
            continue
        manifest: Manifest | OtherVersion | None
        try:
            manifest = run_dir.read_manifest()
        except OtherVersion as other:
            manifest = other
        if manifest is None:
            raise UsageError(f"output.reuse: {folder} is not a run directory: it has no job.json")
        if holder := run_dir.holder():
            raise LockedError(f"output.reuse: {folder} is in use by {holder}; run this job once that has ended")
        found.append((run_dir, manifest))
    return found


def refuse_own_rows(spec: JobSpec) -> None:
    """Raises UsageError where the run directory that is to be dropped is one whose rows are to be reused."""
    for folder in spec.output.reuse:
        if is_own(spec, folder):
            raise UsageError(
                f"--overwrite would drop the rows of {folder} before --reuse can take them, since it is the output "
                f"folder itself: give the new run a folder of its own, --output NEW_FOLDER --reuse {folder}"
            )


def is_own(spec: JobSpec, folder: str) -> bool:
    """Whether ``folder``, however it is written, is the job's own run directory."""
    named, own = Path(folder), Path(spec.output.path)
    if named.resolve() == own.resolve():
        return True
    with suppress(OSError):  # one of them is not there
        return named.samefile(own)
    return False


def reuse_rows(reuse: Reuse, rows: RowRange, validator: RowValidator, sink: ResultSink, progress: Progress) -> None:
    """Record the rows that earlier runs have results of, and say how many; the others are left in ``rows``.

    A stop ends it early. Raises StorageError.
    """
    for line in reuse.lines:
        progress.display.note(line)
    progress.sink, journal, num_before = sink, sink.journal, len(sink.journal.done)
    with progress.phase("taking rows over from earlier runs", "read"), progress.stopper.drain_with(lambda: None):
        for row in _requested(rows.read(), validator) if len(reuse) else ():
            if progress.stopper.requested:
                break
            record = reuse.record(row)
            if record is not None:
                sink.finish(row, JournalEntry(row.index, row.record.after, "result", encode_json(record)))
    num_reused, rows.start = len(journal.done) - num_before, journal.resume_cursor
    progress.num_reused += num_reused
    left = "the rest" if progress.rows_total is None else f"{progress.rows_total - len(journal.done):,}"
    progress.display.note(f"{counted(num_reused, 'row')} reused, {left} to be computed")


def _requested(rows: Iterable[Record | BadRow], validator: RowValidator) -> Iterator[Pending]:
    """The rows that can run, with their prompts. Others are found again, and recorded, when the rest is run."""
    most = 1
    chunks = chunked(rows, lambda: most)
    while chunk := next(chunks, None):
        began_at = time.monotonic()
        for answer in validator.validate(chunk):
            if not isinstance(answer, BadRow):
                yield answer[0]
        most = min(2 * most, _CHUNK_ROWS) if time.monotonic() - began_at < _SLOW_CHUNK_S else 1


def _facts(manifest: Manifest, *, with_numerics: bool) -> dict[str, Any]:
    """What must be equal for a row to have the same result, whatever the row asks for."""
    names = ["model", "code", *(["numerics"] if with_numerics else [])]
    keys = {name: value for name, value in manifest.output_keys.items() if name.startswith(_FORMS)}
    return {"": keys, **{name: manifest.fingerprints.get(name, {}) for name in names}}

"""The jobs of a run directory: which one a start resumes, and the rows that a changed job keeps from them.

A start without ``--update`` may only lose few results; a killed ``take_over`` continues from the rows in the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch
from batchgen.core.file_digests import Digests
from batchgen.core.numerics import Numerics
from batchgen.core.units import counted
from batchgen.input.ids import RowValidator, may_have_ids
from batchgen.input.rows import prepared
from batchgen.input.source import RowRange
from batchgen.output.journal import Journal
from batchgen.output.manifest import FORM, RECORD_VERSION, Manifest, compare
from batchgen.output.rundir import JournalledJob, RunDir
from batchgen.run.earlier_results import EarlierResults, is_between
from batchgen.run.progress import KEEPING, Progress
from batchgen.run.results import ResultSink
from batchgen.text.grammar_source import library

FEW_ROWS = 20  # fewer results are edited by hand, and a share of them says little
MIN_GOOD, MIN_KEPT = 0.9, 0.5  # rows that can run, and results that are kept, as shares of the results before
_MAX_PARTIAL_TOKENS = 1 << 21  # of all answers that are continued: they are in memory


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Counts of a ``take_over``: rows that are kept, and rows that can run, including the kept ones."""

    num_kept: int
    num_good: int

    @property
    def num_new(self) -> int:
        return self.num_good - self.num_kept

    def losses(self, num_old: int, begun: Manifest, now: Manifest) -> str:
        """The reason why ``--update`` is needed: lost results of the job ``begun``; "" if it is not needed.

        ``begun`` has ``num_old`` results, and possibly more rows that can run if it was interrupted.
        """
        num_before = max(num_old, begun.num_good or 0)
        if num_old and now.num_files < begun.num_files:
            why = f"the input has {counted(now.num_files, 'file')}, was {begun.num_files:,}"
        elif num_before >= FEW_ROWS and self.num_good < MIN_GOOD * num_before:
            what = "results" if num_before == num_old else "rows before"
            why = f"the input has {counted(self.num_good, 'row')} that can run, and there are {num_before:,} {what}"
        elif num_old >= FEW_ROWS and self.num_kept < MIN_KEPT * num_old:
            why = "most rows have changed"
        else:
            return ""
        return f"{why}; {min(self.num_kept, num_old):,} of {num_old:,} results would be left"


class FolderJobs:
    """The jobs of a run directory: the job of its outputs (``finished``), and the unfinished jobs since then."""

    def __init__(self, run_dir: RunDir, *, overwrites: bool = False) -> None:
        """Raises UsageError for a ``job.json`` that cannot be read. A start that ``overwrites`` the jobs reads none."""
        self._run_dir = run_dir
        self.finished = None if overwrites else run_dir.read_manifest()
        self._unfinished = [] if overwrites else run_dir.unfinished()
        self.manifests = [*filter(None, [self.finished]), *(job.manifest for job in reversed(self._unfinished))]

    @property
    def base(self) -> Manifest | None:
        """The job to inherit from: of the outputs, or else the last unfinished one; None in a new folder."""
        return self.manifests[0] if self.manifests else None

    def digests(self) -> Digests:
        """Digests of files that these jobs have read."""
        states: dict[str, Any] = {}
        for manifest in reversed(self.manifests):
            states |= manifest.file_states
        return Digests(states)

    def find(self, now: Manifest, spec: JobSpec) -> JournalledJob | None:
        """The newest journal of this job, if it is unfinished."""
        return next((job for job in reversed(self._unfinished) if is_same(job.manifest, now, spec)), None)

    @property
    def has_failed(self) -> bool:
        """Whether rows of the last finished job have failed."""
        return self.finished is not None and self._run_dir.errors.name in self.finished.files

    def has_lost_rows(self) -> bool:
        """Whether rows are missing from the journal that is kept with the outputs. Raises StorageError."""
        if (kept := self._run_dir.kept_job()) is None:
            return False
        with closing(Journal.read(kept.folder, kept.manifest.shard)) as journal:
            return not journal.done.covers(kept.manifest.num_rows or 0)

    def is_of_outputs(self, now: Manifest, spec: JobSpec) -> bool:
        """Whether the outputs, in whatever form, belong to this job."""
        return self.finished is not None and is_same(replace(self.finished, parts=[]), now, spec)

    def is_done(self, now: Manifest, spec: JobSpec, digests: Digests) -> bool:
        """Whether the outputs are this job's, in the form that it asks for; they may have been edited since."""
        if self.finished is None or is_between(self._run_dir, self.finished, digests):
            return False
        was, is_now = ({name: job["output"].get(name) for name in FORM} for job in (self.finished.job, now.job))
        is_there = self._run_dir.outputs(spec.output.format).is_file()
        return is_there and was == is_now and self.is_of_outputs(now, spec)

    def edited(self, digests: Digests) -> list[str]:
        """The files of the last finished job that have been changed since, but not a missing ``errors.jsonl``."""
        finished, run_dir = self.finished, self._run_dir
        if finished is None or is_between(run_dir, finished, digests) or not run_dir.has_outputs():
            return []
        changed, errors = run_dir.changed_files(finished, digests), run_dir.errors
        return [name for name in changed if name != errors.name or errors.exists()]

    def changes(self, now: Manifest) -> tuple[str, ...]:
        """Differences from the ``base`` job except the input; () if a job of the folder only differs in its input."""
        changes = [changes_of_job(manifest, now) for manifest in self.manifests]
        return changes[0] if all(changes[1:]) and changes else ()

    def refuse_unasked(self, now: Manifest, digests: Digests) -> None:
        """Raises ResumeMismatch for a change that needs ``--update``.

        Without it, one of the folder's jobs must be the same except for its input, and edited files are not replaced.
        """
        folder = self._run_dir.path
        if changes := self.changes(now):
            is_current = self.manifests[0].version == RECORD_VERSION
            how = "with another job" if is_current else "by another version of batchgen"
            kept = "batchgen plan says how many rows would be kept; --update keeps these and computes the others"
            none = "--update computes all rows again, and the version that began it continues it"
            raise ResumeMismatch(
                f"{folder} was begun {how}; what changes its outputs:\n"
                + "".join(f"  {line}\n" for line in changes)
                + f"{kept if is_current else none}, --overwrite starts again"
            )
        if edited := self.edited(digests):
            what = f"{', '.join(edited)} in {folder} was edited since its run ended"
            raise ResumeMismatch(f"{what}, and would be replaced: --update continues")

    def losses(self, counts: KeptCounts, sources: Sequence[tuple[int, Manifest]], now: Manifest, spec: JobSpec) -> str:
        """The reason for ``--update`` if a changed input would lose many results; "" for the job of the outputs.

        Only results of this job count: results of a job that ``--update`` gave up are lost already.
        """
        own = [(number, begun) for number, begun in sources if not changes_of_job(begun, now)]
        if not own or self.is_of_outputs(now, spec):
            return ""
        return counts.losses(*max(own, key=lambda source: source[0]), now)

    def what_changed(self, now: Manifest, spec: JobSpec) -> str:
        """Reason why rows are kept, as the beginning of a line."""
        if self.base is None:
            return ""
        if self.is_of_outputs(now, spec):
            return "failed rows run again: " if self.has_failed else ""
        same = self.base.fingerprints.get("input") == now.fingerprints.get("input")
        return "job changed: " if same else "input changed: "


def is_same(begun: Manifest, now: Manifest, spec: JobSpec) -> bool:
    """Whether ``begun`` is the same job, so that its rows can be reused by index."""
    if begun.parts or compare(begun, now.after(begun)).refused:
        return False
    was = replace(spec.output, format=begun.job["output"]["format"])
    return not may_have_ids(spec.input) or was.has_text_ids == spec.output.has_text_ids


def changes_of_job(begun: Manifest, now: Manifest) -> tuple[str, ...]:
    """Differences from an earlier job, apart from its input; ``input.limit`` may be higher now."""
    inputs = {"input": begun.fingerprints.get("input", {})}
    now = replace(now, fingerprints=now.fingerprints | inputs).after(begun)
    was, limit = (manifest.output_keys.get("input.limit") for manifest in (begun, now))
    if was is not None and (limit is None or limit > was):
        now = replace(now, output_keys=now.output_keys | {"input.limit": was})
    return compare(begun, now).refused


def inherited_numerics(begun: Manifest, spec: JobSpec) -> Numerics | None:
    """The numerics to keep when continuing a folder's job; None if they are unknown or the job asks for others."""
    numerics = begun.numerics
    if begun.version != RECORD_VERSION or numerics is None or numerics.in_job(begun.job, spec.to_dict()) != numerics:
        return None
    if not spec.sampling.structured_outputs:
        return replace(numerics, llguidance="")
    return replace(numerics, llguidance=str(library().__version__)) if numerics.llguidance else None


def take_over(
    earlier: EarlierResults, rows: RowRange, validator: RowValidator, sink: ResultSink, progress: Progress
) -> KeptCounts:
    """Record the rows with earlier results, until a stop; counts include rows of a killed call. Raises StorageError."""
    progress.sink = sink
    journal, num_tokens = sink.journal, 0
    partials: dict[int, tuple[int, ...]] = {}
    num_good = num_before = journal.counts.results
    with progress.phase(KEEPING, "read"), progress.stopper.drain_with(lambda: None):
        for row, request in prepared(rows.read(), validator.build):
            if progress.stopper.requested:
                break
            if request is None:  # it is recorded when the missing rows run
                continue
            num_good += 1
            record, tokens = earlier.find(row)
            if record is not None:
                sink.keep(row, record)
            elif tokens and num_tokens < _MAX_PARTIAL_TOKENS:
                partials[row.index] = tokens
                num_tokens += len(tokens)
    journal.save_partials(partials)
    progress.num_reused += journal.counts.results - num_before
    rows.start = journal.resume_cursor
    return KeptCounts(journal.counts.results, num_good)

"""``batchgen merge``: joins the finished shards of one job into one run directory that holds every input row once.

Records go into the target's journal, from which ``finalize`` writes the files as for any run; shards are only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.core.errors import LockedError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.json_line import encode_json
from batchgen.core.numerics import Numerics
from batchgen.core.records import Cursor
from batchgen.core.storage import absolute, storage_errors
from batchgen.core.units import WHOLE
from batchgen.output.finalize import EXACT_FORMAT, finalize, read_rows
from batchgen.output.journal import Counts, Journal, JournalEntry
from batchgen.output.manifest import FORM, RECORD_VERSION, Manifest, compare
from batchgen.output.rundir import JournalledJob, RunDir, tidy_on_failure
from batchgen.report.build import build_report, write_report
from batchgen.report.rows import RowTotals
from batchgen.report.usage import follow, usage_of
from batchgen.run.earlier_results import is_between
from batchgen.run.reports import journal_totals, read_report

_SHARED_FACTS = ("input", "created_at", "numerics", "threads", "sizes")


class Merged(NamedTuple):
    """Result of a merge: counts of rows (None if the merge was done before), and reasons for a missing report."""

    counts: Counts | None
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Shard:
    """One finished shard; ``number`` counts from 1."""

    run_dir: RunDir
    manifest: Manifest
    num_rows: int

    @property
    def number(self) -> int:
        return self.manifest.shard.number

    def entries(self) -> Iterator[JournalEntry]:
        """All rows; their cursors are placeholders, since merging does not read the input. Raises as ``read_rows``."""
        for index, kind, payload in read_rows(self.run_dir, self.manifest.job["output"]["format"]):
            yield JournalEntry(index, Cursor(0, 0, 0, index + 1), kind, payload)

    def __str__(self) -> str:
        return f"shard {self.manifest.shard} ({self.run_dir.path})"


def merge(folders: Sequence[Path], target: Path, *, allow_mixed_kernels: bool = False) -> Merged:
    """Write outputs, failed rows, report and ``job.json`` of a job's shards into ``target``: new, or an earlier merge.

    Times of the report add up as if one machine had run the shards in turn. Raises UsageError and leaves ``target``
    unchanged if the shards are of different jobs, one is missing, unfinished, edited or given twice, if a row is
    repeated or not of the input, or if kernels differ without ``allow_mixed_kernels``. Raises BatchgenError if a row is
    missing, LockedError, StorageError.
    """
    shards = _load(folders, allow_mixed_kernels)
    target = absolute(target)
    _refuse_inside(shards, target)
    manifest = _merged(shards, target)
    run_dir = RunDir(target)
    with tidy_on_failure(target):
        run_dir.create()
        with run_dir.lock():
            run_dir.sweep()
            last, begun = run_dir.read_manifest(), run_dir.unfinished()
            if any(not other.manifest.parts for other in begun):
                raise UsageError(f"{target} holds a run already, not finished; merge into a new folder")
            is_same_job = last is not None and last.created_at == manifest.created_at and last.version == RECORD_VERSION
            if last is not None and not (last.parts and is_same_job):
                since = " that continued after the merge" if is_same_job else ""
                raise UsageError(f"{target} holds a run already{since}; merge into a new folder")
            if last is not None and last.parts == manifest.parts and not run_dir.changed_files(last, Digests()):
                return Merged(None)
            return _write(shards, run_dir, manifest, begun)


def _write(shards: Sequence[_Shard], run_dir: RunDir, manifest: Manifest, earlier: Sequence[JournalledJob]) -> Merged:
    """Copy the records of all shards into a journal, and write the joined files from it.

    The journals of ``earlier`` killed merges are removed once the new journal exists: until then they show that a
    merge wrote the outputs.
    """
    begun = run_dir.begin(manifest)
    for other in earlier:
        run_dir.remove_job(other)
    job = manifest.spec(run_dir.manifest)
    with closing(Journal.open(begun.folder)) as journal:
        try:
            for shard in shards:
                for entry in shard.entries():
                    if entry.index in journal.done or entry.index not in range(shard.num_rows):
                        raise UsageError(f"{shard} holds row {entry.index}, which comes twice or is not of the input")
                    journal.append(entry)
        except BaseException:
            journal.close()
            if run_dir.manifest.exists() or not run_dir.outputs(job.output.format).exists():
                run_dir.remove_job(begun)  # it may be large
            raise
        begun = finalize(run_dir, begun, job, journal, num_rows=shards[0].num_rows)
        counts = journal.counts
        problems = _write_report(shards, run_dir, manifest, journal_totals(journal, job))
    run_dir.finish(begun, Digests(), keeps_rows=job.output.format != EXACT_FORMAT)
    return Merged(counts, problems)


def _write_report(shards: Sequence[_Shard], run_dir: RunDir, manifest: Manifest, totals: RowTotals) -> Sequence[str]:
    """Write the report of the merged run unless a shard's report cannot be read; returns a line per such shard."""
    reports, problems = [], []
    for shard in shards:
        try:
            reports.append(read_report(shard.run_dir))
        except UsageError as error:
            problems.append(str(error))
    if problems:
        with storage_errors("remove", run_dir.report):
            run_dir.report.unlink(missing_ok=True)
        return problems
    usage: dict[str, Any] = {}
    for report in reports:
        usage = follow(usage, usage_of(report))
    facts = {name: next((r[name] for r in reports if r[name] is not None), None) for name in _SHARED_FACTS}
    facts["numerics"] = manifest.fingerprints.get("numerics", facts["numerics"])  # with the kernels of all shards
    job = manifest.spec(run_dir.manifest)
    facts |= job.model.named | {"shard": str(WHOLE)}
    write_report(run_dir.report, build_report(totals, usage, facts))
    return []


def _refuse_inside(shards: Sequence[_Shard], target: Path) -> None:
    """Raises UsageError for a target that is a shard or is inside one."""
    for shard in shards:
        if target.resolve().is_relative_to(shard.run_dir.path.resolve()):
            verb = "is" if target.resolve() == shard.run_dir.path.resolve() else "lies in"
            raise UsageError(f"{target} {verb} {shard}, which holds a run already; merge into a new folder")


def _load(folders: Sequence[Path], allow_mixed_kernels: bool) -> list[_Shard]:
    """The shards in order. Raises UsageError unless they are all shards of one job, finished, and each given once."""
    shards = [_load_shard(RunDir(folder)) for folder in folders]
    if not shards:
        raise UsageError("nothing to merge: name the run directories of all shards")
    first, count = shards[0], shards[0].manifest.shard.count
    for shard in shards[1:]:
        _check_same_job(first, shard)
        was, now = first.manifest.numerics or Numerics(), shard.manifest.numerics or Numerics()
        if why := was.refusal(now, may_mix_kernels=allow_mixed_kernels):
            raise UsageError(f"{first} and {shard} cannot be joined: {why}")
    by_number: dict[int, _Shard] = {}
    for shard in shards:
        if shard.number in by_number:
            raise UsageError(f"{by_number[shard.number]} is given twice, as {shard.run_dir.path} too")
        by_number[shard.number] = shard
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in by_number]
    if missing:
        raise UsageError(f"shard {', '.join(missing)} is missing: give the run directories of all {count} shards")
    return [by_number[number] for number in sorted(by_number)]


def _load_shard(run_dir: RunDir) -> _Shard:
    manifest = run_dir.read_manifest()
    if manifest is None and not run_dir.unfinished():
        raise UsageError(f"{run_dir.path} is not a run directory: it has no job.json")
    if holder := run_dir.holder():
        raise LockedError(f"{run_dir.path} is in use by {holder}; merge when it is done")
    if manifest is not None and manifest.version != RECORD_VERSION:
        words = f"{run_dir.path} is of record version {manifest.version}, this batchgen writes {RECORD_VERSION}"
        raise UsageError(f"{words}: run its shard with --update")
    if manifest is None or manifest.num_rows is None:
        raise UsageError(f"{run_dir.path} is not finished: run its shard again until it is")
    digests = Digests(manifest.file_states)
    if is_between(run_dir, manifest, digests):
        raise UsageError(f"{run_dir.path} is between two jobs: run its shard again until it is finished")
    if changed := run_dir.changed_files(manifest, digests):
        problem = f"{', '.join(changed)} in {run_dir.path} is not as its run wrote it"
        raise UsageError(f"{problem}: restore it, or run its shard with --overwrite")
    manifest.spec(run_dir.manifest)  # a shard of another version is refused before anything is made
    return _Shard(run_dir, manifest, manifest.num_rows)


def _check_same_job(first: _Shard, other: _Shard) -> None:
    old, new = (_unsharded(shard.manifest) for shard in (first, other))
    differences = compare(old, new).refused
    counts = first.manifest.shard.count, other.manifest.shard.count
    if counts[0] != counts[1]:
        differences = (f"shards: was {counts[0]}, now {counts[1]}", *differences)
    if first.num_rows != other.num_rows:
        differences += (f"input rows: was {first.num_rows}, now {other.num_rows}",)
    if differences:
        raise UsageError(f"{first} and {other} are not of one job: {'; '.join(differences)}")


def _unsharded(manifest: Manifest) -> Manifest:
    """Values that the shards of a job must share; their kernels are compared separately."""
    form = {f"output.{name}": manifest.job["output"].get(name) for name in FORM}
    manifest = manifest.with_numerics((manifest.numerics or Numerics()).base)
    return replace(manifest, shard=WHOLE, output_keys=manifest.output_keys | form)


def _merged(shards: Sequence[_Shard], target: Path) -> Manifest:
    """The manifest of the complete job, as if it had run unsharded in ``target``."""
    first = shards[0].manifest
    job = {**first.job, "output": {**first.job["output"], "path": str(target), "publish": ""}}
    parts = [sha256(encode_json(shard.manifest.files)).hexdigest() for shard in shards]
    return replace(
        first, job=job, shard=WHOLE, num_rows=None, taken=True, parts=parts, files={}, journal="", file_states={}
    )

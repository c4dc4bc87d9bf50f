"""``batchgen merge``: joins the finished shards of one job into one run directory that holds every input row once.

It reads run directories only: no model, no input file, no journal. Rows are copied; only their ids are looked at,
since a row that was fixed by hand in one shard may have been given the id of another shard's row. Nothing appears in
the target before everything is checked and staged; then ``job.json``, ``errors.jsonl`` and, last, the outputs appear.
An interrupted merge is run again; a finished one is known by its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict
from batchgen.core.errors import LockedError, UsageError
from batchgen.core.shard import WHOLE
from batchgen.core.storage import absolute, commit_staged
from batchgen.core.units import shown
from batchgen.input.ids import UniqueIds, may_have_ids
from batchgen.output.finalize import (
    IndexedRow,
    Rows,
    commit_errors,
    join,
    read_errors,
    stage,
)
from batchgen.output.formats import output_format
from batchgen.output.journal import Counts
from batchgen.output.manifest import Manifest, OtherVersion, compare, kernels_of, mix_kernels, with_kernels
from batchgen.output.rundir import RunDir
from batchgen.report.build import build_report, write_report
from batchgen.report.usage import follow, usage_of
from batchgen.run.invocation import tidy_on_refusal
from batchgen.run.reports import output_totals, read_report, result_ids

_NAMED_ROWS = 5  # of many missing rows
_SHARED_FACTS = ("input", "created_at", "numerics", "threads", "sizes", "roofline")


@dataclass(frozen=True, slots=True)
class _Shard:
    """One finished shard; ``number`` counts from 1."""

    run_dir: RunDir
    manifest: Manifest
    num_rows: int

    @property
    def number(self) -> int:
        return self.manifest.shard.number

    def __str__(self) -> str:
        return f"shard {self.manifest.shard} ({self.run_dir.path})"


def merge(folders: Sequence[Path], target: Path, *, allow_mixed_kernels: bool = False) -> Counts | None:
    """Write outputs, failed rows and ``job.json`` of all shards of a job into ``target``.

    ``target`` must be new, or a folder in which this merge was begun or finished; returns None if it is finished.
    Raises UsageError, without outputs in ``target``, if the shards are of different jobs, one is missing, unfinished
    or given twice, if a row is missing, repeated, in the wrong shard or has the id of another, or if the shards were
    computed by different kernels without ``allow_mixed_kernels``. Raises LockedError, StorageError.
    """
    shards = _load(folders, allow_mixed_kernels)
    target = absolute(target)
    _refuse_inside(shards, target)
    manifest = _merged(shards, target)
    run_dir = RunDir(target)
    with tidy_on_refusal(target):
        run_dir.create()
        with run_dir.lock():
            run_dir.sweep()
            if not _is_free_for(manifest, run_dir):
                raise UsageError(f"{target} holds a run already; merge into a new folder")
            if run_dir.is_complete():
                _refuse_outdated(shards, run_dir)
                return None
            if run_dir.journal.is_dir():
                raise UsageError(f"{target} holds a run already, not finished; merge into a new folder")
            try:
                return _write(shards, run_dir, manifest)
            except BaseException:
                run_dir.sweep()  # the staged files may be large
                raise


def write_merged_report(folders: Sequence[Path], target: Path) -> list[str]:
    """Write ``report.json`` of the merged run in ``target`` if it is missing, from the reports of the shards.

    Times add up as if one machine had run the shards one after another, so a rate is that of one machine. Returns a
    line per shard whose report cannot be read; then none is written. Raises LockedError, StorageError.
    """
    run_dir = RunDir(target)
    with run_dir.lock():
        if run_dir.report.exists():
            return []
        reports, problems = [], []
        for folder in folders:
            try:
                reports.append(read_report(RunDir(folder)))
            except UsageError as error:
                problems.append(str(error))
        if not problems:
            write_report(run_dir.report, _joined_report(run_dir, reports))
        return problems


def _joined_report(run_dir: RunDir, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    manifest = run_dir.read_manifest()
    assert manifest is not None, "a merged run has a manifest"
    usage: dict[str, Any] = {}
    for report in reports:
        usage = follow(usage, usage_of(report))
    facts = {name: next((r[name] for r in reports if r[name] is not None), None) for name in _SHARED_FACTS}
    facts["numerics"] = manifest.fingerprints.get("numerics", facts["numerics"])  # with the kernels of all shards
    job = job_from_dict(manifest.job, run_dir.manifest)
    totals = output_totals(run_dir, job)
    return build_report(totals, usage, facts | job.model.named | job.cluster.priced | {"shard": "1/1"})


def _refuse_inside(shards: Sequence[_Shard], target: Path) -> None:
    """Raises UsageError for a target that is a shard or is inside one."""
    for shard in shards:
        if target.resolve().is_relative_to(shard.run_dir.path.resolve()):
            where = "is" if target.resolve() == shard.run_dir.path.resolve() else "lies in"
            raise UsageError(f"{target} {where} {shard}, which holds a run already; merge into a new folder")


def _refuse_outdated(shards: Sequence[_Shard], run_dir: RunDir) -> None:
    """Raises UsageError if a failed row of the merged run has a result in its shard by now."""
    failed = bytearray(shards[0].num_rows)
    proof = _Proof(shards)
    for shard in shards:
        for index, _ in proof.check(shard, read_errors(shard.run_dir), ordered=True):
            failed[index] = 1
    for index, _ in read_errors(run_dir):
        if not (0 <= index < len(failed) and failed[index]):
            raise UsageError(
                f"{run_dir.path} was merged before row {index} was retried in its shard; merge into a new folder"
            )


def _write(shards: Sequence[_Shard], run_dir: RunDir, manifest: Manifest) -> Counts:
    """Write the joined files; the outputs appear last, as in ``finalize``."""
    job = job_from_dict(manifest.job, run_dir.manifest)
    output = job.output
    form = output_format(job)
    proof = _Proof(shards)

    def results() -> Iterator[IndexedRow]:
        proof.restart()
        files = [(shard, form.read(shard.run_dir.outputs(output.format))) for shard in shards]
        return join([proof.check(*file, ordered=output.order == "input") for file in files], output.order)

    def errors() -> Iterator[IndexedRow]:
        return join([proof.check(shard, read_errors(shard.run_dir), ordered=True) for shard in shards], "input")

    counts = stage(run_dir, output, form, Rows(results), Rows(errors))
    proof.finish()
    _refuse_repeated_ids(shards, job)
    run_dir.write_manifest(manifest)
    commit_errors(run_dir, counts)
    commit_staged(run_dir.outputs(output.format))
    return counts


def _refuse_repeated_ids(shards: Sequence[_Shard], job: JobSpec) -> None:
    """Raises UsageError naming an id that two results have."""
    if not may_have_ids(job.input):
        return
    with closing(UniqueIds(None, as_text=job.output.has_text_ids)) as ids:
        for shard in shards:
            for row, first in ids.claim(result_ids(shard.run_dir, job)).items():
                known = shown(dict(result_ids(shard.run_dir, job))[row], 60)
                raise UsageError(
                    f"row {first} of {_owner(shards, first)} and row {row} of {shard} both "
                    f"have the id {known}: run one of these shards anew with --overwrite"
                )


def _owner(shards: Sequence[_Shard], index: int) -> _Shard:
    """The shard that a row of the input belongs to."""
    return next(shard for shard in shards if shard.manifest.shard.owns(index))


def _load(folders: Sequence[Path], allow_mixed_kernels: bool) -> list[_Shard]:
    """The shards in order. Raises UsageError unless they are all shards of one job, finished, and each given once."""
    shards = [_load_shard(RunDir(folder)) for folder in folders]
    if not shards:
        raise UsageError("nothing to merge: name the run directories of all shards")
    first, count = shards[0], shards[0].manifest.shard.count
    for shard in shards[1:]:
        _check_same_job(first, shard)
    if not allow_mixed_kernels:
        _check_same_kernels(shards)
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
    if manifest is None:
        raise UsageError(f"{run_dir.path} is not a run directory: it has no job.json")
    if holder := run_dir.holder():
        raise LockedError(f"{run_dir.path} is in use by {holder}; merge when it is done")
    if run_dir.retry.is_dir():
        raise UsageError(f"{run_dir.path} has a retry that was interrupted: batchgen retry {run_dir.path}, then merge")
    if manifest.num_rows is None or not run_dir.outputs(manifest.job["output"]["format"]).is_file():
        raise UsageError(f"{run_dir.path} is not finished: run its shard again until it is")
    return _Shard(run_dir, manifest, manifest.num_rows)


def _check_same_job(first: _Shard, other: _Shard) -> None:
    old, new = (replace(with_kernels(shard.manifest, None), shard=WHOLE) for shard in (first, other))
    differences = compare(old, new).refused
    counts = first.manifest.shard.count, other.manifest.shard.count
    if counts[0] != counts[1]:
        differences = (f"shards: was {counts[0]}, now {counts[1]}", *differences)
    if first.num_rows != other.num_rows:
        differences += (f"input rows: was {first.num_rows}, now {other.num_rows}",)
    for key in ("format", "order"):
        values = [shard.manifest.job["output"][key] for shard in (first, other)]
        if values[0] != values[1]:
            differences += (f"output.{key}: was {values[0]}, now {values[1]}",)
    if differences:
        raise UsageError(f"{first} and {other} are not of one job: {'; '.join(differences)}")


def _check_same_kernels(shards: Sequence[_Shard]) -> None:
    first, *others = shards
    for other in others:
        was, now = kernels_of(first.manifest), kernels_of(other.manifest)
        if was != now:
            raise UsageError(
                f"{first} was computed with the kernels {was}, {other} with {now}, which add up in another order, so "
                "tokens may differ: run one of them anew where the other ran, or give --allow-mixed-kernels"
            )


def _merged(shards: Sequence[_Shard], target: Path) -> Manifest:
    """The manifest of the whole job, as if it had run unsharded in ``target``, with the kernels of all shards."""
    known = [name for shard in shards if (name := kernels_of(shard.manifest))]
    return with_kernels(_moved(shards[0].manifest, target), mix_kernels(*known) if known else None)


def _moved(manifest: Manifest, target: Path) -> Manifest:
    """The manifest as that of a whole job in ``target``."""
    job = {**manifest.job, "output": {**manifest.job["output"], "path": str(target), "publish": "", "mirror": ""}}
    return replace(manifest, job=job, shard=WHOLE, file_states={})


def _is_free_for(merged: Manifest, run_dir: RunDir) -> bool:
    """Whether a directory is new, or a merge of these shards began it; a retry in it may have added kernels since."""
    try:
        begun = run_dir.read_manifest()
    except OtherVersion:
        return False
    if begun is None:
        return True
    return begun.shard == WHOLE and with_kernels(_moved(begun, run_dir.path), None) == with_kernels(merged, None)


class _Proof:
    """Checks rows as they pass: each must belong to the shard that holds it, and each input row must come once."""

    def __init__(self, shards: Sequence[_Shard]) -> None:
        self._shards = shards
        self._num_rows = shards[0].num_rows
        self._seen = bytearray(self._num_rows)

    def restart(self) -> None:
        self._seen = bytearray(self._num_rows)

    def check(self, shard: _Shard, rows: Iterator[IndexedRow], *, ordered: bool) -> Iterator[IndexedRow]:
        """The same rows; raises UsageError at the first that does not belong there."""
        last = -1
        for index, row in rows:
            if not 0 <= index < self._num_rows:
                raise UsageError(f"{shard} holds row {index}, but the input has {self._num_rows} rows")
            if not shard.manifest.shard.owns(index):
                raise UsageError(f"{shard} holds row {index}, which belongs to {_owner(self._shards, index)}")
            if self._seen[index]:
                raise UsageError(f"{shard} holds row {index} twice")
            if ordered and index < last:
                raise UsageError(f"{shard} holds row {index} after row {last}, not in input order; was it edited?")
            self._seen[index] = 1
            last = index
            yield index, row

    def finish(self) -> None:
        """Raises UsageError if an input row is missing."""
        num_missing = self._seen.count(0)
        if not num_missing:
            return
        named: list[str] = []
        index = self._seen.find(0)
        while index >= 0 and len(named) < _NAMED_ROWS:
            named.append(f"row {index} (shard {_owner(self._shards, index).manifest.shard})")
            index = self._seen.find(0, index + 1)
        more = "" if num_missing <= _NAMED_ROWS else f" and {num_missing - _NAMED_ROWS} more"
        raise UsageError(f"rows are missing: {', '.join(named)}{more}; run those shards anew with --overwrite")

"""Earlier results that a new or changed job keeps rows from, by fingerprint; a resume finds its own rows by index.

Each source is judged by its own ``job.json``, since results depend on the model and its numerics. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.identity import limit_of, may_go_on, still_holds
from batchgen.config.job import JobSpec
from batchgen.core.errors import LockedError, StorageError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.numerics import Numerics
from batchgen.core.records import Row
from batchgen.output.earlier_rows import EarlierRows
from batchgen.output.finalize import EXACT_FORMAT
from batchgen.output.manifest import Manifest, differences
from batchgen.output.rundir import RunDir
from batchgen.output.segments import segments
from batchgen.run.opened import OpenJob


class EarlierResults:
    """The earlier results that the job of ``manifest`` can take its rows from. Close it.

    ``run_dir`` is the job's own folder, whose journal ``skip`` is not read. ``lines`` describes how each source
    differs; a source with other numerics is not used (jobs' keys are compared if the manifest lacks numerics).
    ``sources`` lists the sources in the job's own folder: the number of results, and the job of each. Raises UsageError
    as ``earlier_runs``, and for files that cannot be read.
    """

    def __init__(self, job: OpenJob, manifest: Manifest, run_dir: RunDir | None, skip: Path | None = None) -> None:
        self.lines: list[str] = []
        self._manifest, self._skip = manifest, skip
        self._builder, self._config = job.records, job.model.config
        self._rows = EarlierRows()
        self.sources = [*self._add(run_dir, job.digests)] if run_dir is not None else []
        for folder, earlier in earlier_runs(job.spec):
            self._tell_changes(folder, earlier, [*self._add(folder, Digests(earlier.file_states))])
        self._rows.seal()
        self.close = self._rows.close

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, row: Row) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
        """The output record of a row that has its prompt, or None if no source has its result.

        If it is None, also the tokens of an answer that was cut off at a lower limit, which the row can continue; ()
        without such an answer.
        """
        fingerprint = self._builder.fingerprint(row)
        limit = limit_of(row.params, len(row.prompt_token_ids), self._builder.max_model_len)
        partial: tuple[int, ...] = ()
        for earlier in self._rows.find(fingerprint):
            with suppress(KeyError, TypeError, AttributeError):  # a record that was not written by a run
                if still_holds(earlier, row.params, limit):
                    record = self._builder.reused(row, fingerprint, earlier)
                    if record is not None:
                        return record, ()
                else:
                    partial = max(partial, may_go_on(earlier, row.params, limit), key=len)
        return None, partial

    def _add(self, run_dir: RunDir, digests: Digests) -> Iterator[tuple[int, Manifest]]:
        """Add the sources of a folder; yields the number of results and the job of each."""
        last, kept = run_dir.read_manifest(), run_dir.kept_job()
        if last is not None and self._computes_alike(run_dir, last):
            if last.job["output"]["format"] != EXACT_FORMAT:
                paths = segments(kept.folder) if kept else []
                if not paths and last.num_rows:
                    self.lines.append(f"no row of {run_dir.path} can be kept: its rows in {run_dir.journals} are gone")
                yield self._add_files(paths), last
            elif run_dir.outputs(EXACT_FORMAT).name not in run_dir.changed_files(last, digests):
                yield self._add_files([run_dir.outputs(EXACT_FORMAT)]), last
            else:
                self.lines.append(f"no row of {run_dir.outputs(EXACT_FORMAT)} can be kept: it was edited or removed")
        for job in run_dir.unfinished():
            if job.folder != self._skip and self._computes_alike(run_dir, job.manifest):
                yield self._add_files(segments(job.folder)), job.manifest

    def _add_files(self, paths: Iterable[Path]) -> int:
        before = len(self._rows)
        try:
            for path in paths:
                self._rows.add(path)
        except StorageError as error:
            raise UsageError(f"earlier results cannot be read: {error}") from None
        return len(self._rows) - before

    def _computes_alike(self, run_dir: RunDir, earlier: Manifest) -> bool:
        now, was = self._manifest, earlier.numerics
        if now.numerics is None and was is not None:  # the model is not loaded: a device of "auto" may be the earlier
            at_auto = replace(was, dtype=self._config.auto_dtype(is_cpu=was.device == "cpu"))
            now = now.with_numerics(at_auto.in_job({}, now.job))
        changes = differences(_facts(earlier), _facts(now))
        if changes:
            self.lines.append(f"no row of {run_dir.path} can be kept: {'; '.join(changes)}")
        return not changes

    def _tell_changes(self, run_dir: RunDir, earlier: Manifest, added: Sequence[object]) -> None:
        if not added:
            return
        others = differences({"": earlier.output_keys}, {"": self._manifest.output_keys})
        if others:
            self.lines.append(f"since {run_dir.path} the job has changed: {'; '.join(others)}")


def rendered_at(spec: JobSpec) -> datetime | None:
    """The latest time that the runs named by ``output.reuse`` printed in chat templates; None without such runs.

    A new folder that reuses rows prints the same time, since its prompts would differ on another day. Raises as
    ``earlier_runs``.
    """
    times = [earlier.rendered_at for _, earlier in earlier_runs(spec)]
    return max(filter(None, times), key=datetime.timestamp, default=None)


def earlier_runs(spec: JobSpec) -> list[tuple[RunDir, Manifest]]:
    """The runs that ``output.reuse`` names, except the job's own run directory, which scripts may list too.

    Raises UsageError for a folder without a run or with files of two jobs, LockedError for one in use.
    """
    runs: list[tuple[RunDir, Manifest]] = []
    for folder in dict.fromkeys(spec.output.reuse):
        run_dir = RunDir(Path(folder))
        if is_own(spec, folder):
            continue
        if holder := run_dir.holder():
            raise LockedError(f"output.reuse: {folder} is in use by {holder}; run this job once that has ended")
        last, begun = run_dir.read_manifest(), run_dir.unfinished()
        if last is None and not begun:
            raise UsageError(f"output.reuse: {folder} is not a run directory: it has no job.json")
        if last is not None and is_between(run_dir, last, Digests(last.file_states)):
            raise UsageError(f"output.reuse: {folder} is between two jobs: run its job again first")
        runs.append((run_dir, last or begun[-1].manifest))
    return runs


def is_between(run_dir: RunDir, last: Manifest, digests: Digests) -> bool:
    """Whether another job has begun to replace the outputs of the last finished one."""
    is_begun = any(job.has_all_rows for job in run_dir.unfinished())
    return is_begun and bool(run_dir.changed_files(last, digests))


def refuse_own_rows(spec: JobSpec) -> None:
    """Raises UsageError if the run directory to be overwritten is also named in ``output.reuse``."""
    for folder in spec.output.reuse:
        if is_own(spec, folder):
            raise UsageError(
                f"--overwrite would drop the rows of {folder} before --reuse can take them, since it is the output "
                f"folder itself: leave out --overwrite, and give --update to keep what cannot differ"
            )


def is_own(spec: JobSpec, folder: str) -> bool:
    """Whether ``folder``, however it is written, is the job's own run directory."""
    named, own = Path(folder), Path(spec.output.path)
    if named.resolve() == own.resolve():
        return True
    with suppress(OSError):  # one of them is not there
        return named.samefile(own)
    return False


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Values of a job that must be equal for any of its rows to have the same result."""
    keys = {name: value for name, value in manifest.output_keys.items() if name.startswith("embed.")}
    keys["output.parse"] = [part for part in manifest.output_keys.get("output.parse", ()) if part == "reasoning"]
    numerics = replace(manifest.numerics or Numerics(), llguidance="")  # is in the fingerprints of rows that it masks
    keys["record version"] = manifest.version
    same = {name: manifest.fingerprints.get(name, {}) for name in ("model", "code")}
    return {"": keys, **same, "numerics": numerics.plain}

"""The job that the first argument of a command and its flags name: a job file, a run directory, or data.

``run`` and ``plan`` share it, so that a plan is about the same job as the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.core.addresses import bare, masked, scheme_of
from batchgen.core.errors import UsageError
from batchgen.core.storage import absolute
from batchgen.core.units import WHOLE, Shard, shown

if TYPE_CHECKING:
    from batchgen.config.job import JobSpec

_PATTERN_SIGNS = frozenset("*?[")
_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".txt", ".text", ".parquet", ".xlsx", ".xls")


def load_spec(
    job: str | None,
    flags: dict[str, dict[str, Any]],
    shard: Shard | None,
    needs: Sequence[str] | None = None,
    *,
    writes: bool = True,
) -> tuple[JobSpec, Shard]:
    """The job from a file, from a run directory, or from flags alone; and the shard to run.

    The argument may also be data, as for ``--input``; if the command ``writes``, the output path is then ``runs/NAME``
    by default. Flags override the job's keys. Raises UsageError.
    """
    from batchgen.config.load import PLACES, load_job

    if job is not None and _is_data(job):
        if "path" in flags.get("input", {}):
            raise UsageError(f"{shown(masked(job))} and --input are both the input: give one of them")
        flags = {**flags, "input": {**flags.get("input", {}), "path": [job]}}
        if writes and "path" not in flags.get("output", {}):
            flags["output"] = {"path": _folder_for(job), **flags.get("output", {})}
        job = None
    if job is None or not is_run_folder(job):
        return load_job(Path(job) if job else None, flags, needs=needs or PLACES), shard or WHOLE
    from batchgen.output.rundir import RunDir

    run_dir = RunDir(absolute(Path(job)))
    begun = run_dir.last_manifest()
    begun.spec(run_dir.manifest)  # keys of another version are refused before flags are added
    return load_job(None, flags, needs=needs or PLACES, begun=begun.job), shard or begun.shard


def is_run_folder(job: str | None) -> bool:
    """Whether an argument is a folder with a job, finished or begun; others are folders of data."""
    return bool(job) and any(Path(str(job), name).exists() for name in ("job.json", "journal"))


def _is_data(job: str) -> bool:
    """Whether an argument is an input by its form: an address, a pattern, a folder of data, or a suffix of data."""
    if job == "-" or job.startswith("hf:") or scheme_of(job) or not _PATTERN_SIGNS.isdisjoint(job):
        return True
    if Path(job).is_dir():
        return not is_run_folder(job)
    suffixes = {suffix.lower() for suffix in Path(job).suffixes}
    return ".toml" not in suffixes and not suffixes.isdisjoint(_DATA_SUFFIXES)


def _folder_for(data: str) -> str:
    """The folder for the outputs of ``data``. Raises UsageError if it holds outputs of other data that still exist."""
    folder = str(Path("runs") / _name_of(data))
    if not is_run_folder(folder):
        return folder
    from batchgen.config.settings import RawSettings
    from batchgen.output.rundir import RunDir

    (own,) = RawSettings({"input": {"path": [data]}}).parsed("input", "path")
    others: Sequence[str] = ()
    with suppress(UsageError):  # the run says what is wrong with the folder
        others = RunDir(absolute(Path(folder))).last_manifest().job["input"]["path"]
    for other in others:
        is_named = other == "-" or other.startswith("hf:") or scheme_of(other) or not _PATTERN_SIGNS.isdisjoint(other)
        if (is_named or Path(other).exists()) and _without_query(other) != _without_query(own):
            raise UsageError(f"{folder} has the outputs of {shown(other)}: give --output, another folder or this one")
    return folder


def _without_query(data: str) -> str:
    """A URL without its query, which may be a signature that differs each time."""
    return bare(data) if scheme_of(data) else data


def _name_of(data: str) -> str:
    """A name for the folder of the outputs: the last part of a path or address, up to its first dot."""
    last = bare(data).rstrip("/").rpartition("/")[2].removeprefix("hf:")
    return re.sub(r"[^\w-]+", "_", last.partition(".")[0]).strip("_-") or ("stdin" if data == "-" else "outputs")

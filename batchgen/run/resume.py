"""Going on with a run that was begun: a job that would give other rows is refused, a finished run is opened again.

It is opened where its input has grown: the rows that came behind join its outputs. Meanwhile these stay as they were,
and ``job.json`` has no number of rows: that marks the run as unfinished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchgen.config.job import JobSpec
from batchgen.core.errors import ResumeMismatch, UsageError
from batchgen.input.ids import may_have_ids
from batchgen.output.manifest import Manifest, compare
from batchgen.output.rundir import RunDir


def continued(
    run_dir: RunDir, spec: JobSpec, begun: Manifest, now: Manifest, *, is_complete: bool
) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest of this job as that of the run that was begun, and what changed that changes no row.

    Raises ResumeMismatch if the outputs would differ from this job's.
    """
    if is_complete:
        _refuse_other_form(run_dir, spec, begun)
    numerics = begun.fingerprints.get("numerics")
    if numerics is not None:
        now = replace(now, fingerprints={**now.fingerprints, "numerics": _expected(numerics, spec)})
    found = compare(begun, now)
    refused = (*found.refused, *_other_ids(spec, begun))
    if refused:
        is_of_files = any(line.startswith("input.files[") for line in refused)
        raise ResumeMismatch(
            f"{run_dir.path} was begun with another job; what changes its outputs:\n"
            + "".join(f"  {line}\n" for line in refused)
            + is_of_files * "  (an input may gain files, and the last of its text files lines at its end)\n"
            + "put back what changed, or run with --overwrite to start anew, or choose another output.path"
        )
    num_kept = begun.num_kept if run_dir.has_outputs() else 0  # outputs that were taken away keep no row
    return replace(
        now, created_at=begun.created_at, num_rows=begun.num_rows, num_kept=num_kept
    ), () if is_complete else found.allowed


def _expected(numerics: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """The numerics of a run with what the job names; its "auto" is known, and compared, once the weights are loaded."""
    named = {"dtype": spec.model.dtype, "device": spec.model.device.partition(":")[0]}
    if spec.engine.kv_dtype != numerics.get("dtype"):  # the dtype itself is what "auto" comes to
        named["kv_dtype"] = spec.engine.kv_dtype
    others = {name: value for name, value in numerics.items() if name != "kv_dtype"}  # there only if not "auto"
    return others | {name: value for name, value in named.items() if value != "auto"}


def _refuse_other_form(run_dir: RunDir, spec: JobSpec, begun: Manifest) -> None:
    """Raises ResumeMismatch: the journal of a finished run is gone, so its outputs cannot be written again."""
    for key in ("format", "order"):
        was, now = begun.job["output"][key], getattr(spec.output, key)
        if was != now:
            raise ResumeMismatch(
                f"{run_dir.path} is finished with output.{key} = {was!r}, and now {now!r} is asked for; "
                "--overwrite runs it anew"
            )


def _other_ids(spec: JobSpec, begun: Manifest) -> tuple[str, ...]:
    """The change of output format, if it decides which of the rows' ids are equal."""
    was, now = begun.job["output"]["format"], spec.output
    if not may_have_ids(spec.input) or replace(now, format=was).has_text_ids == now.has_text_ids:
        return ()
    return (f'output.format: was "{was}", now "{now.format}" (only openai-batch has 5 and "5" for one id)',)


def reopen(run_dir: RunDir, manifest: Manifest, num_kept: int) -> Manifest:
    """Mark a finished run, whose journal is gone, as unfinished; the outputs keep ``num_kept`` rows.

    Raises UsageError while a retry is under way.
    """
    if run_dir.retry.is_dir():
        what = f"{run_dir.path} has a retry that was interrupted, and its input has grown"
        raise UsageError(f"{what}: batchgen retry {run_dir.path}, then run the job again")
    manifest = replace(manifest, num_rows=None, num_kept=num_kept)
    run_dir.write_manifest(manifest)
    return manifest

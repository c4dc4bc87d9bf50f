"""Shards of one job become one run; anything that would lose or repeat a row is refused by shard and row."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import records
from run_helpers import files, read_lines, write_lines

from batchgen.cli.main import call
from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.core.errors import BatchgenError, LockedError, StorageError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor, SamplingParams
from batchgen.core.units import WHOLE, Shard
from batchgen.output.finalize import finalize
from batchgen.output.journal import Counts, Journal, JournalEntry
from batchgen.output.manifest import Manifest
from batchgen.output.rundir import RunDir
from batchgen.run import merge as merge_module
from batchgen.run.merge import merge

NUM_ROWS = 11
BAD = (4, 5, 9)


def job(path: Path, output_format: str = "jsonl", *, logprobs_dtype: str = "float32", **where: Any) -> JobSpec:
    output = OutputSpec(str(path), output_format, logprobs_dtype=logprobs_dtype)
    return JobSpec(ModelSpec("m"), InputSpec(("in",), **where), output)


def record(index: int) -> dict[str, Any]:
    kept = {"kept": index if index % 2 else str(index)}  # shard 1 of 2 keeps texts, shard 2 numbers
    return records.record(index, id=index, text="t", **kept)


def run(
    spec: JobSpec, shard: Shard = WHOLE, num_rows: int = NUM_ROWS, numerics: Mapping[str, str] | None = None
) -> Path:
    """A finished run directory of one shard, its rows finished in descending order."""
    run_dir = RunDir(Path(spec.output.path))
    run_dir.create()
    fingerprints = {"input": {"size": 7}, "numerics": dict(numerics or {"dtype": "float32", "device": "cpu"})}
    begun = run_dir.begin(Manifest(spec.to_dict(), spec.output_keys(), fingerprints, shard))
    journal = Journal.open(begun.folder, shard)
    for index in reversed(shard.rows(num_rows)):
        after = Cursor(0, 0, 0, index + 1)
        letter = encode_json(records.dead_letter(index, id=index)) if index in BAD else None
        journal.append(
            JournalEntry(index, after, "error" if letter else "result", letter or encode_json(record(index)))
        )
    begun = finalize(run_dir, begun, spec, journal, num_rows=num_rows)
    journal.close()
    run_dir.finish(begun, Digests(), keeps_rows=spec.output.format != "jsonl")
    return run_dir.path


def shards(folder: Path, count: int = 2, **options: Any) -> list[Path]:
    return [run(job(folder / f"shard-{number}", **options), Shard(number, count)) for number in range(1, count + 1)]


@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai-batch"])
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_merged_shards_are_the_bytes_of_the_unsharded_run(tmp_path: Path, output_format: str, count: int) -> None:
    whole = RunDir(run(job(tmp_path / "whole", output_format)))
    merged = RunDir(tmp_path / "merged")
    counts, _ = merge(shards(tmp_path, count, output_format=output_format), merged.path)
    assert counts == Counts(NUM_ROWS - len(BAD), len(BAD))
    assert merged.outputs(output_format).read_bytes() == whole.outputs(output_format).read_bytes()
    assert merged.errors.read_bytes() == whole.errors.read_bytes()


def test_a_merged_run_is_a_whole_run_whatever_the_order_of_the_arguments(tmp_path: Path) -> None:
    folders = shards(tmp_path, 3)
    merge(folders, tmp_path / "merged")
    manifest = RunDir(tmp_path / "merged").read_manifest()
    assert manifest is not None
    assert (manifest.shard, manifest.num_rows) == (WHOLE, NUM_ROWS)
    assert manifest.job["output"]["path"] == str(tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {"errors.jsonl", "job.json", "outputs.jsonl"}
    merge(folders[::-1], tmp_path / "b")
    assert (tmp_path / "merged" / "outputs.jsonl").read_bytes() == (tmp_path / "b" / "outputs.jsonl").read_bytes()


def test_parquet_columns_that_differ_between_shards_are_brought_together(tmp_path: Path) -> None:
    folders = shards(tmp_path, output_format="parquet")
    types = [str(pq.read_schema(folder / "outputs.parquet").field("kept").type) for folder in folders]
    merge(folders, tmp_path / "merged")
    merged = pq.read_table(tmp_path / "merged" / "outputs.parquet")
    assert types == ["string", "int64"]
    assert merged.column("kept").to_pylist() == ['"0"', "1", '"2"', "3", '"6"', "7", '"8"', '"10"']


def test_the_kernels_of_all_shards_are_compared_unless_they_may_be_mixed(tmp_path: Path) -> None:
    made = shards(tmp_path, 3)
    for folder, kernels in zip(made, ("avx512-bf16", "avx512-bf16", "avx2"), strict=True):
        manifest = RunDir(folder).read_manifest()
        numerics = {"dtype": "float32", "device": "cpu", "kernels": kernels}
        RunDir(folder).write_manifest(replace(manifest, fingerprints={**manifest.fingerprints, "numerics": numerics}))
    said = r"shard 3/3 \(.*\) cannot be joined: the kernels avx2 .* kernels avx512-bf16.*--allow-mixed-kernels"
    with pytest.raises(UsageError, match=said):
        merge(made, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    assert call(["merge", *map(str, made), "-o", str(tmp_path / "whole"), "--allow-mixed-kernels"]) == 3


def test_shards_whose_files_were_looked_at_at_other_times_are_of_one_job(tmp_path: Path) -> None:
    folders = shards(tmp_path)
    run_dir = RunDir(folders[0])
    states = {"in": {"sha256": "0", "state": [1, 2, 3, 4, 5]}}
    run_dir.write_manifest(replace(run_dir.read_manifest(), file_states=states))
    merge(folders, tmp_path / "whole")
    assert "in" not in RunDir(tmp_path / "whole").read_manifest().file_states


def beside(folder: Path, spec: JobSpec, shard: Shard = Shard(2, 2), **options: Any) -> list[Path]:  # noqa: B008
    """Shard 1 of 2, and another run."""
    return [run(job(folder / "a"), Shard(1, 2)), run(spec, shard, **options)]


def unfinished(folder: Path) -> list[Path]:
    """One shard is not finished."""
    first, other = shards(folder)
    manifest = RunDir(other).read_manifest()
    assert manifest is not None
    shutil.rmtree(other)
    RunDir(other).begin(replace(manifest, files={}, journal="", num_rows=None))
    return [first, other]


def edited(folder: Path, name: str) -> list[Path]:
    """A file of one shard was edited by hand."""
    folders = shards(folder)
    with (folders[1] / name).open("a") as file:
        file.write("\n")
    return folders


REFUSED: dict[str, Callable[[Path], list[Path]]] = {
    "nothing to merge": lambda _: [],
    "shard 2/4, 4/4 is missing": lambda folder: shards(folder, 4)[::2],
    r"shard 2/2 \(.*shard-2\) is given twice": lambda folder: [*shards(folder), folder / "shard-2"],
    r'job: input\.prompt: was \(not set\), now "{y}"': lambda folder: beside(folder, job(folder / "b", prompt="{y}")),
    r'not of one job: numerics\.dtype: was "float32", now "bfloat16"': lambda folder: beside(
        folder, job(folder / "b"), numerics={"dtype": "bfloat16", "device": "cpu"}
    ),
    "shards: was 2, now 3": lambda folder: beside(folder, job(folder / "b"), Shard(2, 3)),
    "input rows: was 11, now 13": lambda folder: beside(folder, job(folder / "b"), num_rows=13),
    r'of one job: output\.format: was "jsonl", now "parquet"$': lambda folder: [
        run(replace(job(folder / name, name), sampling=SamplingParams(logprobs=1)), Shard(number, 2))
        for number, name in enumerate(("jsonl", "parquet"), 1)
    ],
    r'output\.logprobs_dtype: was "float32", now "float16"$': lambda folder: beside(
        folder, job(folder / "b", logprobs_dtype="float16")
    ),
    r"other is not a run directory: it has no job\.json": lambda folder: [folder / "other"],
    "shard-2 is not finished": unfinished,
    r"outputs\.jsonl in .*shard-2 is not as its run wrote it: restore it, or run its shard with --overwrite$": (
        lambda folder: edited(folder, "outputs.jsonl")
    ),
    r"errors\.jsonl in .*shard-2 is not as its run wrote it": lambda folder: edited(folder, "errors.jsonl"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_folders_that_are_not_all_shards_of_one_job_are_refused(tmp_path: Path, words: str) -> None:
    folders = REFUSED[words](tmp_path)
    with pytest.raises(UsageError, match=words):
        merge(folders, tmp_path / "merged")


def test_a_shard_in_use_is_named(tmp_path: Path) -> None:
    folders = shards(tmp_path)
    with RunDir(folders[0]).lock(), pytest.raises(LockedError, match="shard-1 is in use by process"):
        merge(folders, tmp_path / "merged")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", [".", "inside", "inside/deeper"])
def test_a_shard_is_never_merged_into(tmp_path: Path, where: str, count: int) -> None:
    folders = shards(tmp_path, count)
    (tmp_path / "link").symlink_to(folders[-1])
    before = files(tmp_path)
    for target in (folders[-1] / where, tmp_path / "link" / where, folders[-1] / ".." / folders[-1].name / where):
        with pytest.raises(UsageError, match=r"(is|lies in) shard ./. .*, which holds a run already"):
            merge(folders, target)
    assert files(tmp_path) == before
    assert not (folders[-1] / "inside").exists()


def test_a_merge_that_is_done_is_done_though_moved(tmp_path: Path) -> None:
    folders = shards(tmp_path)
    merge(folders, tmp_path / "merged")
    before = files(tmp_path)
    assert merge(folders[::-1], tmp_path / "merged").counts is None
    assert files(tmp_path) == before
    (tmp_path / "merged").rename(tmp_path / "moved")
    assert merge(folders, tmp_path / "moved").counts is None


@pytest.mark.parametrize("is_other", [True, False], ids=["another job", "another record version"])
def test_another_merge_into_the_same_folder_is_refused(tmp_path: Path, is_other: bool) -> None:
    folders = shards(tmp_path)
    merge(folders, tmp_path / "merged")
    if is_other:
        (tmp_path / "other").mkdir()
        folders = shards(tmp_path / "other", prompt="{x}")
        for folder in folders:
            manifest = RunDir(folder).read_manifest()
            RunDir(folder).write_manifest(replace(manifest, created_at="2026-01-02T03:04:05+00:00"))
    else:
        path = tmp_path / "merged" / "job.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": 1}))
    before = files(tmp_path)
    with pytest.raises(UsageError, match="merged holds a run already; merge into a new folder"):
        merge(folders, tmp_path / "merged")
    assert files(tmp_path) == before


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_shards_that_have_changed_since_are_merged_again_in_place(
    tmp_path: Path, output_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = shards(tmp_path, output_format=output_format)
    merge(folders, tmp_path / "merged")
    monkeypatch.setitem(globals(), "BAD", (5, 9))  # row 4 has a result by now
    shutil.rmtree(folders[0])
    run(job(folders[0], output_format), Shard(1, 2))
    assert merge(folders, tmp_path / "merged").counts == Counts(NUM_ROWS - 2, 2)
    assert [line["index"] for line in read_lines(tmp_path / "merged" / "errors.jsonl")] == [5, 9]
    assert merge(folders, tmp_path / "merged").counts is None


@pytest.mark.parametrize("is_removed", [True, False])
def test_records_of_a_table_whose_journal_was_lost_cannot_be_merged(tmp_path: Path, is_removed: bool) -> None:
    folders = shards(tmp_path, output_format="parquet")
    for segment in (folders[1] / "journal").glob("*/*.seg"):
        os.truncate(segment, segment.stat().st_size - 1)
    if is_removed:
        shutil.rmtree(folders[1] / "journal")
    words = r"in .*journal, which was removed" if is_removed else "is damaged: 4 of 5 rows .* or run with --update"
    with pytest.raises(BatchgenError, match=words):
        merge(folders, tmp_path / "merged" / "here")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("is_begun", [True, False])
def test_another_runs_folder_is_not_merged_over(tmp_path: Path, is_begun: bool) -> None:
    folders = shards(tmp_path)
    target = RunDir(tmp_path / "merged")
    manifest = RunDir(folders[0]).read_manifest()
    assert manifest is not None
    target.create()
    if is_begun:
        target.begin(replace(manifest, shard=WHOLE, files={}, journal=""))
    else:
        target.write_manifest(replace(manifest, shard=WHOLE))
    with pytest.raises(UsageError, match=f"holds a run already{', not finished' if is_begun else ''}"):
        merge(folders, target.path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 3, 7, 7], r"shard 2/2 \(.*\) holds row 7, which comes twice"),
        ([1, 3, 6, 7], r"shard 2/2 \(.*\) holds row 6, which comes twice"),
        ([1, 3, 5, 7], r"holds row 5, which comes twice"),  # as an error already
        ([1, 3, 7, 11], r"holds row 11, which comes twice or is not of the input"),
        ([1, 7], r"outputs.jsonl or errors.jsonl is not as its run wrote it: 4 lines with 4 of 5 rows"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, rows: list[int], message: str) -> None:
    """Their files are as they were written: only a fault of batchgen's own could do that."""
    folders = shards(tmp_path)
    write_lines(folders[1] / "outputs.jsonl", map(record, rows))
    run_dir = RunDir(folders[1])
    manifest = run_dir.read_manifest()
    assert manifest is not None
    known = Digests().fingerprint(folders[1] / "outputs.jsonl")
    del known["file"]
    run_dir.write_manifest(replace(manifest, files=manifest.files | {"outputs.jsonl": known}))
    with pytest.raises(BatchgenError, match=message):
        merge(folders, tmp_path / "merged")
    assert not RunDir(tmp_path / "merged").is_complete()


def test_a_merge_that_was_refused_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    folders = shards(tmp_path)
    good = (folders[1] / "outputs.jsonl").read_bytes()
    (folders[1] / "outputs.jsonl").write_text("")
    with pytest.raises(UsageError, match="is not as its run wrote it"):
        merge(folders, tmp_path / "new" / "merged")
    assert not (tmp_path / "new").exists()
    (folders[1] / "outputs.jsonl").write_bytes(good)
    assert merge(folders, tmp_path / "new" / "merged").counts == Counts(NUM_ROWS - len(BAD), len(BAD))


def test_a_disk_that_keeps_an_old_report_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.name == "report.json":
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    parts = shards(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=r"cannot remove .*report\.json"):
        patch.setattr(Path, "unlink", failing)
        merge(parts, tmp_path / "whole")
    assert merge(parts, tmp_path / "whole").counts.results == NUM_ROWS - len(BAD)


def test_a_merge_killed_behind_its_outputs_and_again_at_its_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs without a journal or a ``job.json`` would be those of another program."""
    folders, whole = shards(tmp_path), tmp_path / "whole"

    def killed(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    moments = [(merge_module, name) for name in ("finalize", "_write_report", "finalize", "_write_report")]
    for owner, name in [*moments, (RunDir, "begin"), (merge_module._Shard, "entries")]:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, killed)
            merge(folders, whole)
        assert RunDir(whole).unfinished() or name == "begin"
    assert merge(folders, whole).counts == Counts(NUM_ROWS - len(BAD), len(BAD))
    assert not (whole / "journal").exists()
    assert merge(folders, whole).counts is None

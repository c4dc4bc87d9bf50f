"""What a resume finds after the worst moments: ids to be read again, litter of a kill, numerics that were named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import JobMaker, Shell, files, journal_of, quiet, read_lines, rows_of, updating

from batchgen.cli.cat import cat
from batchgen.core import storage
from batchgen.core.errors import ExitCode, ModelError, ResumeMismatch, StorageError, UsageError
from batchgen.core.units import WHOLE, Shard
from batchgen.core.version import RESULTS, build
from batchgen.input.ids import UniqueIds
from batchgen.output.journal import Journal
from batchgen.output.manifest import RECORD_VERSION
from batchgen.plan.dry_run import make_plan
from batchgen.run.argument import load_spec
from batchgen.run.job import run_job
from batchgen.run.merge import merge


def interrupted(job: JobMaker, num_tokens: int = 400, shard: Shard = WHOLE) -> None:
    assert job.run(options=quiet(max_total_tokens=num_tokens, shard=shard)).exit_code == 75


def codes(job: JobMaker) -> list[tuple[int, str]]:
    return [(letter["index"], letter["code"]) for letter in job.errors()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- ids


def failing(*args: object, **kwargs: object) -> None:
    raise StorageError("killed here")


def test_ids_of_other_shards_are_learnt_again_over_a_kill(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(1200)
    job.write([*rows, *(rows[1] for _ in range(40))])  # row 1 is the other shard's, rows 1200, 1202, ... are ours
    interrupted(job, 500, shard=Shard(1, 2))
    with closing(Journal.read(journal_of(job.output), Shard(1, 2))) as journal:
        assert journal.done.first_gap > 2
    claim = UniqueIds.claim
    with monkeypatch.context() as patch:
        patch.setattr(UniqueIds, "claim", lambda ids, claims: (claim(ids, claims[:0]), failing()))
        with pytest.raises(StorageError):
            job.run(options=quiet(shard=(1, 2)))
    job.run(options=quiet(shard=(1, 2)))
    assert codes(job) == [(index, "duplicate_id") for index in range(1200, 1240, 2)]


# ---------------------------------------------------------------- litter


def test_what_a_kill_leaves_of_a_journal_goes_with_the_next_run(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", lambda *args, **kwargs: None)
        job.run()
    assert [path.suffix for path in (job.output / "journal").iterdir()] == [".removed"]
    (job.output / "journal" / "0007-0123abcd").mkdir()  # killed before its job.json
    (job.output / ".outputs.parquet.tmp").write_bytes(b"half written")
    assert "already done" in job.run().lines[0]
    assert names(job.output) == {"outputs.jsonl", "report.json", "job.json"}


# ---------------------------------------------------------------- numerics


def test_the_advice_on_other_numerics_names_the_flags_that_go_on(job: JobMaker) -> None:
    job.write(rows_of(60))
    interrupted(job)
    said = "here: float32 on stub gives other tokens than bfloat16 on stub; continue with --dtype bfloat16; --update"
    with pytest.raises(ResumeMismatch, match=said) as caught:
        job.run(numerics={"dtype": "float32", "device": "stub"})
    assert "\n" not in str(caught.value)


BFLOAT16 = {"dtype": "bfloat16", "device": "stub"}


def test_another_type_of_keys_is_refused_before_the_weights_are_loaded_unless_auto_is_the_same(job: JobMaker) -> None:
    job.write(rows_of(60))
    job.run(options=quiet(max_total_tokens=1), numerics=BFLOAT16)
    with pytest.raises(ResumeMismatch, match=r'numerics\.kv_cache_dtype: was \(not there\), now "int8"'):
        job.run(job.spec(engine={"kv_cache_dtype": "int8"}))
    assert job.engines == []
    spec = job.spec(engine={"kv_cache_dtype": "bfloat16"})
    assert job.run(spec, numerics=BFLOAT16).exit_code == ExitCode.OK


def test_a_run_goes_on_on_another_device_of_the_same_kind(job: JobMaker) -> None:
    job.write(rows_of(5))
    for number, code in enumerate((ExitCode.STOPPED, ExitCode.OK)):
        spec, options = job.spec(model={"device": f"cuda:{number}"}), quiet(max_total_tokens=None if number else 1)
        assert job.run(spec, options, numerics={"dtype": "bfloat16", "device": "cuda"}).exit_code == code


def test_cuda_without_a_gpu_is_one_line_and_leaves_no_trace(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job.write(rows_of(1))
    with pytest.raises(ModelError, match="this torch sees no CUDA device; use --device cpu") as caught:
        run_job(job.spec(model={"device": "cuda"}), quiet())
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not job.output.exists()


# ---------------------------------------------------------------- the input


def rows_in(job: JobMaker) -> list[Any]:
    return [row["id"] for row in job.outputs()]


@pytest.mark.parametrize("pattern", [slow("*.jsonl"), "**/*.jsonl", slow("*")])
def test_a_run_in_the_folder_of_its_inputs_does_not_take_its_own_files_for_them(job: JobMaker, pattern: str) -> None:
    job.output.mkdir()
    job.input = job.output / "questions.jsonl"
    job.write([*rows_of(60), "{"])
    spec = job.spec(input={"path": [str(job.output / pattern)], "format": "jsonl"})
    assert job.run(spec, quiet(max_total_tokens=300)).exit_code == 75
    assert job.run(spec).exit_code == 3
    assert rows_in(job) == [f"q-{i}" for i in range(60)]
    assert "already done" in job.run(spec).lines[0]
    assert make_plan(spec)["rows"] == {"total": 61, "good": 0, "bad": 1, "reused": 60}
    assert job.run(spec, quiet(overwrite=True)).exit_code == 3
    assert rows_in(job) == [f"q-{i}" for i in range(60)]


def test_a_folder_of_parquet_files_may_take_the_outputs_too(job: JobMaker) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    job.output.mkdir()
    pq.write_table(pa.Table.from_pylist(rows_of(5)), job.output / "questions.parquet")
    spec = job.spec(input={"path": [str(job.output)]}, output={"format": "parquet"})
    assert job.run(spec).exit_code == 0
    assert "already done" in job.run(spec).lines[0]
    assert len(job.outputs()) == 5


OF_0_1 = """
advice bound_by compared computed_tokens copied_tokens created_at device_hours_per_million_output_tokens
device_hours_per_million_prompt_tokens device_s duplicates empty_fields engine errors finish_reasons finished_at
generate_s histograms input latency_s machine max_rss_bytes model numerics occupancy preemptions prefix_cache
recomputed_tokens rows seconds series sessions shard sizes slowest tail_s threads tokens tokens_per_s version versions
wall_s
"""  # what each report of version 0.1.0 has


def of_an_earlier_version(output: Path) -> None:
    """Make a folder one that an earlier version wrote: other keys, and a progress.json of another kind."""
    if (report := output / "report.json").exists():
        content = json.loads(report.read_bytes())
        report.write_text(json.dumps({name: content[name] for name in OF_0_1.split()} | {"gone": 1}))
    for path in (*output.glob("job.json"), *output.glob("journal/*/job.json")):
        content = json.loads(path.read_bytes())
        del content["batchgen"], content["num_good"]
        path.write_text(json.dumps(content | {"version": RECORD_VERSION - 1, "gone": 1}))
    if (progress := output / "progress.json").exists():
        progress.write_text(json.dumps(json.loads(progress.read_bytes()) | {"digest": "other"}))


@pytest.mark.parametrize("is_done", [True, False])
def test_a_folder_of_an_earlier_version_is_refused_as_it_is_and_update_computes_all_rows(
    job: JobMaker, is_done: bool
) -> None:
    job.write(rows_of(60))
    job.run() if is_done else interrupted(job)
    of_an_earlier_version(job.output)
    before = files(job.output)
    said = rf"record version: was {RECORD_VERSION - 1}, now {RECORD_VERSION}\n.*--update computes all rows again"
    with pytest.raises(ResumeMismatch, match=said):
        job.run()
    with pytest.raises(UsageError, match="run its shard"):
        merge([job.output], job.folder / "merged")
    assert files(job.output) == before
    assert job.run(options=updating(max_total_tokens=200)).exit_code == 75
    assert job.run().exit_code == 0, "an update that was interrupted goes on without --update"
    records = read_lines(job.output / "outputs.jsonl")
    assert len(records) == 60 and not any("reused" in record["timings"] for record in records)
    assert json.loads((job.output / "job.json").read_bytes())["batchgen"] == build()


def test_a_folder_of_an_earlier_version_is_still_read(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(6))
    job.run()
    of_an_earlier_version(job.output)
    out = "".join(shell(command, job.output).out for command in ("cat", "report", "status"))
    assert out.count('"finish_reason"') == 6 and "finished" in out


@pytest.mark.parametrize("results", [RESULTS, RESULTS - 1])
def test_a_run_with_a_key_of_another_version_is_refused_and_nothing_is_made(job: JobMaker, results: int) -> None:
    job.write(rows_of(3))
    job.run()
    path = job.output / "job.json"
    content = json.loads(path.read_bytes())
    content["job"]["input"]["gone"] = 1
    content["fingerprints"]["code"] = {"results": results}
    path.write_text(json.dumps(content))
    said = rf"^cannot read {re.escape(str(path))}: input\.gone: unknown key .*; was it edited\?$"
    if results != RESULTS:
        said = rf"^{re.escape(str(job.output))} was begun by another version of batchgen: .*input\.gone: unknown key"
    refused: list[Callable[[], object]] = [
        lambda: load_spec(str(job.output), {}, None),
        lambda: cat.callback(job.output, None, None),
        lambda: merge([job.output], job.folder / "merged"),
    ]
    for command in refused:
        with pytest.raises(UsageError, match=said):
            command()
    assert not (job.folder / "merged").exists()


def test_a_run_directory_of_the_version_before_is_named_and_can_be_overwritten(job: JobMaker) -> None:
    """Its segments lay in the journal folder itself, beside a ``job.json`` for outputs that were still to come."""
    job.write(rows_of(60))
    interrupted(job)
    folder = journal_of(job.output)
    for path in folder.iterdir():
        path.rename(job.output / ("job.json" if path.suffix == ".json" else f"journal/{path.name}"))
    folder.rmdir()
    path = job.output / "job.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": 5}))
    with pytest.raises(UsageError, match=r"begun by another version of batchgen.*\n  record version: was 5, now"):
        job.run()
    assert [*(job.output / "journal").glob("*.seg")]
    assert job.run(options=quiet(overwrite=True)).exit_code == 0
    assert names(job.output) == {"outputs.jsonl", "report.json", "job.json"}

"""``batchgen merge`` as scripts see it: exit codes, run again, and what status, report and run then say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, rows_of, updating, without_timings

from batchgen.cli.main import call
from batchgen.core.errors import StorageError
from batchgen.core.shard import WHOLE, Shard
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.run import merge as merge_module
from batchgen.run.invocation import RunOptions
from batchgen.run.status import read_status

FORMATS = ["jsonl", "parquet", "openai-batch"]


def run_shards(job: JobMaker, form: str = "jsonl", fails: frozenset[int] = frozenset({3, 4})) -> list[str]:
    """The folders of two shards of a job of 12 rows; beside them the whole job's run in ``reference``."""
    job.write(rows_of(12))
    for shard, name in ((WHOLE, "reference"), (Shard(1, 2), "part1"), (Shard(2, 2), "part2")):
        output = {"path": str(job.folder / name), "format": form}
        job.run(
            job.spec(output=output, eval={"expected": "answer"}), RunOptions(progress="quiet", shard=shard), fails=fails
        )
    return [str(job.folder / name) for name in ("part1", "part2")]


def merge(job: JobMaker, folders: list[str]) -> int:
    return call(["merge", *folders, "-o", str(job.output)])


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_bytes()))


@pytest.mark.parametrize("form", FORMATS)
def test_the_report_of_a_merged_run_counts_what_that_of_the_whole_run_counts(job: JobMaker, form: str) -> None:
    assert merge(job, run_shards(job, form)) == 3
    merged, whole = report_of(job.output), report_of(job.folder / "reference")
    for name in ("rows", "errors", "tokens", "finish_reasons", "accuracy", "shard", "input", "model"):
        assert merged[name] == whole[name], name
    assert merged["accuracy"]["total"] == 10
    assert all(merged["latency_s"][name]["p50"] is not None for name in ("queue_s", "ttft_s", "total_s"))
    assert len(merged["slowest"]) == 10


def test_status_of_a_merged_run_is_that_of_a_finished_one(job: JobMaker) -> None:
    merge(job, run_shards(job))
    found, whole = read_status(job.output), read_status(job.folder / "reference")
    assert (found["state"], found["rows"], found["tokens"]) == ("finished", whole["rows"], whole["tokens"])


@pytest.mark.parametrize(("fails", "code"), [(frozenset({3, 4}), 3), (frozenset[int](), 0)])
def test_a_finished_merge_says_so_and_exits_as_it_ended(
    job: JobMaker, capsys: pytest.CaptureFixture[str], fails: frozenset[int], code: int
) -> None:
    folders = run_shards(job, fails=fails)
    assert merge(job, folders) == code
    before = {path.name: path.read_bytes() for path in job.output.iterdir()}
    assert "already done" not in (said := capsys.readouterr().err)
    assert said.endswith(f"\nbatchgen: next: batchgen report {job.output}\n")
    assert merge(job, folders) == code
    assert "already done: 2 shards in" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in job.output.iterdir()} == before


def test_a_merge_killed_before_its_report_writes_it_next_time(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = run_shards(job)

    def failing(*args: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(merge_module, "write_report", failing)
        assert merge(job, folders) == 1
    assert not (job.output / "report.json").exists()
    assert merge(job, folders) == 3
    assert report_of(job.output)["rows"] == {"total": 12, "done": 10, "failed": 2}


@pytest.mark.parametrize("content", [None, "{", '{"version": 1}'])
def test_a_shard_without_a_report_to_be_read_leaves_the_whole_without_one(
    job: JobMaker, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    folders = run_shards(job)
    report = Path(folders[1]) / "report.json"
    report.unlink() if content is None else report.write_text(content)
    assert merge(job, folders) == 3
    assert "no report of the merged run: " in (said := capsys.readouterr().err)
    assert "part2" in said
    assert read_status(job.output)["rows"] == {"total": 12, "done": 10, "failed": 2, "left": 0}
    assert call(["report", str(job.output)]) == 2
    assert "its outputs are complete" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_a_merged_run_can_be_updated_and_is_no_merge_then(
    job: JobMaker, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    folders = run_shards(job, form)
    merge(job, folders)
    spec = job.spec(output={"format": form}, eval={"expected": "answer"})
    assert job.run(spec, updating()).exit_code == 0
    assert job.engines[0].num_started == 2
    assert len(without_timings(next(job.output.glob("outputs.*")))) == 12
    assert merge(job, folders) == 2
    assert "holds a run already that continued after the merge; merge into a new folder" in capsys.readouterr().err


def test_a_merged_run_is_one_that_run_finds_done(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    merge(job, run_shards(job))
    outcome = job.run(job.spec(eval={"expected": "answer"}))
    assert "already done" in outcome.lines[0]
    assert job.engines == []


# ---------------------------------------------------------------- what openai-batch outputs keep


def openai_run(job: JobMaker) -> list[dict[str, Any]]:
    job.write(rows_of(6))
    spec = job.spec(input={"columns": ["question"]}, output={"format": "openai-batch"}, eval={"expected": "answer"})
    job.run(spec, fails=frozenset({2}))
    return [json.loads(line) for line in (job.output / "outputs.jsonl").read_bytes().splitlines()]


def test_openai_rows_hold_timings_and_kept_columns_beside_the_response(job: JobMaker) -> None:
    row = openai_run(job)[0]
    assert list(row) == ["id", "custom_id", "response", "error", "timings", "kept_columns"]
    assert row["kept_columns"] == {"question": "What is 0 times 0?", "answer": "0"}
    assert row["timings"]["total_s"] >= row["timings"]["ttft_s"] >= 0


def test_an_update_of_openai_outputs_has_the_accuracy_of_all_rows(job: JobMaker) -> None:
    openai_run(job)
    spec = job.spec(input={"columns": ["question"]}, output={"format": "openai-batch"}, eval={"expected": "answer"})
    assert job.run(spec, updating()).exit_code == 0
    report = report_of(job.output)
    assert report["accuracy"]["total"] == 6
    assert report["reused"]["rows"] == 5


def test_a_row_ended_by_repetition_is_told_apart_from_others_in_openai_outputs() -> None:
    row = {"id": "a", "index": 3, "text": "x x", "finish_reason": "repetition", "timings": {"total_s": 1.0}}
    row |= {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "kept": [1]}
    for chat in (True, False):
        line = json.loads(OpenAIBatchFormat("m", chat).result_row(json.dumps(row).encode()))
        (choice,) = line["response"]["body"]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")

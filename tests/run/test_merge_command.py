"""``batchgen merge`` as scripts see it: exit codes, run again, and what status, report and run then say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, files, read_lines, rows_of, updating

from batchgen.cli.main import call
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.run.status import read_status

FORMATS = ["jsonl", "parquet", "openai-batch"]


def run_shards(job: JobMaker, form: str = "jsonl", fails: frozenset[int] = frozenset({3, 4})) -> list[Path]:
    """The folders of two shards of a job of 12 rows; beside them the whole job's run in ``reference``."""
    job.write(rows_of(12))
    spec = job.spec(output={"format": form}, eval={"expected": "answer"})
    job.elsewhere("reference", spec, fails=fails)
    return job.shards(spec, fails=fails)


def merge(job: JobMaker, folders: list[Path]) -> int:
    return call(["merge", *map(str, folders), "-o", str(job.output)])


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
    before = files(job.output)
    assert "already done" not in (said := capsys.readouterr().err)
    assert said.endswith(f"\nbatchgen: next: batchgen report {job.output}\n")
    assert merge(job, folders) == code
    assert "already done: 2 shards in" in capsys.readouterr().err
    assert files(job.output) == before


@pytest.mark.parametrize("content", [None, "{", '{"version": 1}'])
def test_a_shard_without_a_report_to_be_read_leaves_the_whole_without_one(
    job: JobMaker, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    folders = run_shards(job)
    report = folders[1] / "report.json"
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
    assert len(job.outputs()) == 12
    assert merge(job, folders) == 2
    assert "holds a run already that continued after the merge; merge into a new folder" in capsys.readouterr().err


def test_a_merged_run_is_one_that_run_finds_done(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    merge(job, run_shards(job))
    outcome = job.run(job.spec(eval={"expected": "answer"}))
    assert "already done" in outcome.lines[0]
    assert job.engines == []


# ---------------------------------------------------------------- what openai-batch outputs keep


def test_openai_rows_hold_what_an_update_needs_for_the_accuracy_of_all_rows(job: JobMaker) -> None:
    job.write(rows_of(6))
    spec = job.spec(input={"columns": ["question"]}, output={"format": "openai-batch"}, eval={"expected": "answer"})
    job.run(spec, fails=frozenset({2}))
    row = read_lines(job.output / "outputs.jsonl")[0]
    assert list(row) == ["id", "custom_id", "response", "error", "timings", "kept_columns"]
    assert row["kept_columns"] == {"question": "What is 0 times 0?", "answer": "0"}
    assert row["timings"]["total_s"] >= row["timings"]["ttft_s"] >= 0
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

"""Dead letters run again: those that now succeed join the outputs, the rest stays where it was."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, finish, quiet, read_lines, rows_of, start, without_timings
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode, LockedError, ResumeMismatch, StorageError, UsageError
from batchgen.core.shard import Shard
from batchgen.output.journal import Journal
from batchgen.output.rundir import RunDir
from batchgen.run import invocation
from batchgen.run.invocation import Outcome, RunOptions
from batchgen.run.retry import retry_job
from batchgen.run.stop import Limits

FORMATS = ["jsonl", "parquet", "openai-batch"]


def retried(job: JobMaker, *, flags: dict[str, Any] | None = None, **stub: Any) -> Outcome:
    job.engines = []
    options = RunOptions(progress="quiet")
    return retry_job(job.output, options, flags or {}, engine_factory=stub_factory(job.engines, **stub))


def outputs_of(folder: Path) -> list[dict[str, Any]]:
    return without_timings(next(folder.glob("outputs.*")))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_succeed_now_are_merged_in_order(job: JobMaker, tmp_path: Path, form: str) -> None:
    job.write(rows_of(30))
    job.run(job.spec(output={"path": str(tmp_path / "reference"), "format": form}))
    job.run(job.spec(output={"format": form}), fails=frozenset({0, 7, 29}))
    assert len(outputs_of(job.output)) == 27
    job.input.unlink()  # which is not needed
    outcome = retried(job)
    assert outcome.exit_code == 0
    assert job.engines[0].num_pulled == 3
    assert outputs_of(job.output) == outputs_of(tmp_path / "reference")
    assert not (job.output / "errors.jsonl").exists()


def test_rows_that_fail_again_stay_dead_letters(job: JobMaker) -> None:
    job.write([*rows_of(5), "{", {"id": "x"}])
    job.run(fails=frozenset({1, 3}))
    letters = job.errors()
    assert retried(job, fails=frozenset({3})).exit_code == 3
    assert [row["index"] for row in job.outputs()] == [0, 1, 2, 4]
    assert job.errors() == [letter for letter in letters if letter["index"] != 1]


def test_a_row_mended_by_hand_is_run_as_mended(job: JobMaker) -> None:
    job.write([*rows_of(2), {"id": "x", "qestion": "Why?"}])
    job.run()
    (letter,) = job.errors()
    letter["row"] = {"id": "x", "question": "Why?"}
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == 0
    assert [row["id"] for row in job.outputs()] == ["q-0", "q-1", "x"]


def test_a_duplicate_stays_one_until_it_gets_an_id_of_its_own(job: JobMaker) -> None:
    job.write(rows_of(2) + rows_of(1))
    job.run()
    assert retried(job).exit_code == 3
    (letter,) = job.errors()
    assert letter["code"] == "duplicate_id"
    letter["row"]["id"] = "q-new"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == 0
    assert [row["id"] for row in job.outputs()] == ["q-0", "q-1", "q-new"]


def test_engine_sizes_may_be_others(job: JobMaker) -> None:
    job.write([*rows_of(2), {"id": "long", "question": "Why? " * 40}])
    job.run(job.spec(engine={"max_model_len": 64}))
    assert [letter["code"] for letter in job.errors()] == ["too_long"]
    assert retried(job, flags={"engine": {"max_model_len": 512}}).exit_code == 0
    assert len(job.outputs()) == 3


def test_the_report_counts_the_mended_rows(job: JobMaker) -> None:
    job.write(rows_of(10))
    job.run(job.spec(output={"expected": "answer"}), fails=frozenset({1, 2}))
    report = retried(job, fails=frozenset({2})).report
    assert report is not None
    assert report["rows"] == {"total": 10, "done": 9, "failed": 1}
    assert report["errors"] == {"internal": 1}
    assert report["accuracy"]["total"] == 9
    assert report["sessions"] == 2
    tokens = sum(row["usage"]["completion_tokens"] for row in job.outputs())
    assert report["tokens"]["completion"] == tokens


def test_without_failed_rows_there_is_nothing_to_do(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run()
    outcome = retried(job)
    assert (outcome.exit_code, job.engines) == (0, [])
    assert "nothing to retry" in outcome.lines[0]


def test_a_run_that_is_not_finished_is_refused(job: JobMaker) -> None:
    job.write(rows_of(30))
    with pytest.raises(RuntimeError):
        job.run(crashes_at=5)
    with pytest.raises(UsageError, match="not finished"):
        retried(job)


def test_another_model_is_refused(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run(fails=frozenset({1}))
    manifest = json.loads((job.output / "job.json").read_bytes())
    manifest["fingerprints"]["model"]["model.safetensors"] = "other"
    (job.output / "job.json").write_text(json.dumps(manifest))
    with pytest.raises(ResumeMismatch, match="is not the model"):
        retried(job)


def test_a_killed_retry_resumes(job: JobMaker, tmp_path: Path) -> None:
    job.write(rows_of(80))
    job.run(job.spec(output={"path": str(tmp_path / "reference")}))
    job.run(fails=frozenset(range(60)))
    process = start(["retry", job.output], step_s=0.05)
    while not any((job.output / "retry").glob("*.*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    assert len(read_lines(job.output / "outputs.jsonl")) == 20
    assert finish(start(["retry", job.output]))[0] == 0
    assert job.outputs() == outputs_of(tmp_path / "reference")
    assert {path.name for path in job.output.iterdir()} == {"outputs.jsonl", "report.json", "job.json"}


def test_a_kill_before_the_report_is_made_good_by_a_retry(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(4))
    job.run(fails=frozenset({1}))

    def failing(*args: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(invocation, "write_report", failing)
        with pytest.raises(StorageError):
            retried(job)
    outcome = retried(job)
    assert outcome.report is not None
    assert outcome.report["rows"] == {"total": 4, "done": 4, "failed": 0}
    assert job.engines == []
    assert len(job.outputs()) == 4


def test_time_counts_once_where_a_kill_comes_behind_the_report(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(4))
    job.run(fails=frozenset({1}))

    def killed(_: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            retried(job)
    report = json.loads((job.output / "report.json").read_bytes())
    again = retried(job).report
    assert again is not None
    assert (report["sessions"], again["sessions"]) == (2, 3)
    assert again["engine"]["num_steps"] == report["engine"]["num_steps"]
    assert not (job.output / "retry").exists()


def test_the_command_says_what_it_did(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(3))
    job.run(fails=frozenset({1}))
    assert call(["retry", str(job.output)], engine_factory=stub_factory()) == 0
    assert "1 failed row fixed" in capsys.readouterr().err


def test_a_row_mended_while_half_done_goes_on_with_no_token_of_its_old_prompt(job: JobMaker, tmp_path: Path) -> None:
    mended = [{**row, "question": f"Mended: {row['question']}"} for row in rows_of(6)]
    job.write(mended)
    job.run(job.spec(output={"path": str(tmp_path / "reference")}))
    job.write(rows_of(6))
    job.run(fails=frozenset(range(6)))
    options = RunOptions(progress="quiet", limits=Limits(max_total_tokens=70))
    stopped = retry_job(job.output, options, {}, engine_factory=stub_factory())
    assert stopped.exit_code == 75
    letters = job.errors()
    for letter, row in zip(letters, mended, strict=True):
        letter["row"] = row
    (job.output / "errors.jsonl").write_text("".join(f"{json.dumps(letter)}\n" for letter in letters))
    journal = Journal.open(job.output / "retry")
    done, half_done = set(journal.done), set(journal.partials)
    journal.close()
    assert half_done
    assert retried(job).exit_code == 0
    expected = outputs_of(tmp_path / "reference")
    assert [row for row in job.outputs() if row["index"] not in done] == [r for r in expected if r["index"] not in done]


@pytest.mark.parametrize("killed_in", ["batchgen.run.retry.finalize_retry", "batchgen.output.finalize.commit_errors"])
@pytest.mark.parametrize("key", ["question", "id", "answer"])
def test_a_row_mended_again_after_a_kill_runs_as_it_was_mended_last(
    job: JobMaker, tmp_path: Path, key: str, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, kept = rows_of(8), {"input": {"keep_columns": ["answer"]}}
    job.write([row | {"question": ""} if row["id"] in ("q-3", "q-5") else row for row in rows])
    job.run(job.spec(**kept))
    letters, first = job.errors(), {**rows[3], "question": "What?"}
    for mended, is_killed in ((first, True), ({**first, key: "Why?"}, False)):
        letters[0]["row"], letters[1]["row"] = mended, rows[5]
        (job.output / "errors.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in letters))
        with monkeypatch.context() as patch:
            if is_killed:
                patch.setattr(killed_in, lambda *_: sys.exit("killed"))
                with pytest.raises(SystemExit):
                    retried(job)
            else:
                assert retried(job).exit_code == ExitCode.OK
    assert job.engines[0].num_started == 1
    job.write([*rows[:3], {**first, key: "Why?"}, *rows[4:]])
    job.run(job.spec(output={"path": str(tmp_path / "whole")}, **kept))
    assert job.outputs() == outputs_of(tmp_path / "whole")


def test_a_row_in_both_files_that_fails_as_mended_again_blocks_no_further_retry(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(6)
    job.write([row | {"question": ""} if row["id"] in ("q-1", "q-4") else row for row in rows])
    job.run()
    letters = job.errors()
    kills = ("batchgen.output.finalize.commit_errors", "batchgen.run.retry.finalize_retry", None)
    for mended, killed_in in zip((rows[1], {"id": "q-1"}, {"id": "q-1"}), kills, strict=True):
        letters[0]["row"], letters[1]["row"] = mended, rows[4]
        (job.output / "errors.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in letters))
        with monkeypatch.context() as patch:
            if killed_in is None:
                assert retried(job).exit_code == ExitCode.ROWS_FAILED
            else:
                patch.setattr(killed_in, lambda *_: sys.exit("killed"))
                with pytest.raises(SystemExit):
                    retried(job)
    assert [letter["index"] for letter in job.errors()] == [1]
    assert [record["id"] for record in job.outputs()] == ["q-0", "q-2", "q-3", "q-4", "q-5"]


def test_a_folder_in_use_is_named(job: JobMaker) -> None:
    job.write(rows_of(2))
    job.run(options=quiet(max_total_tokens=1))
    with RunDir(job.output).lock(), pytest.raises(LockedError, match="is in use by process"):
        retried(job)


def test_a_retry_that_runs_no_row_leaves_nothing(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(fails=frozenset({1}))
    outputs = job.output / "outputs.jsonl"
    content = outputs.read_bytes()
    outputs.write_bytes(content + b"{\n")
    with pytest.raises(StorageError):
        retried(job)
    assert not (job.output / "retry").exists()
    outputs.write_bytes(content)
    assert retried(job).exit_code == 0


def test_outputs_that_lack_what_a_report_counts_are_refused_before_a_retry_runs(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(fails=frozenset({1}))
    path = job.output / "outputs.jsonl"
    lines = read_lines(path)
    del lines[0]["usage"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before = path.read_bytes()
    with pytest.raises(StorageError, match="row 0 is not as it was written"):
        retried(job)
    assert (path.read_bytes(), job.engines) == (before, [])


@pytest.mark.parametrize("form", FORMATS)
def test_a_duplicate_of_another_shards_row_stays_failed(job: JobMaker, form: str) -> None:
    job.write([{"id": "a", "question": "one"}, {"id": "a", "question": "two"}])
    job.run(job.spec(output={"format": form}), RunOptions(progress="quiet", shard=Shard(2, 2)))
    letters = job.errors()
    assert retried(job).exit_code == 3
    assert job.errors() == letters


def test_a_duplicate_of_another_shards_row_is_run_with_an_id_of_its_own(job: JobMaker) -> None:
    job.write([{"id": "a", "question": "one"}, {"id": "a", "question": "two"}])
    job.run(options=RunOptions(progress="quiet", shard=Shard(2, 2)))
    (letter,) = job.errors()
    letter["row"]["id"] = "b"
    (job.output / "errors.jsonl").write_text(json.dumps(letter) + "\n")
    assert retried(job).exit_code == 0
    assert [row["id"] for row in job.outputs()] == ["b"]


def test_a_duplicate_that_failed_again_leaves_its_id_to_the_first_row_when_the_retry_goes_on(job: JobMaker) -> None:
    rows = [*rows_of(8), {**rows_of(8)[5], "question": "Twice?"}]
    job.write(rows)
    job.run(fails=frozenset(range(8)))
    options = RunOptions(progress="quiet", limits=Limits(max_total_tokens=1))
    assert retry_job(job.output, options, {}, engine_factory=stub_factory(max_num_seqs=1)).exit_code == 75
    journal = Journal.open(job.output / "retry")
    done = set(journal.done)
    journal.close()
    assert 8 in done
    assert 5 not in done
    assert retried(job).exit_code == 3
    assert [row["index"] for row in job.outputs()] == list(range(8))
    assert [(letter["index"], letter["code"]) for letter in job.errors()] == [(8, "duplicate_id")]

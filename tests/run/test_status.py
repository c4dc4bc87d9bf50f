"""What ``batchgen status`` says of a run in every state, from another process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from run_helpers import JobMaker, finish, quiet, rows_of, start, until_rows_are_done
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import BatchgenError, UsageError
from batchgen.run.invocation import RunOptions
from batchgen.run.retry import retry_job
from batchgen.run.status import read_status, render_status
from batchgen.run.stop import Limits


def test_a_running_run_is_seen_from_outside_and_not_disturbed(job: JobMaker) -> None:
    job.write(rows_of(40))
    process = start(["run", job.toml()], step_s=0.05)
    until_rows_are_done(process, job.output, 5)
    status = read_status(job.output)
    assert status["state"] == "running"
    assert status["holder"]["pid"] == process.pid
    assert status["rows"]["total"] == 40
    assert 0 < status["rows"]["done"] < 40
    assert status["tokens"]["completion"] > 0
    assert f"process {process.pid}" in render_status(status)
    assert finish(process)[0] == 0


def test_a_finished_run_shows_what_its_report_says(job: JobMaker) -> None:
    job.write([*rows_of(5), "{"])
    job.run()
    status = read_status(job.output)
    assert status["state"] == "finished"
    assert status["rows"] == {"total": 6, "done": 5, "failed": 1, "left": 0}
    assert "finished" in render_status(status).splitlines()[0]


def test_a_stopped_run_says_why_and_what_to_do(job: JobMaker) -> None:
    job.write(rows_of(60))
    job.run(options=quiet(max_total_tokens=200))
    status = read_status(job.output)
    assert status["state"] == "stopped"
    assert status["rows"]["done"] + status["rows"]["left"] == 60
    assert "max total tokens of 200" in render_status(status)
    assert "run again to resume" in render_status(status)


def test_a_killed_run_shows_what_its_journal_holds(job: JobMaker) -> None:
    job.write(rows_of(40))
    process = start(["run", job.toml()], step_s=0.05)
    until_rows_are_done(process, job.output, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status = read_status(job.output)
    assert (status["state"], status["holder"]) == ("interrupted", None)
    assert 0 < status["rows"]["done"] < 100


def test_a_crashed_run_is_failed(job: JobMaker) -> None:
    job.write(rows_of(60))
    with pytest.raises(RuntimeError):
        job.run(crashes_at=20)
    assert read_status(job.output)["state"] == "failed"


def test_a_run_stopped_before_its_first_row_says_so(job: JobMaker) -> None:
    job.write(rows_of(5))
    process = start(["run", job.toml(), "--max-runtime", "1s"], load_s=30)
    assert finish(process)[0] == 75
    said = render_status(read_status(job.output))
    assert "stopped (max runtime of 1.0 s); run again to resume" in said
    assert job.run().exit_code == 0


def test_a_run_that_an_error_ended_says_which(job: JobMaker) -> None:
    job.write(rows_of(600))
    with pytest.raises(BatchgenError):
        job.run(before_step=lambda step: job.write(rows_of(5)) if step == 3 else None)
    said = render_status(read_status(job.output)).splitlines()[0]
    assert "failed: " in said
    assert f"{job.input} has changed" in said
    assert "; run again to resume" not in said


def test_an_unfinished_retry_of_a_finished_run_is_told_of(job: JobMaker) -> None:
    job.write(rows_of(30))
    job.run(fails=frozenset(range(20)))
    options = RunOptions(progress="quiet", limits=Limits(max_total_tokens=70))
    assert retry_job(job.output, options, {}, engine_factory=stub_factory()).exit_code == 75
    said = render_status(read_status(job.output)).splitlines()[0]
    assert said.endswith(f": finished; a retry is unfinished: batchgen retry {job.output}")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        read_status(tmp_path)
    file = tmp_path / "questions.jsonl"
    file.touch()
    with pytest.raises(UsageError, match=r"questions\.jsonl is not a run directory"):
        read_status(file)


def test_json_is_what_a_script_reads(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(rows_of(3))
    job.run()
    assert call(["status", str(job.output), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status.keys() >= {"state", "rows", "tokens", "tokens_per_s", "eta_s", "holder", "updated_at"}

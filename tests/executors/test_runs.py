"""Jobs on workers: the run directory is that of one process, whatever happens to a worker."""

from __future__ import annotations

import json
import pickle
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, read_lines, rows_of, without_timings
from stub_engine import StubEngine, stub_factory
from thread_seats import ThreadCrew, ThreadSeat

from batchgen.core.errors import ExitCode
from batchgen.core.records import Cursor, Record
from batchgen.executors.backend import on_workers
from batchgen.executors.messages import Grant
from batchgen.executors.worker import Start
from batchgen.input.validator import Pending
from batchgen.output.journal import JournalEntry
from batchgen.output.rundir import RunDir
from batchgen.report.text import render_report
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import EngineFactory, load_engine
from batchgen.run.reports import read_report
from batchgen.run.results import Finished
from batchgen.run.status import read_status, render_status


@pytest.fixture
def jobs(tmp_path: Path) -> JobMaker:
    return JobMaker(tmp_path)


def workers(
    number: int, *, engine: EngineFactory | None = None, on_hire: Callable[[ThreadSeat], object] = lambda seat: None
) -> EngineFactory:
    """A pool of threads; their engines are stubs by default."""

    def make_crew(start: Start) -> ThreadCrew:
        made = Start(start.spec, start.begun_at, start.digests, engine or stub_factory(step_s=0.001))
        return ThreadCrew(made, number, on_hire)

    return on_workers(make_crew, patience_s=5.0)


def outputs(jobs: JobMaker, name: str, engine_factory: EngineFactory, **sections: Any) -> list[dict[str, Any]]:
    """The output records of a run into a folder of its own."""
    jobs.output = jobs.folder / name
    outcome = run_job(jobs.spec(**sections), quiet(), engine_factory=engine_factory)
    assert outcome.exit_code in (ExitCode.OK, ExitCode.ROWS_FAILED)
    return without_timings(jobs.output / "outputs.jsonl")


@pytest.mark.parametrize("number", [1, 3])
def test_workers_give_the_rows_of_one_process(jobs: JobMaker, number: int) -> None:
    jobs.write([*rows_of(100), {"id": "q-3", "question": "again"}, "{", {"id": "x", "question": ""}])
    spec = {"sampling": {"temperature": 0.8, "n": 2, "logprobs": 1}}
    alone = outputs(jobs, "alone", stub_factory(), **spec)
    assert outputs(jobs, "pool", workers(number), **spec) == alone
    assert read_lines(jobs.folder / "pool" / "errors.jsonl") == read_lines(jobs.folder / "alone" / "errors.jsonl")


def test_rows_of_a_lost_worker_go_to_others(jobs: JobMaker) -> None:
    jobs.write(rows_of(200))
    alone = outputs(jobs, "alone", stub_factory())
    seats: list[ThreadSeat] = []

    def on_hire(seat: ThreadSeat) -> None:
        seats.append(seat)
        if len(seats) == 1:
            send = seat.send
            seat.send = lambda grant: (send(grant), seat.kill())[0]  # type: ignore[method-assign]

    assert outputs(jobs, "pool", workers(2, on_hire=on_hire)) == alone
    assert seats[0].num_granted > 0
    assert len(seats) > 2, "the lost worker was replaced"


def test_the_models_own_engine_runs_in_workers(jobs: JobMaker) -> None:
    jobs.write(rows_of(12))
    alone = outputs(jobs, "alone", load_engine)
    assert outputs(jobs, "pool", workers(2, engine=load_engine)) == alone
    report = read_report(RunDir(jobs.output))
    counts, series = report["engine"], report["series"]
    assert sum(series["tokens"]) == counts["num_prefill_tokens"] + counts["num_decode_tokens"]
    assert sum(series["steps"]) == counts["num_steps"]
    assert sum(counts["phase_s"].values()) <= report["wall_s"]
    assert report["tail_s"] is not None


def test_the_report_tells_of_each_worker_and_adds_up_what_a_resumed_run_did(jobs: JobMaker) -> None:
    jobs.write(rows_of(100))
    spec = jobs.spec()
    slow = workers(2, engine=stub_factory(step_s=0.1))
    stopped = run_job(spec, quiet(max_total_tokens=300), engine_factory=slow)
    assert stopped.exit_code == ExitCode.STOPPED
    before = json.loads((jobs.output / "progress.json").read_text())["spent"]
    outcome = run_job(spec, quiet(), engine_factory=workers(2))
    assert outcome.report is not None
    report = read_report(RunDir(jobs.output))
    told = report["workers"]
    assert {worker["place"] for worker in told} == {platform.node()}
    assert {worker["name"] for worker in told} == {"thread-1", "thread-2"}
    assert sum(worker["rows"] for worker in told) == 100
    assert sum(worker["tokens"] for worker in told) == report["engine"]["num_output_tokens"]
    assert 0 < sum(worker["rows"] for worker in before["engine"]["workers"].values()) < 100
    assert all(0 <= worker["busy_share"] <= 1 and worker["worker_hours"] > 0 for worker in told)
    assert report["device_s"] > report["wall_s"]
    assert "2 on 1 machine" in render_report(report)


def test_machines_that_no_row_is_left_for_are_given_back(jobs: JobMaker) -> None:
    long = {"id": "long", "question": "What?", "sampling": {"max_tokens": 3000}}
    jobs.write([long, *rows_of(30)])
    alone = outputs(jobs, "alone", stub_factory())
    assert max(row["usage"]["completion_tokens"] for row in alone) > 300, "otherwise it is not long"
    engines: list[StubEngine] = []
    still_work: list[bool] = []

    def on_hire(seat: ThreadSeat) -> None:
        send = seat.send

        def sending(grant: Grant) -> None:
            if grant.stop:
                still_work.append(any(engine.has_work for engine in engines))
            send(grant)

        seat.send = sending  # type: ignore[method-assign]

    def make_crew(start: Start) -> ThreadCrew:
        crew = ThreadCrew(replace(start, engine_factory=stub_factory(engines, step_s=0.005)), 2, on_hire)
        crew.is_one_place = False
        return crew

    assert outputs(jobs, "pool", on_workers(make_crew)) == alone
    assert still_work == [True, False], "one worker was told to stop while the other had work, none took its place"


def test_a_running_pool_is_seen_from_outside(
    jobs: JobMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.run.progress._SAVE_EVERY_S", 0.0)
    jobs.write(rows_of(150))
    seen: list[dict[str, Any]] = []

    def look(seat: ThreadSeat) -> None:
        send = seat.send

        def sending(grant: Grant) -> None:
            send(grant)
            status = read_status(jobs.output)
            if len(status["workers"]) == 2 and not seen:
                seen.append(status)

        seat.send = sending  # type: ignore[method-assign]

    factory = workers(2, engine=stub_factory(step_s=0.03), on_hire=look)
    options = RunOptions(progress="json", heartbeat_s=0.0)
    assert run_job(jobs.spec(), options, engine_factory=factory).exit_code == ExitCode.OK
    assert {worker["name"] for worker in seen[0]["workers"]} == {"thread-1", "thread-2"}
    lines = [line for line in render_status(seen[0]).splitlines() if line.startswith("worker ")]
    assert len(lines) == 2
    assert all(" in flight, running" in line and platform.node() in line for line in lines)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert any(event.get("num_workers") == 2 for event in events)
    assert any(" joined" in event.get("message", "") for event in events)
    assert read_status(jobs.output)["workers"] == []


def test_rows_pass_between_processes_whole() -> None:
    cursor = Cursor(0, 800, 1, 2)
    row = Pending(Record(1, "f.jsonl", 2, {"question": "x"}, cursor), "q", output_token_ids=(4, 5))
    done = Finished(JournalEntry(1, cursor, "result", b"{}"), 3, 4)
    assert pickle.loads(pickle.dumps((row, done))) == (row, done)

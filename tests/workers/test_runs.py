"""Jobs on workers: the run directory is that of one process, whatever happens to a worker."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, journal_of, quiet, rows_of
from stub_engine import StubEngine, stub_factory
from thread_workers import ThreadLauncher, thread_workers

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode
from batchgen.core.records import Cursor, Row
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.rundir import RunDir
from batchgen.report.tables import render_report
from batchgen.run.invocation import RunOptions
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import ModelInfo, load_engine
from batchgen.run.reports import read_report
from batchgen.run.status import read_status, render_status
from batchgen.workers.driver import NoWorkers
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.messages import Assignment
from batchgen.workers.placement import on_workers
from batchgen.workers.worker import Start


def test_workers_give_the_typed_columns_of_one_process(job: JobMaker) -> None:
    job.write(rows_of(20))
    spec = job.spec(sampling={"max_tokens": 0, "prompt_logprobs": 3}, output={"format": "parquet"})
    assert job.elsewhere("dispatcher", spec, engine_factory=thread_workers(2)) == job.elsewhere("alone", spec)
    schemas = [pq.read_schema(job.folder / name / "outputs.parquet") for name in ("alone", "dispatcher")]
    assert schemas[0].equals(schemas[1])


class Hanging:
    """Stub engines of which the first ``number`` hang at their third step, or while they load, until ``release``."""

    def __init__(self, number: float, *, loading: bool = False) -> None:
        self.release = threading.Event()
        self._number = number
        self._is_loading = loading
        self._made = 0

    def __call__(self, spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        self._made += 1
        hangs = self._made <= self._number
        if hangs and self._is_loading:
            self.release.wait()
        return stub_factory(step_s=0.001, before_step=self._hang if hangs else None)(spec, model)

    def _hang(self, step: int) -> None:
        if step == 3:
            self.release.wait()


@pytest.fixture
def hanging() -> Iterator[Callable[..., Hanging]]:
    """Makes ``Hanging`` engines, and lets them go at the end."""
    made: list[Hanging] = []
    yield lambda *args, **options: made.append(Hanging(*args, **options)) or made[-1]
    for engine in made:
        engine.release.set()


def test_a_step_that_takes_longer_than_its_limit_is_no_hang_while_its_kernels_are_launched(job: JobMaker) -> None:
    made: list[StubEngine] = []
    job.write(rows_of(8))
    slow = stub_factory(
        made,
        before_step=lambda step: time.sleep(1.5) if step == 2 else None,
        num_launches=itertools.count().__next__,
    )
    job.run(engine_factory=thread_workers(1, engine=slow, step_timeout_s=0.6))
    assert job.outputs() == job.elsewhere("alone")
    assert len(made) == 1, "the worker was given up"


def test_where_all_workers_hang_the_run_stops_and_keeps_their_tokens(
    job: JobMaker, hanging: Callable[..., Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.workers.loop.PARTIALS_S", 0.0)
    job.write(rows_of(40))
    spec = job.spec(sampling={"max_tokens": 200, "min_tokens": 100})
    factory = thread_workers(2, engine=hanging(math.inf), step_timeout_s=0.3)
    said = r"no worker is left \(it has not finished a step in 0\.3 s \(--step-timeout\)\); run again"
    with pytest.raises(NoWorkers, match=said):
        job.run(spec, engine_factory=factory)
    assert not job.errors()
    journal = Journal.read(journal_of(job.output))
    journal.close()
    assert not journal.counts.errors, "rows are innocent of it"
    assert len(journal.partials) >= 4
    job.run(spec)
    assert job.outputs() == job.elsewhere("alone", spec)


def test_where_all_workers_hang_while_they_load_the_run_stops(
    job: JobMaker, hanging: Callable[..., Hanging], capfd: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(4))
    factory = thread_workers(2, engine=hanging(math.inf, loading=True), step_timeout_s=0.1, load_timeout_s=1.5)
    with pytest.raises(NoWorkers, match=r"it has not loaded the model in 1\.5 s \(--load-timeout\)\); run again"):
        job.run(options=RunOptions(), engine_factory=factory)
    said = " been loading the model for 0.1 s; the limit is 1.5 s (--load-timeout)\n"
    assert said in capfd.readouterr().err


def test_the_models_own_engine_runs_in_workers(job: JobMaker) -> None:
    job.write(rows_of(12))
    job.run(engine_factory=thread_workers(2, engine=load_engine))
    assert job.outputs() == job.elsewhere("alone", engine_factory=load_engine)
    report = read_report(RunDir(job.output))
    assert sum(report["engine"]["phase_s"].values()) <= report["wall_s"]
    assert (report["series"], report["tail_s"]) == ({}, None)


def test_the_report_tells_of_each_worker_and_adds_up_what_a_resumed_run_did(job: JobMaker) -> None:
    job.write(rows_of(100))
    slow = thread_workers(2, engine=stub_factory(step_s=0.1))
    assert job.run(options=quiet(max_total_tokens=300), engine_factory=slow).exit_code == ExitCode.STOPPED
    before = json.loads((job.output / "progress.json").read_text())["spent"]
    assert job.run(engine_factory=thread_workers(2)).report is not None
    report = read_report(RunDir(job.output))
    told = report["workers"]
    assert {worker["place"] for worker in told} == {platform.node()}
    assert {worker["name"] for worker in told} == {"thread-1", "thread-2"}
    assert sum(worker["rows"] for worker in told) == 100
    assert sum(worker["tokens"] for worker in told) == report["engine"]["num_output_tokens"]
    assert 0 < sum(worker["rows"] for worker in before["engine"]["workers"].values()) < 100
    assert all(0 <= worker["busy_share"] <= 1 and worker["worker_hours"] > 0 for worker in told)
    assert report["device_s"] > report["wall_s"]
    assert "2 on 1 machine" in render_report(report)


def test_machines_that_no_row_is_left_for_are_given_back(job: JobMaker) -> None:
    long = {"id": "long", "question": "Where?", "sampling": {"max_tokens": 3000, "min_tokens": 400}}
    job.write([long, *rows_of(30)])
    alone = job.elsewhere("alone")
    assert max(row["usage"]["completion_tokens"] for row in alone) > 300, "otherwise it is not long"
    engines: list[StubEngine] = []
    still_work: list[bool] = []

    def on_launch(handle: WorkerHandle) -> None:
        send = handle.send

        def sending(assignment: Assignment) -> None:
            if assignment.stop:
                still_work.append(any(engine.has_work for engine in engines))
            send(assignment)

        handle.send = sending  # type: ignore[method-assign]

    def make_launcher(start: Start) -> ThreadLauncher:
        launcher = ThreadLauncher(replace(start, engine_factory=stub_factory(engines, step_s=0.005)), 2, on_launch)
        launcher.is_local = False
        return launcher

    job.run(engine_factory=on_workers(make_launcher))
    assert job.outputs() == alone
    assert len(still_work) == 2, "none took the place of the one that was told to stop"
    assert still_work[0], "while the other had work"


def test_a_running_pool_is_seen_from_outside(
    job: JobMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.run.progress._SAVE_EVERY_S", 0.0)
    job.write(rows_of(150))
    seen: list[dict[str, Any]] = []

    def look(handle: WorkerHandle) -> None:
        send = handle.send

        def sending(assignment: Assignment) -> None:
            send(assignment)
            status = read_status(job.output)
            if len(status["workers"]) == 2 and not seen:
                seen.append(status)

        handle.send = sending  # type: ignore[method-assign]

    factory = thread_workers(2, engine=stub_factory(step_s=0.03), on_launch=look)
    options = RunOptions(progress="json", heartbeat_s=0.0)
    assert job.run(options=options, engine_factory=factory).exit_code == ExitCode.OK
    assert {worker["name"] for worker in seen[0]["workers"]} == {"thread-1", "thread-2"}
    lines = [line for line in render_status(seen[0]).splitlines() if line.startswith("worker ")]
    assert len(lines) == 2
    assert all(" in flight, running" in line and platform.node() in line for line in lines)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert any(event.get("num_workers") == 2 for event in events)
    assert any(" joined" in event.get("message", "") for event in events)
    assert read_status(job.output)["workers"] == []


def test_rows_pass_between_processes_whole() -> None:
    cursor = Cursor(0, 800, 1, 2)
    row = Row(1, "f.jsonl", 2, {"question": "x"}, cursor, "q", output_token_ids=(4, 5))
    done = JournalEntry(1, cursor, "result", b"{}", 3, 4)
    assert pickle.loads(pickle.dumps((row, done))) == (row, done)


# ---------------------------------------------------------------- chats generated again turn by turn


@pytest.fixture
def turns(job: JobMaker) -> JobSpec:
    """A job over sixty chats."""
    roles = ("user", "assistant")
    for_row = (
        [{"role": role, "content": f"{row}, {turn}"} for turn in range(1 + row % 5) for role in roles]
        for row in range(60)
    )
    job.write({"id": row, "chat": chat} for row, chat in enumerate(for_row))
    source = {"prompt": None, "messages": "chat", "regenerate": "assistant"}
    return job.spec(input=source, sampling={"max_tokens": 20})


def test_workers_give_the_chats_of_one_process(job: JobMaker, turns: JobSpec) -> None:
    assert job.elsewhere("workers", turns, engine_factory=thread_workers(3)) == job.elsewhere("alone", turns)


def test_chats_of_a_lost_worker_go_to_others(job: JobMaker, turns: JobSpec) -> None:
    handles: list[WorkerHandle] = []

    def on_launch(handle: WorkerHandle) -> None:
        handles.append(handle)
        if len(handles) == 1:
            send, sent = handle.send, list[object]()
            handle.send = lambda assignment: (  # type: ignore[method-assign]
                send(assignment),
                sent.append(assignment),
                len(sent) == 2 and handle.remote.kill(),
            )[0]

    factory = thread_workers(2, on_launch=on_launch, step_timeout_s=60.0)
    assert job.elsewhere("workers", turns, engine_factory=factory) == job.elsewhere("alone", turns)
    assert len(handles) > 2


def test_a_stopped_run_continues_with_and_without_workers(job: JobMaker, turns: JobSpec) -> None:
    assert job.run(turns, quiet(max_total_tokens=600)).exit_code == ExitCode.STOPPED
    slow = thread_workers(2, engine=stub_factory(step_s=0.1))
    assert job.run(turns, quiet(max_total_tokens=100), engine_factory=slow).exit_code == ExitCode.STOPPED
    assert job.run(turns, engine_factory=thread_workers(2)).exit_code == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone", turns)

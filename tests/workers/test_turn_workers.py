"""Chats generated again turn by turn on workers: those of one process, also if a worker is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, without_timings
from stub_engine import stub_factory
from thread_workers import ThreadLauncher

from batchgen.core.errors import ExitCode
from batchgen.run.job import run_job
from batchgen.run.loader import EngineFactory
from batchgen.workers.backend import on_workers
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.worker import Start


@pytest.fixture
def jobs(tmp_path: Path) -> JobMaker:
    made = JobMaker(tmp_path)
    turns = [
        [{"role": role, "content": f"{row}, {turn}"} for turn in range(1 + row % 5) for role in ("user", "assistant")]
        for row in range(60)
    ]
    made.write([{"id": row, "chat": chat} for row, chat in enumerate(turns)])
    return made


def workers(
    number: int, step_s: float = 0.001, on_launch: Callable[[WorkerHandle], object] = lambda handle: None
) -> EngineFactory:
    """Threads with stub engines."""

    def make_launcher(start: Start) -> ThreadLauncher:
        made = Start(start.spec, start.rendered_at, start.digests, stub_factory(step_s=step_s))
        return ThreadLauncher(made, number, on_launch)

    return on_workers(make_launcher, step_timeout_s=60.0)


def outputs(jobs: JobMaker, name: str, engine_factory: EngineFactory, code: int = 0, **limits: Any) -> Any:
    """The records of a run into a folder of its own; None where it was stopped."""
    jobs.output = jobs.folder / name
    source = {"prompt": None, "messages": "chat", "regenerate": "assistant"}
    spec = jobs.spec(input=source, sampling={"max_tokens": 20}, output={"path": str(jobs.output)})
    assert run_job(spec, quiet(**limits), engine_factory=engine_factory).exit_code == code
    return None if code else without_timings(jobs.output / "outputs.jsonl")


def test_workers_give_the_chats_of_one_process(jobs: JobMaker) -> None:
    assert outputs(jobs, "workers", workers(3)) == outputs(jobs, "alone", stub_factory())


def test_chats_of_a_lost_worker_go_to_others(jobs: JobMaker) -> None:
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

    assert outputs(jobs, "workers", workers(2, on_launch=on_launch)) == outputs(jobs, "alone", stub_factory())
    assert len(handles) > 2


def test_a_stopped_run_continues_with_and_without_workers(jobs: JobMaker) -> None:
    whole = outputs(jobs, "alone", stub_factory())
    outputs(jobs, "workers", stub_factory(), ExitCode.STOPPED, max_total_tokens=600)
    slow = workers(2, step_s=0.1)
    outputs(jobs, "workers", slow, ExitCode.STOPPED, max_total_tokens=100)
    assert outputs(jobs, "workers", workers(2)) == whole

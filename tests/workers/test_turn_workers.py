"""Chats generated again turn by turn on workers: those of one process, also if a worker is lost."""

from __future__ import annotations

import pytest
from run_helpers import JobMaker, quiet
from stub_engine import stub_factory
from thread_workers import thread_workers

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode
from batchgen.workers.handle import WorkerHandle


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

"""The driver's loop between a dispatcher and its launcher, with handles that are played."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from batchgen.core.errors import OutOfMemory
from batchgen.core.records import Request, Result
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.driver import NoWorkers, WorkersEngine
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.messages import Identity, WorkerLost, WorkerReady, WorkerUpdate
from batchgen.workers.worker_state import Liveness

HELLO = WorkerReady(Identity({}, {}, ""), max_num_seqs=1000, threads=1)


class PlayedWorker:
    """Answers each task at once. A mute one is ready and takes rows, and that is the last that is heard of it."""

    def __init__(self, *first: WorkerReady | WorkerLost, is_mute: bool = False) -> None:
        self.is_killed = False
        self._told = deque(first)
        self._is_mute = is_mute

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        if self._told:
            future.set_result(self._told.popleft())
        elif method == "exchange" and not self._is_mute:
            keys = [task.key for assignment in arguments[0] for task in assignment.tasks]
            stopped = any(assignment.stop for assignment in arguments[0])
            future.set_result(WorkerUpdate(tuple(Result(key, 1) for key in keys), stopped=stopped))
        return future

    def kill(self) -> None:
        self.is_killed = True


class PlayedLauncher(WorkerLauncher):
    """Starts the workers that it is given; ``waits`` has timeouts, and whether rows were then in flight."""

    def __init__(self, workers: list[PlayedWorker], dispatcher: RowDispatcher, num_wanted: tuple[int, int]) -> None:
        super().__init__(num_wanted)
        self.waits: list[tuple[float, bool]] = []
        self._workers = workers
        self._dispatcher = dispatcher

    def has_room(self) -> bool:
        return bool(self._workers)

    def place(self) -> tuple[PlayedWorker, Future[str]]:
        placed = Future[str]()
        placed.set_result("")
        return self._workers.pop(0), placed

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        return handle.remote.call("begin")

    def wait(self, timeout_s: float) -> None:
        self.waits.append((timeout_s, any(worker.tasks for worker in self._dispatcher.workers.values())))
        super().wait(0.0)


def engine_of(
    *workers: PlayedWorker, num_wanted: int = 1, least: int = 1, **timeouts: float
) -> tuple[WorkersEngine, PlayedLauncher]:
    dispatcher = RowDispatcher()
    launcher = PlayedLauncher(list(workers), dispatcher, (least, num_wanted))
    engine = WorkersEngine(launcher, dispatcher, Liveness(**timeouts), lambda hello: "")
    engine.begin()
    return engine, launcher


def tasks(count: int) -> list[Request]:
    return [Request(key, (key,)) for key in range(count)]


def test_windows_are_filled_without_a_wait() -> None:
    """Rows are read in small parts, so that a long part delays no worker; a wait after each would starve them."""
    engine, launcher = engine_of(PlayedWorker(HELLO))
    launcher.waits.clear()
    assert sorted(answer.key for answer in engine.run(tasks(5000))) == list(range(5000))
    while_reading = launcher.waits[: 5000 // 256]
    assert {timeout_s for timeout_s, _ in while_reading} == {0.0}
    assert all(in_flight for _, in_flight in while_reading)


def test_a_run_waits_for_its_fewest_workers_as_long_as_one_may_load_and_then_stops() -> None:
    engine, _ = engine_of(PlayedWorker(HELLO, is_mute=True), num_wanted=3, least=2, load_timeout_s=0.05)
    with pytest.raises(NoWorkers, match=r"^1 worker left of at least 2; run again to resume, or with fewer --workers$"):
        [*engine.run(tasks(50_000))]
    both = PlayedWorker(HELLO), PlayedWorker(HELLO)
    engine, _ = engine_of(*both, num_wanted=3, least=2, load_timeout_s=0.05)
    assert len([*engine.run(tasks(5000))]) == 5000


def test_where_fewer_workers_can_be_had_than_the_fewest_the_run_stops_at_once() -> None:
    short = PlayedWorker(HELLO, WorkerLost("no memory", OutOfMemory("no memory")))
    engine, _ = engine_of(PlayedWorker(HELLO, is_mute=True), short, num_wanted=2, least=2)
    with pytest.raises(NoWorkers, match=r"^1 worker left of at least 2 \(no memory\); run again"):
        [*engine.run(tasks(50_000))]


def test_a_worker_that_joins_while_the_run_ends_does_not_hold_it_up() -> None:
    first, late = PlayedWorker(HELLO), PlayedWorker()
    engine, launcher = engine_of(first, late, num_wanted=2)
    engine.stop()
    launcher.waits.clear()
    call, beginning = first.call, Future[Any]()
    launcher.begin = lambda handle: beginning  # type: ignore[method-assign]

    def call_and_join(method: str, *arguments: Any) -> Future[Any]:
        if not beginning.done():
            beginning.set_result(HELLO)
        return call(method, *arguments)

    first.call = call_and_join  # type: ignore[method-assign]
    assert not [*engine.run(tasks(3))]
    assert len(launcher.waits) < 4


def test_workers_lost_for_one_reason_before_they_are_ready_are_told_once() -> None:
    notes: list[str] = []
    workers = [PlayedWorker(WorkerLost("no memory", MemoryError("no memory"))) for _ in range(5)]
    dispatcher = RowDispatcher()
    launcher = PlayedLauncher(workers, dispatcher, (1, 5))
    engine = WorkersEngine(launcher, dispatcher, Liveness(), lambda hello: "", notes.append)
    with pytest.raises(MemoryError):
        engine.begin()
    assert notes == ["worker local-1 is lost: no memory; 0 left"]

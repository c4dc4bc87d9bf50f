"""Workers that are threads of the test's own process: all of a dispatcher but processes and sockets.

A worker can be made to die, to fall silent, or to be slow. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stub_engine import stub_factory

from batchgen.run.loader import EngineFactory
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.placement import on_workers
from batchgen.workers.slices import MachineSlice
from batchgen.workers.worker import Start, Worker


class ThreadWorker:
    """A ``Remote`` that is a thread; ``kill`` ends it as a signal would end a process: what it has not told is gone."""

    def __init__(self) -> None:
        self._caller = ThreadPoolExecutor(1)
        self._worker = Worker()
        self._told = Future[Any]()
        self._is_dead = False

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        self._told = told = Future[Any]()

        def run() -> None:
            found = getattr(self._worker, method)(*arguments)
            with suppress(InvalidStateError):  # it was killed
                told.set_result(found)

        if self._is_dead:
            told.set_exception(RuntimeError("killed"))
        else:
            self._caller.submit(run)
        return told

    def kill(self) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        with suppress(InvalidStateError):
            self._told.set_exception(RuntimeError("killed"))
        self._caller.submit(self._end_loop)
        self._caller.shutdown(wait=False)

    def _end_loop(self) -> None:
        self._worker._loop.close()  # an AttributeError where it has not begun


class ThreadLauncher(WorkerLauncher):
    """Starts threads; ``on_launch`` sees each handle that is made."""

    kind = "thread"

    def __init__(
        self, start: Start, num_workers: int, on_launch: Callable[[WorkerHandle], object] = lambda handle: None
    ) -> None:
        super().__init__((1, num_workers))
        self.start = start
        self._on_launch = on_launch

    @property
    def num_launched(self) -> int:
        return self._num_launched

    def launch(self) -> WorkerHandle | None:
        handle = super().launch()
        assert handle is not None
        self._on_launch(handle)
        return handle

    def has_room(self) -> bool:
        return True

    def place(self) -> tuple[ThreadWorker, Future[str]]:
        placed = Future[str]()
        placed.set_result("")
        return ThreadWorker(), placed

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        return handle.remote.call("begin", self.start, MachineSlice())


def thread_workers(
    number: int,
    *,
    engine: EngineFactory | None = None,
    on_launch: Callable[[WorkerHandle], object] = lambda handle: None,
    **timeouts: float,
) -> EngineFactory:
    """A dispatcher of threads; their engines are stubs by default."""

    def make_launcher(start: Start) -> ThreadLauncher:
        made = Start(start.spec, start.rendered_at, start.digests, engine or stub_factory(step_s=0.001))
        return ThreadLauncher(made, number, on_launch)

    return on_workers(make_launcher, **{"step_timeout_s": 5.0, **timeouts})

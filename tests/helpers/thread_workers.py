"""Workers that are threads of the test's own process: all of a dispatcher but processes and sockets.

A worker can be made to die, to fall silent, or to be slow. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from batchgen.workers.handle import WorkerHandle, WorkerLauncher
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

"""The driver's view of a worker, wherever it runs: a process with at most one call of its methods under way.

Nothing here blocks on a worker: its calls are futures, and so is its start.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any, Protocol

from batchgen.workers.messages import Assignment, WorkerEvent, WorkerLost, WorkerReady, WorkerUpdate


class Remote(Protocol):
    """A process that runs the methods of a ``Worker``, one at a time."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Future of the method's result; it raises, with the reason, if the process ended."""

    def kill(self) -> None:
        """End it at once, whatever it does; does not wait."""


class WorkerHandle:
    """One worker: it gets a place, loads the model, then takes assignments and returns events.

    No method blocks or raises. ``place`` is the id of its machine, "" if that does not matter, and None until it has
    one. ``loading_since`` is when it began to load, None before and afterwards.
    """

    def __init__(self, name: str, launcher: WorkerLauncher) -> None:
        self.name = name
        self.place: str | None = None
        self.loading_since: float | None = None
        self._launcher = launcher
        self._assignments: list[Assignment] = []
        self._is_ready = self._is_over = False
        self._call: Future[Any] | None = None
        self.remote = self._placed()

    def _placed(self) -> Remote:
        remote, call = self._launcher.place()
        self._wait_for(call)
        return remote

    def place_again(self) -> None:
        """Cancel the pending placement and request another."""
        self.remote.kill()
        self.remote = self._placed()

    def send(self, assignment: Assignment) -> None:
        """Pass an assignment on with the next call; ``poll`` reports if the worker is gone."""
        self._assignments.append(assignment)

    def exchange(self) -> None:
        """Send the pending assignments to a ready worker without a call under way."""
        if self._is_ready and self._call is None and not self._is_over:
            assignments, self._assignments = tuple(self._assignments), []
            self._wait_for(self.remote.call("exchange", assignments))

    def poll(self) -> list[WorkerEvent]:
        """The events since the last call: ready, then updates, and nothing after a loss."""
        if self._is_over:
            return []
        if self.place is None and (lost := self._launcher.no_place):
            return [self.give_up(lost)]
        if self._call is None or not self._call.done():
            return []
        event, self._call = self._result(self._call), None
        if isinstance(event, str):
            self.place, self.loading_since = event, time.monotonic()
            self._wait_for(self._launcher.begin(self))
            return []
        self.loading_since = None
        if isinstance(event, WorkerUpdate):
            self._launcher.note(self, event)
        elif isinstance(event, WorkerLost):
            self.give_up(event)
        self._is_ready |= isinstance(event, WorkerReady)
        return [event]

    def give_up(self, lost: WorkerLost) -> WorkerLost:
        """End a worker that is lost, hangs, or may not take part."""
        self.close()
        self._launcher.note(self, lost)
        return lost

    def close(self) -> None:
        """End the worker at once, whatever it does."""
        if not self._is_over:
            self._is_over = True
            self.remote.kill()
            self._launcher.handles.remove(self)

    def _wait_for(self, call: Future[Any]) -> None:
        self._call = call
        call.add_done_callback(lambda _: self._launcher.woken.set())

    def _result(self, call: Future[Any]) -> Any:
        try:
            return call.result()
        except Exception as error:  # the call did not end, whatever the reason
            return WorkerLost(self._launcher.reason_of(error))


class WorkerLauncher(ABC):
    """Starts workers of one kind and waits for them; ``num_wanted``: the fewest and the most that a run continues with.

    ``is_local`` workers are identical: if one cannot load, none can. ``woken`` is set when a call has ended.
    ``no_place`` says why workers will not get a place; None while they may.
    """

    kind = "local"  # prefix of the names
    is_local = True

    def __init__(self, num_wanted: tuple[int, int]) -> None:
        self.num_wanted = num_wanted
        self.woken = threading.Event()
        self.no_place: WorkerLost | None = None
        self.handles: list[WorkerHandle] = []
        self._num_launched = 0

    def launch(self) -> WorkerHandle | None:
        """Begin to start another worker; None if another cannot be started now."""
        if not self.has_room():
            return None
        self._num_launched += 1
        handle = WorkerHandle(f"{self.kind}-{self._num_launched}", self)
        self.handles.append(handle)
        return handle

    def wait(self, timeout_s: float) -> None:
        """Call all workers that are due, and return when one has answered, or after the timeout."""
        for handle in self.handles:
            handle.exchange()
        self.woken.wait(timeout_s)
        self.woken.clear()

    def close(self) -> None:
        """End all workers that are left."""
        for handle in list(self.handles):
            handle.close()

    @abstractmethod
    def has_room(self) -> bool:
        """Whether another worker can be started now."""

    @abstractmethod
    def place(self) -> tuple[Remote, Future[str]]:
        """A new process, and a future of its place."""

    @abstractmethod
    def begin(self, handle: WorkerHandle) -> Future[Any]:
        """Let a placed worker load the model; the future gives a ``WorkerReady`` or a ``WorkerLost``."""

    def reason_of(self, error: Exception) -> str:
        """Reason why a call gave no result, in a few words."""
        return str(error)

    def note(self, handle: WorkerHandle, event: WorkerUpdate | WorkerLost) -> None:  # noqa: B027 - one kind learns
        """Take note of a worker's event, such as its loss."""

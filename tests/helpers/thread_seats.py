"""Workers that are threads of the test's own process: all of a pool but processes and pipes.

A worker can be made to die, to fall silent, or to be slow. Not a test itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from batchgen.executors.messages import Event, Grant, Lost
from batchgen.executors.worker import Start, Worker


class ThreadSeat:
    """A worker in a thread; ``kill`` ends it as a signal would end a process: what it has not told is gone."""

    def __init__(self, name: str, start: Start) -> None:
        self.name = name
        self.is_silent = False
        self.num_granted = 0
        self._start = start
        self._grants: deque[Grant] = deque()
        self._events: deque[Event] = deque()
        self._is_dead = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, grant: Grant) -> None:
        self.num_granted += len(grant.tasks)
        self._grants.append(grant)

    def poll(self) -> list[Event]:
        if self.is_silent:
            return []
        events = list(self._events)
        for _ in events:
            self._events.popleft()
        return events

    def kill(self) -> None:
        self._is_dead = True
        self._events.append(Lost("killed"))

    def close(self) -> None:
        self._is_dead = True

    def _tell(self, event: Event) -> None:
        if not self._is_dead:
            self._events.append(event)

    def _work(self) -> None:
        try:
            worker = Worker(self._start)
        except Exception as error:
            self._tell(Lost(str(error), error))
            return
        self._tell(worker.hello)
        try:
            stopped = False
            while not (self._is_dead or stopped):
                while self._grants:
                    worker.put(self._grants.popleft())
                answers = worker.take(0.01)
                stopped = answers.stopped
                self._tell(answers)
        except Exception as error:
            self._tell(Lost(str(error)))
        finally:
            worker.close()


class ThreadCrew:
    """A crew of threads; ``on_hire`` sees each seat that is made."""

    def __init__(
        self, start: Start, num_workers: int, on_hire: Callable[[ThreadSeat], object] = lambda seat: None
    ) -> None:
        self.num_wanted = (1, num_workers)
        self.is_one_place = True
        self.seats: list[ThreadSeat] = []
        self._start = start
        self._on_hire = on_hire

    def hire(self) -> ThreadSeat:
        seat = ThreadSeat(f"thread-{len(self.seats) + 1}", self._start)
        self.seats.append(seat)
        self._on_hire(seat)
        return seat

    def wait(self, seats: Iterable[object], timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.005))

    def close(self) -> None:
        for seat in self.seats:
            seat.close()

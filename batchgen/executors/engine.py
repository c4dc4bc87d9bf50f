"""An engine that is many workers: to an invocation it is one like any other (``EngineLike``), which takes rows.

It carries messages between the pool, which decides who runs what, and the workers. The driver's one thread does it all;
a seat never makes it wait. How a worker is started and spoken to is the crew's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from batchgen.core.errors import BatchgenError, ExitCode, OutOfMemory, RowError, RowErrorCode, UsageError
from batchgen.core.records import Result
from batchgen.executors.messages import HEARTBEAT_S, Answer, Answers, Crew, Event, Grant, Hello, Lost, Seat, Task
from batchgen.executors.notes import WorkerNotes
from batchgen.executors.pool import Pool
from batchgen.executors.stats import PoolStats

_MOST_PULLED = 256  # tasks read from the input before workers are seen to again
_SETTLE_S = 6.0  # for the last answers of workers at a stop, of the 10 s that are promised
_CONVICTED = "the workers that ran this row died, each time; batchgen retry runs it again"
_MOST_FALSE_STARTS = 2  # in a row, of workers that did not say why
_MOST_IN_VAIN = 12  # workers lost in a row, or twice as many as there are, before any row was finished


class NoWorkers(BatchgenError):
    """No worker is left, and no other can be had; journalled rows stay, and the run resumes."""

    exit_code = ExitCode.STOPPED


class PoolEngine:
    """Runs tasks on the workers of a crew. ``begin`` is to be called before ``run``, ``close`` at the end.

    ``refuse`` says why a worker may not take part, or nothing; ``note`` shows a line to the user.
    """

    def __init__(
        self, crew: Crew, pool: Pool, refuse: Callable[[Hello], str], note: Callable[[str], object] = lambda line: None
    ) -> None:
        self.stats = PoolStats(pool.workers)
        self.facts: Mapping[str, Any] = {}
        self._crew = crew
        self._pool = pool
        self._refuse = refuse
        self._notes = WorkerNotes(note)
        self._seats: dict[str, Seat] = {}
        self._ready: dict[str, Hello] = {}
        self._num_given_up = 0  # of the workers wanted
        self._num_false_starts = self._num_in_vain = 0
        self._error: Exception | None = None
        self._stopping = False

    def begin(self) -> Hello:
        """Hire the workers; returns when the first is ready.

        Raises:
            BatchgenError: what a single process would have ended with, where no worker can load the model.
            NoWorkers: none could be started.
        """
        while not self._ready:
            self._hire()
            self._crew.wait(self._seats.values(), HEARTBEAT_S)
            for _ in self._listen():
                pass
        return next(iter(self._ready.values()))

    def run(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Answers in order of completion, one per task, unless ``stop`` is called. Raises NoWorkers."""
        source = iter(tasks)
        while not self._stopping and not self._pool.is_done:
            self._pull(source)
            self._hire()
            for name, grant in self._pool.grants().items():
                self._seats[name].send(grant)
            self._crew.wait(self._seats.values(), 0.0 if self._pool.room else HEARTBEAT_S)
            yield from self._listen()
            self._let_go()
            self._notes.flush(len(self._ready))
        yield from self._settle()

    def stop(self) -> None:
        """Make ``run`` return as soon as workers have told how far they are; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens generated so far for each unfinished task, by key."""
        return self._pool.unfinished()

    def close(self) -> None:
        """End all workers."""
        self._notes.flush(len(self._ready), is_end=True)
        self._crew.close()

    def _pull(self, source: Iterator[Task]) -> None:
        if wanted := min(self._pool.room, _MOST_PULLED):
            tasks = list(islice(source, wanted))
            self._pool.put(tasks)
            if len(tasks) < wanted:
                self._pool.end_of_source()

    def _hire(self) -> None:
        """Start as many workers as there are rows for. Raises what the last one ended with where none is left."""
        while (
            not (self._seats and self._pool.is_winding_up)
            and len(self._seats) < self._crew.num_wanted[1] - self._num_given_up
        ):
            seat = self._crew.hire()
            if seat is None:
                break
            self._seats[seat.name] = seat
        if not self._seats:
            raise self._error or NoWorkers("no worker is left and no other can be had; run again to resume")

    def _let_go(self) -> None:
        """Give back machines that no row is left for: others may want them."""
        if not self._crew.is_one_place:
            for name in self._pool.idle():
                self._pool.leave(name)

    def _listen(self) -> Iterator[Answer]:
        """Take in what workers tell; the answers of tasks that had none yet."""
        for name, seat in list(self._seats.items()):
            for event in seat.poll():
                yield from self._answers(name, event)
        for name in self._pool.silent():
            self._seats[name].close()
            yield from self._lose(name, Lost("it was silent for too long"))

    def _answers(self, name: str, event: Event) -> Iterator[Answer]:
        if name not in self._seats:  # it was let go by an event before this one
            return
        if isinstance(event, Hello):
            self._greet(name, event)
        elif isinstance(event, Answers):
            if event.stats is not None:
                self.stats.tell(name, event.stats)
            self.facts = event.facts or self.facts
            if event.finished:
                self._num_in_vain, self._error = 0, None
            yield from self._pool.heard(name, event)
            if event.stopped:
                del self._ready[name]
                self._seats.pop(name).close()
        else:
            yield from self._lose(name, event)

    def _greet(self, name: str, hello: Hello) -> None:
        if reason := self._refuse(hello):
            self._notes.refused(name, hello.place, reason)
            self._num_given_up += self._crew.is_one_place
            self._error = UsageError(f"no worker may take part: on {hello.place} {reason}")
            self._seats.pop(name).close()
            return
        self._num_false_starts = 0
        self._ready[name] = hello
        self._pool.join(name, hello.max_num_seqs)
        self.stats.greet(name, hello.place)
        self._notes.joined(name, hello.place)

    def _lose(self, name: str, lost: Lost) -> Iterator[Answer]:
        """Give the rows of a lost worker to others."""
        del self._seats[name]
        hello = self._ready.pop(name, None)
        if self._is_given_up(lost, was_ready=hello is not None):
            self._num_given_up += 1
            self._error = (
                lost.error or self._error or NoWorkers(f"no worker is left ({lost.reason}); run again to resume")
            )
        if not self._stopping:
            self._notes.lost(name, hello.place if hello else "", lost.reason)
        if isinstance(lost.error, OutOfMemory):
            self._pool.leave(name)  # no row is to blame
        for task in self._pool.lose(name):
            self._num_in_vain = 0
            yield Result(task.key, 0, error=RowError(RowErrorCode.INTERNAL, _CONVICTED))

    def _is_given_up(self, lost: Lost, *, was_ready: bool) -> bool:
        """Whether another worker in its place would end likewise; where memory is short, fewer may have enough."""
        if not was_ready:
            self._num_false_starts += 1
            if not self._crew.is_one_place:
                self._error = lost.error or self._error
                return False
            return lost.error is not None or self._num_false_starts > _MOST_FALSE_STARTS
        self._num_in_vain += 1
        is_in_vain = self._num_in_vain > max(_MOST_IN_VAIN, 2 * self._crew.num_wanted[1])
        return is_in_vain or isinstance(lost.error, OutOfMemory)

    def _settle(self) -> Iterator[Answer]:
        """End the workers' part: their last answers, the tokens of half-done rows, counts and facts."""
        told: set[str] = set()
        until = time.monotonic() + _SETTLE_S
        while self._ready and time.monotonic() < until:
            for name in self._ready.keys() - told:  # one may still be joining
                self._seats[name].send(Grant(stop=True))
            told |= self._ready.keys()
            self._crew.wait([self._seats[name] for name in self._ready], HEARTBEAT_S)
            yield from self._listen()

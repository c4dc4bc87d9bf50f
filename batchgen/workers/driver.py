"""An engine made of many workers; an invocation uses it like any other (``EngineLike``) that takes rows.

It carries messages between workers and dispatcher, in one thread; calls of a handle return at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from batchgen.core.errors import OutOfMemory, RowError, RowErrorCode, RunStopped, UsageError
from batchgen.core.records import Result, Row
from batchgen.core.units import counted, format_duration
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.messages import (
    HEARTBEAT_S,
    Answer,
    Assignment,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkerUpdate,
)
from batchgen.workers.stats import WorkersStats
from batchgen.workers.worker_state import Liveness

_MAX_PULLED = 256  # tasks read from the input before workers are seen to again
_SETTLE_S = 4.0  # for the last answers of workers at a stop, of the 10 s that are promised
_POISON = "the workers that ran this row died, each time; batchgen run --update runs it again"
_MAX_FALSE_STARTS = 2  # consecutive starts that failed without a reason
# No other worker is started after this many were lost in a row, without a finished row in between. A worker that hung
# has used up its time and counts twice. A run of many workers may lose twice as many as it has.
_MAX_IN_VAIN = 12


class NoWorkers(RunStopped):
    """No worker is left, and no other can be had; journalled rows stay, and the run resumes."""


class WorkersEngine:
    """Runs tasks on the workers of a launcher. Call ``begin`` before ``run``, and ``close`` at the end.

    ``refuse`` returns why a worker may not take part, or ""; ``note`` shows a line to the user.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        dispatcher: RowDispatcher,
        liveness: Liveness,
        refuse: Callable[[WorkerReady], str],
        note: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.stats = WorkersStats()
        self.facts: Mapping[str, Any] = {}
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._liveness = liveness
        self._refuse = refuse
        self._note = note
        self._handles: dict[str, WorkerHandle] = {}
        self._ready: dict[str, WorkerReady] = {}
        self._num_given_up = 0  # workers that will not be replaced
        self._num_false_starts = self._num_in_vain = 0
        self._error: Exception | None = None
        self._false_start = ""  # why the last worker was lost before it was ready
        self._stopping = False
        self._enough_at = 0.0  # when the wanted minimum of workers was last ready

    def begin(self) -> WorkerReady:
        """Launch the workers; returns when the first is ready.

        Raises the BatchgenError that a single process would raise if no worker can load the model, NoWorkers if none
        could be started.
        """
        while not self._ready:
            self._launch()
            self._launcher.wait(HEARTBEAT_S)
            for _ in self._listen():
                pass
        return next(iter(self._ready.values()))

    def run(self, tasks: Iterable[Row]) -> Iterator[Answer]:
        """Answers in order of completion, one per task, unless ``stop`` is called. Raises NoWorkers."""
        source = iter(tasks)
        self._enough_at = time.monotonic()
        while not self._stopping and not self._dispatcher.is_done:
            self._pull(source)
            self._launch()
            self._require_enough()
            for name, assignment in self._dispatcher.assignments().items():
                self._handles[name].send(assignment)
            self._launcher.wait(0.0 if self._dispatcher.room else HEARTBEAT_S)
            yield from self._listen()
            self._let_go()
        yield from self._settle()

    def stop(self) -> None:
        """Make ``run`` return as soon as workers have sent their partial tokens; safe to call from a signal handler."""
        self._stopping = True

    def unfinished(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens generated so far for each unfinished task, by key."""
        return self._dispatcher.unfinished()

    def close(self) -> None:
        self._launcher.close()

    def _pull(self, source: Iterator[Row]) -> None:
        for _ in range(min(self._dispatcher.room, _MAX_PULLED)):
            task = next(source, None)
            if task is None:
                self._dispatcher.end_of_source()
            if task is None or self._dispatcher.put(task):
                return

    def _launch(self) -> None:
        """Start as many workers as there are rows for. If none is left, raises the latest error or NoWorkers."""
        while not (self._handles and self._dispatcher.is_winding_up) and len(self._handles) < self._num_useful:
            handle = self._launcher.launch()
            if handle is None:
                break
            self._handles[handle.name] = handle
        if not self._handles:
            raise self._error or NoWorkers("all workers are lost and no new one can start; run again to resume")

    @property
    def _num_useful(self) -> int:
        """The most workers to run: fewer if some were given up, 0 if too many were lost since a row was finished."""
        max_workers = self._launcher.num_wanted[1]
        return 0 if self._num_in_vain > max(_MAX_IN_VAIN, 2 * max_workers) else max_workers - self._num_given_up

    def _require_enough(self) -> None:
        """Raises NoWorkers if fewer workers than wanted can start, or become ready within the time for loading."""
        min_workers = self._launcher.num_wanted[0]
        if len(self._ready) >= min_workers or self._dispatcher.is_winding_up:
            self._enough_at = time.monotonic()
        too_long = time.monotonic() - self._enough_at > self._liveness.load_timeout_s
        if min_workers > 1 and (too_long or self._num_useful < min_workers):
            why = f" ({self._error})" if self._error else ""
            raise NoWorkers(
                f"{counted(len(self._ready), 'worker')} left of at least {min_workers}{why}; run again to resume, or "
                "with fewer --workers"
            )

    def _let_go(self) -> None:
        """Give back machines for which no rows are left, so that others can use them."""
        if not self._launcher.is_local:
            for name in self._dispatcher.idle():
                self._dispatcher.drain(name)

    def _listen(self) -> Iterator[Answer]:
        """Take in events of workers; returns the answers of unanswered tasks."""
        for name, handle in list(self._handles.items()):
            for event in handle.poll():
                yield from self._answers(name, event)
        loading = {name: since for name, handle in self._handles.items() if (since := handle.loading_since) is not None}
        if late := self._liveness.late(loading):
            spent, limit = map(format_duration, (self._liveness.step_timeout_s, self._liveness.load_timeout_s))
            who = f"worker {late[0]} has" if len(late) == 1 else f"{counted(len(late), 'worker')} have"
            self._note(f"{who} been loading the model for {spent}; the limit is {limit} (--load-timeout)")
        for name, reason in self._liveness.unresponsive(self._dispatcher.workers.values(), loading).items():
            # A worker that cannot load here could not load in another place either.
            error = None if name in self._ready else NoWorkers(f"no worker is left ({reason}); run again to resume")
            yield from self._on_lost(name, self._handles[name].give_up(WorkerLost(reason, error)), has_hung=True)

    def _answers(self, name: str, event: WorkerEvent) -> Iterator[Answer]:
        if name not in self._handles:  # an earlier event has already released it
            return
        if isinstance(event, WorkerReady):
            self._on_ready(name, event)
        elif isinstance(event, WorkerUpdate):
            if event.stats is not None:
                self.stats.tell(name, event.stats)
            self.facts = event.facts or self.facts
            if event.finished:
                self._num_in_vain, self._error = 0, None
            yield from self._dispatcher.on_update(name, event)
            if event.stopped:
                del self._ready[name]
                self._handles.pop(name).close()
        else:
            yield from self._on_lost(name, event)

    def _on_ready(self, name: str, ready: WorkerReady) -> None:
        if reason := self._refuse(ready):
            self._note(f"worker {name} on {ready.place} is not used: {reason}")
            self._num_given_up += self._launcher.is_local
            self._error = UsageError(f"no worker can be used: on {ready.place} {reason}")
            self._handles.pop(name).give_up(WorkerLost(reason, self._error))
            return
        self._num_false_starts, self._false_start = 0, ""
        self._ready[name] = ready
        self._dispatcher.join(name, ready.max_num_seqs)
        self.stats.join(self._dispatcher.workers[name], ready.place)
        self._note(f"worker {name} on {ready.place} has joined")

    def _on_lost(self, name: str, lost: WorkerLost, *, has_hung: bool = False) -> Iterator[Answer]:
        del self._handles[name]
        ready = self._ready.pop(name, None)
        if ready:
            self._num_in_vain += 2 if has_hung else 1
        self._num_given_up += self._is_given_up(lost, was_ready=ready is not None)
        if self._num_useful < self._launcher.num_wanted[1]:
            unknown = NoWorkers(f"no worker is left ({lost.reason}); run again to resume")
            self._error = lost.error or self._error or unknown
        if not self._stopping and (ready is not None or lost.reason != self._false_start):  # said once
            self._false_start = "" if ready else lost.reason
            place = f" on {ready.place}" if ready else ""
            self._note(f"worker {name}{place} is lost: {lost.reason}; {len(self._ready):,} left")
        if isinstance(lost.error, OutOfMemory):
            self._dispatcher.drain(name)  # no row is to blame
        poison = self._dispatcher.on_lost(name)
        for task in poison:
            yield Result(task.key, 0, error=RowError(RowErrorCode.INTERNAL, _POISON))

    def _is_given_up(self, lost: WorkerLost, *, was_ready: bool) -> bool:
        """Whether a lost worker gets no replacement: if memory is short, it may suffice for fewer workers."""
        if was_ready:
            return isinstance(lost.error, OutOfMemory)
        self._num_false_starts += 1
        if not self._launcher.is_local:
            self._error = lost.error or self._error
            return False
        return lost.error is not None or self._num_false_starts > _MAX_FALSE_STARTS

    def _settle(self) -> Iterator[Answer]:
        """Collect the workers' last answers, the tokens of half-done rows, counts and facts."""
        stopped: set[str] = set()
        until = time.monotonic() + _SETTLE_S
        while self._ready and time.monotonic() < until:
            for name in self._ready.keys() - stopped:  # one may still be joining
                self._handles[name].send(Assignment(stop=True))
            stopped |= self._ready.keys()
            self._launcher.wait(HEARTBEAT_S)
            yield from self._listen()

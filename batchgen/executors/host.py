"""The host of a worker's engine: steps it in one thread, makes rows into requests in another, and talks to the driver.

Thus neither a message nor a tokenizer delays a step. Every kind of worker has one. It knows no process and no network:
its owner passes ``Grant``s in and carries ``Answers`` out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from batchgen.core.records import Request, Result
from batchgen.executors.messages import HEARTBEAT_S, Answer, Answers, Grant, Task
from batchgen.report.usage import thin

PARTIALS_S = 5.0  # between two reports of half-done rows: what a lost worker's rows have to generate again
STATS_S = 1.0
SERIES_S = 10.0  # the series of steps is large, even with so many points
_SERIES_POINTS = 250
_ROUND_S = 0.02  # least time between two answers: a message for each row would cost more than the row


class SteppedEngine(Protocol):
    """The methods of ``batchgen.engine.Engine`` that a host calls, all but ``stats`` in the thread that steps."""

    @property
    def stats(self) -> Any: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> Result | None: ...
    def step(self) -> list[Result]: ...
    def flush(self) -> list[Result]: ...
    def unfinished(self) -> Mapping[int, tuple[int, ...]]: ...
    def withdraw(self, keys: Collection[int]) -> Sequence[int]: ...


class TaskMaker(Protocol):
    """Makes requests of tasks, and answers of results."""

    def build(self, tasks: Sequence[Any]) -> Iterable[Request | Answer]:
        """One for each task, in order; an answer for one that cannot run."""

    def finish(self, result: Result) -> Answer:
        """The answer to the task that the result is of."""


class Host:
    """Runs tasks on an engine until ``close``, or until a grant says stop.

    ``put`` and ``take`` are called by one thread, the owner's. An error of the engine or of building a request is
    raised by the next ``take``; the host is of no more use then.
    """

    def __init__(self, engine: SteppedEngine, maker: TaskMaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._maker = maker
        self._clock = clock
        # Guards all below; notified when any of it has changed.
        self._changed = threading.Condition()
        self._inbox: list[Task] = []
        self._ready: list[Request] = []
        self._recalled: set[int] = set()
        self._results: list[Result] = []
        self._answers: list[Answer] = []
        self._returned: list[int] = []
        self._partials: Mapping[int, tuple[int, ...]] | None = None
        self._is_stopping = self._is_stopped = False
        self._error: BaseException | None = None
        self._idle_s = 0.0  # of the thread that steps
        # Of the owner's thread.
        self._took_at = self._told_stats_at = self._told_series_at = -SERIES_S
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"batchgen-{name}", daemon=True)
            for name, work in (("steps", self._steps), ("build", self._builds))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, grant: Grant) -> None:
        """Take in what the driver says."""
        with self._changed:
            self._inbox += grant.tasks
            self._recalled |= set(grant.recall)
            self._is_stopping |= grant.stop
            self._changed.notify_all()

    def take(self, timeout_s: float = HEARTBEAT_S) -> Answers:
        """What there is to tell, as soon as that is something, or after the timeout. Raises what the engine raised."""
        time.sleep(max(self._took_at + _ROUND_S - self._clock(), 0.0))
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            if self._error is not None:
                raise self._error
            results, self._results = self._results, []
            answers, self._answers = self._answers, []
            returned, self._returned = self._returned, []
            partials, self._partials = self._partials, None
            stopped = self._is_stopped
        self._took_at = self._clock()
        finished = (*answers, *map(self._maker.finish, results))
        return Answers(finished, partials, tuple(returned), self._stats(is_last=stopped), stopped=stopped)

    def close(self) -> None:
        """End the threads after the step and the row under way."""
        self.put(Grant(stop=True))
        for thread in self._threads:
            thread.join()

    def _has_news(self) -> bool:
        return bool(self._results or self._answers or self._returned or self._is_stopped or self._error)

    def _stats(self, *, is_last: bool) -> Mapping[str, Any] | None:
        """The engine's counts and the seconds without work, now and then; the series more seldom, its times as ages."""
        if not is_last and self._took_at - self._told_stats_at < STATS_S:
            return None
        self._told_stats_at = self._took_at
        stats: dict[str, Any] = {**self._engine.stats.to_dict(), "idle_s": self._idle_s}
        series = stats.pop("series", None)
        if series is not None and (is_last or self._took_at - self._told_series_at >= SERIES_S):
            self._told_series_at, now = self._took_at, time.monotonic()
            series = thin(series, _SERIES_POINTS)
            stats["series"] = {**series, "at": [now - at for at in series["at"]]}
        return stats

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error, self._is_stopping = error, True
                self._changed.notify_all()

    def _builds(self) -> None:
        """Make requests of the tasks that come in, one batch after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._is_stopping)
                if self._is_stopping:
                    return
                tasks, self._inbox = self._inbox, []
            for made in self._maker.build(tasks):
                with self._changed:
                    if isinstance(made, Request):
                        self._ready.append(made)
                    else:
                        self._answers.append(made)
                    self._changed.notify_all()

    def _steps(self) -> None:
        """Step the engine while it has work."""
        told_at = self._clock()
        engine = self._engine
        while True:
            with self._changed:
                if not engine.has_work:
                    idle_at = self._clock()
                    self._changed.wait_for(lambda: self._ready or self._recalled or self._is_stopping)
                    self._idle_s += self._clock() - idle_at
                if self._is_stopping:
                    break
                ready, self._ready = self._ready, []
                recalled, self._recalled = self._recalled, set()
            results = [answer for request in ready if (answer := engine.submit(request)) is not None]
            if recalled:
                self._return(recalled)
            results += engine.step() if engine.has_work else engine.flush()
            partials = None
            if self._clock() - told_at >= PARTIALS_S:
                told_at, partials = self._clock(), engine.unfinished()
            self._tell(results, partials)
        self._tell(engine.flush(), engine.unfinished())
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _return(self, keys: Collection[int]) -> None:
        """Give back those of the tasks that have not begun, wherever they are."""
        with self._changed:
            kept = [task for task in self._inbox if task.key not in keys]
            found = [task.key for task in self._inbox if task.key in keys]
            self._inbox = kept
            self._returned += found
            self._returned += self._engine.withdraw(keys)
            self._changed.notify_all()

    def _tell(self, results: Iterable[Result], partials: Mapping[int, tuple[int, ...]] | None) -> None:
        with self._changed:
            self._results += results
            self._partials = self._partials if partials is None else partials
            if self._results or partials is not None:
                self._changed.notify_all()

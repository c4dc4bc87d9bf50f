"""Loop around a worker's engine: steps it in one thread, and makes rows into requests in another.

Thus neither messages nor the tokenizer delay a step. ``Worker`` calls ``assign`` and ``collect``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchgen.core.chat_rows import ChatRow
from batchgen.core.records import Request, Result, Row
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import next_size
from batchgen.input.turns import TurnBuilder
from batchgen.output.journal import JournalEntry
from batchgen.output.record_builder import RecordBuilder
from batchgen.run.results import entry_of, failed_entry
from batchgen.workers.messages import HEARTBEAT_S, Answer, Assignment, WorkerUpdate

if TYPE_CHECKING:
    from batchgen.engine import Engine

PARTIALS_S = 5.0  # between two reports of half-done rows, which bounds the work lost with a worker
STATS_S = 1.0
_ROUND_S = 0.02  # least time between two answers: a message for each row would cost more than the row


class RowProcessor:
    """A worker's work on a row outside its engine: template, tokenizer, and the output record as JSON.

    Workers do it because together they have more cores than the driver. Rows are built by one thread and finished by
    another.
    """

    def __init__(self, builder: RequestBuilder, record_builder: RecordBuilder) -> None:
        self._builder = builder
        self._record_builder = record_builder
        self._rows: dict[int, Row] = {}  # rows whose requests are with the engine

    def build(self, rows: Sequence[Row]) -> Iterator[Request | JournalEntry]:
        """The request of each row, or the journal entry of a failed row."""
        for row, request in self._builder.build(rows):
            if request is None:
                yield failed_entry(row, self._record_builder)
            else:
                self._rows[request.key] = row
                yield request

    def finish(self, result: Result) -> JournalEntry | ChatRow:
        """The journal entry of the row that ``result`` ends, or the row itself if its next turn must be built."""
        row = self._rows.pop(result.key)
        if isinstance(row, ChatRow) and isinstance(self._builder, TurnBuilder):
            row, whole = self._builder.after(row, result)
            if whole is None:
                return row
            result = whole
        return entry_of(row, result, self._record_builder)

    def with_turns(self, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """``tokens`` of unfinished requests, by key, preceded by the tokens of earlier turns."""
        rows = {key: self._rows[key] for key in tokens}
        chats = {key: row for key, row in rows.items() if isinstance(row, ChatRow)}
        return {**tokens, **{key: row.token_ids_with(tokens[key]) for key, row in chats.items()}}


class EngineLoop:
    """Runs tasks on an engine until ``close``, or until an assignment says stop.

    ``collect`` is called by one thread, ``assign`` by any. An error of the engine or of building a request is raised by
    the next ``collect`` without news; then the loop cannot be used any more.
    """

    def __init__(
        self,
        engine: Engine,
        processor: RowProcessor,
        clock: Callable[[], float] = time.monotonic,
        num_launches: Callable[[], int] = lambda: 0,
    ) -> None:
        """The thread that steps owns the engine; others only read its ``stats``.

        ``num_launches`` counts progress within a step, which may take minutes on few cores.
        """
        self._engine = engine
        self._processor = processor
        self._clock = clock
        self._num_launches = num_launches
        # Guards all fields below; notified when one of them has changed.
        self._changed = threading.Condition()
        self._inbox: list[Row] = []
        self._ready: list[Request] = []
        self._results: list[Result] = []
        self._answers: list[Answer] = []
        self._partials: Mapping[int, tuple[int, ...]] | None = None
        self._is_stopping = self._is_stopped = False
        self._error: BaseException | None = None
        self._idle_s = 0.0  # written by the thread that steps
        self._progress = 0  # written by both threads
        # Only for the owner's thread.
        self._took_at = self._told_stats_at = -STATS_S
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"batchgen-{name}", daemon=True)
            for name, work in (("steps", self._steps), ("build", self._builds))
        ]
        for thread in self._threads:
            thread.start()

    def assign(self, assignment: Assignment) -> None:
        """Take in an assignment of the driver."""
        with self._changed:
            self._inbox += assignment.tasks
            self._is_stopping |= assignment.stop
            self._changed.notify_all()

    def collect(self, timeout_s: float = HEARTBEAT_S) -> WorkerUpdate:
        """The next update of this worker, as soon as there is news, or after the timeout. Raises the engine's error."""
        time.sleep(max(self._took_at + _ROUND_S - self._clock(), 0.0))
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._answers or self._is_stopped or self._error, timeout_s)
            if self._error is not None and not (self._results or self._answers):  # finished rows are returned first
                raise self._error
            results, self._results = self._results, []
            answers, self._answers = self._answers, []
            partials, self._partials = self._partials, None
            stopped, progress = self._is_stopped, self._progress + self._num_launches()
        self._took_at = self._clock()
        tokens = None if partials is None else self._processor.with_turns(partials)  # before their turns end
        made = [*map(self._processor.finish, results)]
        begun = [row for row in made if isinstance(row, ChatRow)]
        if begun:
            tokens = {**(tokens or {}), **{row.key: row.token_ids_with() for row in begun}}
            with self._changed:
                self._inbox = begun + self._inbox
                self._changed.notify_all()
        finished = (*answers, *(entry for entry in made if not isinstance(entry, ChatRow)))
        stats = self._stats(is_last=stopped)
        return WorkerUpdate(finished, tokens, stats, stopped=stopped, progress=progress)

    def close(self) -> None:
        """End the threads after the step and the row under way."""
        self.assign(Assignment(stop=True))
        for thread in self._threads:
            thread.join()

    def _stats(self, *, is_last: bool) -> Mapping[str, Any] | None:
        """The engine's counts without its series, and the idle seconds; None if the last ones were sent recently."""
        if not is_last and self._took_at - self._told_stats_at < STATS_S:
            return None
        self._told_stats_at = self._took_at
        return {**self._engine.stats.counts(), "idle_s": self._idle_s}

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error, self._is_stopping = error, True
                self._changed.notify_all()

    def _builds(self) -> None:
        """Make requests of incoming tasks, many at once if that takes little time."""
        size = 1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._is_stopping)
                if self._is_stopping:
                    return
                tasks, self._inbox = self._inbox[:size], self._inbox[size:]
            began_at = self._clock()
            for made in self._processor.build(tasks):
                with self._changed:
                    self._progress += 1
                    waiting: list[Any] = self._ready if isinstance(made, Request) else self._answers
                    waiting.append(made)
                    if len(waiting) == 1:  # otherwise the waiting thread was notified already
                        self._changed.notify_all()
            size = next_size(size, self._clock() - began_at)

    def _steps(self) -> None:
        """Step the engine while it has work."""
        told_at = self._clock()
        engine = self._engine
        while True:
            with self._changed:
                if not engine.has_work:
                    idle_at = self._clock()
                    self._changed.wait_for(lambda: self._ready or self._is_stopping)
                    self._idle_s += self._clock() - idle_at
                if self._is_stopping:
                    break
                ready, self._ready = self._ready, []
            results = [answer for request in ready if (answer := engine.submit(request)) is not None]
            results += engine.step() if engine.has_work else engine.flush()
            partials = None
            if self._clock() - told_at >= PARTIALS_S:
                told_at, partials = self._clock(), engine.unfinished()
            self._tell(results, partials)
        self._tell(engine.flush(), engine.unfinished())
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _tell(self, results: Iterable[Result], partials: Mapping[int, tuple[int, ...]] | None) -> None:
        with self._changed:
            self._progress += 1
            self._results += results
            self._partials = self._partials if partials is None else partials
            if self._results or partials is not None:
                self._changed.notify_all()

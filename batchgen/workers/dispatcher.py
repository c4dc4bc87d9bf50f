"""Dispatcher of rows over workers: who runs what next, and what becomes of the rows of a worker that is lost.

Rows go out in leases, which get smaller as fewer rows are left (guided self-scheduling), so that workers end together.
A row is in the backlog, with one worker, or at the end with a second one as well (a backup task); its first answer is
the only one that counts. Pure: no thread, no I/O, and a clock that a test can set.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from batchgen.core.records import Row
from batchgen.workers.messages import HEARTBEAT_S, Answer, Assignment, WorkerUpdate
from batchgen.workers.poison import PoisonRows
from batchgen.workers.worker_state import WorkerState

_HEAD_START = 256  # rows taken from the source before a worker has joined
_MOST, _LEAST = 1 / 2, 1 / 32  # rows of a lease, for each sequence that a worker runs at once
_AHEAD = 2  # rows of the backlog for each of these: the largest leases need half as many
_MAX_CHARS = 64 << 20  # of the rows of a worker, and for each worker of all rows that are not answered
_BACKUP_S = 2 * HEARTBEAT_S  # between two looks at which rows to run once more


class RowDispatcher:
    """Shares out rows over workers.

    Example:
        >>> dispatcher = RowDispatcher()
        >>> dispatcher.join("a", max_num_seqs=128)
        >>> dispatcher.put(request)
        >>> dispatcher.end_of_source()
        >>> while not dispatcher.is_done:
        ...     for name, assignment in dispatcher.assignments().items():
        ...         handles[name].send(assignment)
        ...     results += dispatcher.on_update("a", next_answers("a"))
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        num_chars: Callable[[Row], int] = lambda row: 0,
        num_workers: int = 1,
    ) -> None:
        """``num_chars`` of a task is about how much memory it takes; ``num_workers`` are those that may join."""
        self.workers: dict[str, WorkerState] = {}  # that are here
        self._clock = clock
        self._num_chars_of = num_chars
        self._num_expected = num_workers
        self._chars: dict[int, int] = {}  # of each row that is not answered, by key
        self._num_chars = 0  # their sum
        self._fresh: deque[Row] = deque()
        self._retried: deque[Row] = deque()
        self._to_isolate: deque[Row] = deque()
        self._holders: Counter[int] = Counter()  # of rows in flight: how many workers have each, one or two
        self._poison = PoisonRows()
        self._tokens: dict[int, tuple[int, ...]] = {}  # so far, of rows that are not answered
        self._to_stop: list[str] = []
        self._has_ended = False
        self._backed_up_at = clock()

    @property
    def room(self) -> int:
        """Number of tasks to put now, so that the backlog is as long as leases of full size need."""
        if self._has_ended or self._is_full:
            return 0
        wanted = _AHEAD * sum(worker.max_num_seqs for worker in self._takers())
        return max(0, (wanted or _HEAD_START) - len(self._fresh))

    @property
    def _is_full(self) -> bool:
        """Whether the rows that are not answered take as much memory as they may."""
        return self._num_chars >= _MAX_CHARS * max(len(self.workers), 1)

    def put(self, task: Row) -> bool:
        """Add a row to the backlog that the dispatcher has not had before; whether no other should be put now."""
        count = self._chars[task.key] = self._num_chars_of(task)
        self._num_chars += count
        self._fresh.append(task)
        return self._is_full

    def end_of_source(self) -> None:
        """No ``put`` will follow."""
        self._has_ended = True

    @property
    def is_done(self) -> bool:
        """Whether every row of the source is answered."""
        return self.is_winding_up and not self._holders

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens so far, by key, of the rows that have any and are not answered."""
        in_flight = chain.from_iterable(worker.tasks.values() for worker in self.workers.values())
        tokens = {task.key: task.output_token_ids for task in (*self._backlog(), *in_flight)} | self._tokens
        return {key: so_far for key, so_far in tokens.items() if so_far}

    def _backlog(self) -> Iterator[Row]:
        return chain(self._fresh, self._retried, self._to_isolate)

    # Workers that come and go

    def join(self, name: str, max_num_seqs: int) -> None:
        """Begin to give rows to a worker; names are used once."""
        now = self._clock()
        self.workers[name] = WorkerState(name, max_num_seqs, now, now, round_at=now, most_in_a_round=max_num_seqs / 6)

    def drain(self, name: str) -> None:
        """Stop a worker; the rows that it has go on elsewhere once it has said so, or is lost."""
        worker = self.workers.get(name)
        if worker is None or worker.state == "leaving":
            return
        worker.state = "leaving"
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        self._to_stop.append(name)

    def on_lost(self, name: str, *, has_hung: bool = False) -> list[Row]:
        """Give the rows of a worker that is gone to others; returns those that are taken to have ended it.

        These count as answered. A row is poison if its workers were lost while it ran there alone, again and again. One
        that they ``has_hung`` with is so only where others finish, or no other is left.
        """
        worker = self.workers.get(name)
        if worker is None:
            return []
        if worker.state == "leaving":
            self._end(worker, "left")
            return []
        is_alone = worker.state == "isolated"
        self._poison.add(worker.tasks, is_alone=is_alone)
        is_only_row = self._has_ended and len(self._chars) == 1
        is_unproven = has_hung and not is_only_row and not any(map(self._poison.others_go_on, worker.tasks))
        poison = [task for key, task in worker.tasks.items() if not is_unproven and self._poison.is_poison(key)]
        for task in poison:
            self._poison.blame(task.key)
            self._answered(worker, task.key)
        self._end(worker, "lost")
        if is_alone and is_unproven:
            self._to_isolate.rotate(-1)  # others first: one that finishes is the proof
        return poison

    @property
    def is_winding_up(self) -> bool:
        """Whether all rows are with workers, so that there is none for another worker unless one is lost."""
        return self._has_ended and not any(self._backlog())

    def idle(self) -> list[str]:
        """Workers without a row that none is left for, unless another worker is lost."""
        if not self.is_winding_up or any(self._may_back_up(key) for key in self._holders):
            return []
        return [worker.name for worker in self._takers() if not worker.tasks]

    def on_update(self, name: str, update: WorkerUpdate) -> list[Answer]:
        """Take in what a worker says; returns its answers to rows that had none yet."""
        worker = self.workers.get(name)
        if worker is None:
            return []
        now = self._clock()
        if update.progress != worker.progress or update.finished:
            worker.progress, worker.moved_at = update.progress, now
        first = [answer for answer in update.finished if self._answered(worker, answer.key)]
        self._poison.num_finished += len(first)
        for key, tokens in (update.partials or {}).items():
            if key in worker.tasks and len(tokens) > len(self._tokens.get(key, ())):
                self._tokens[key] = tuple(tokens)
        worker.count(len(first), now)
        if update.stopped:
            self._end(worker, "left")
        return first

    def assignments(self) -> dict[str, Assignment]:
        """Assignments to send now, by worker; the caller must send them."""
        assignments = {name: Assignment(stop=True) for name in self._to_stop if name in self.workers}
        self._to_stop.clear()
        if self._fresh or self._retried:
            assignments |= self._deal()
        elif self._to_isolate and self._has_ended:
            assignments |= self._isolate()
        elif self._has_ended and self._clock() - self._backed_up_at >= _BACKUP_S:
            self._backed_up_at = self._clock()
            assignments |= self._back_up()
        return assignments

    # Which rows go where

    def _takers(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if worker.state == "running"]

    def _deal(self) -> dict[str, Assignment]:
        """Leases for all workers in which few rows wait, the emptiest first."""
        leases: dict[str, list[Row]] = {}
        hungry = self._takers()
        while hungry:
            num_left, fed = len(self._fresh) + len(self._retried), []
            for worker in sorted(hungry, key=lambda w: len(w.tasks) / w.max_num_seqs):
                num_ahead = worker.num_ahead(max(self._num_expected, len(self.workers)))
                if worker.num_waiting < num_ahead and (tasks := self._pop(worker, num_left)):
                    self._give(worker, tasks)
                    leases.setdefault(worker.name, []).extend(tasks)
                    fed.append(worker)
            hungry = fed
        return {name: Assignment(tuple(tasks)) for name, tasks in leases.items()}

    def _pop(self, worker: WorkerState, num_left: int) -> list[Row]:
        """The next lease of a worker: half its share of what is left, within bounds.

        Few of its rows were in flight at a loss, as all of these must run alone after a second one.
        """
        share = min(num_left / (2 * len(self.workers)), _MOST * worker.max_num_seqs)
        size = max(math.ceil(share), round(_LEAST * worker.max_num_seqs))
        has_others = self._fresh or not self._has_ended
        num_retried = math.isqrt(worker.max_num_seqs) if has_others else max(1, worker.max_num_seqs // 4)
        if self._retried:
            num_retried -= sum(key in self._poison for key in worker.tasks)
        num_chars = sum(self._chars[key] for key in worker.tasks)
        tasks: list[Row] = []
        while len(tasks) < size:
            queue = self._retried if self._retried and len(tasks) < num_retried else self._fresh
            num_chars += self._chars[queue[0].key] if queue else 0
            if not queue or ((worker.tasks or tasks) and num_chars > _MAX_CHARS):
                break
            tasks.append(queue.popleft())
        return tasks

    def _give(self, worker: WorkerState, tasks: list[Row]) -> None:
        """Give rows to a worker."""
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        for task in tasks:
            worker.tasks[task.key] = task
            self._holders[task.key] += 1

    def _drop(self, worker: WorkerState, key: int) -> Row:
        """Remove a row from a worker."""
        task = worker.tasks.pop(key)
        worker.copies.discard(key)
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
        if worker.state == "isolated":
            worker.state = "running"
        return task

    def _answered(self, worker: WorkerState, key: int) -> bool:
        """Forget a row that a worker has answered; False if it is not there."""
        if key not in worker.tasks:
            return False
        holders = [worker] if self._holders[key] == 1 else [w for w in self.workers.values() if key in w.tasks]
        for holder in holders:
            self._drop(holder, key)
        self._num_chars -= self._chars.pop(key)
        self._tokens.pop(key, None)
        self._poison.forget(key)
        return True

    def _end(self, worker: WorkerState, state: str) -> None:
        goes_on = state == "lost" or worker.state == "leaving"  # else the run stops: no other gets its rows
        del self.workers[worker.name]
        tasks = [self._drop(worker, key) for key in list(worker.tasks)]
        worker.state, worker.ended_at = state, self._clock()
        alone = [task for task in tasks if task.key not in self._holders]
        for other in self.workers.values():
            other.copies.difference_update(task.key for task in tasks)
        num_tokens = self._put_back(alone)
        if goes_on:
            worker.num_given_back, worker.num_tokens_taken_over = len(alone), num_tokens

    def _put_back(self, tasks: list[Row]) -> int:
        """Put rows that a worker had before the backlog, in their order; the number of tokens that it added to them."""
        num_tokens = 0
        for task in reversed(tasks):
            renewed = self._with_tokens(task)
            num_tokens += len(renewed.output_token_ids) - len(task.output_token_ids)
            if self._poison.must_run_alone(task.key):
                self._to_isolate.appendleft(renewed)  # until it is cleared: fewer workers are lost in a row
            else:
                (self._retried if task.key in self._poison else self._fresh).appendleft(renewed)
        return num_tokens

    def _with_tokens(self, task: Row) -> Row:
        tokens = self._tokens.get(task.key, ())
        if len(tokens) <= len(task.output_token_ids):
            return task
        return replace(task, output_token_ids=tokens)

    def _isolate(self) -> dict[str, Assignment]:
        """Run rows alone that must, each on a worker that has no other; for that, they come last."""
        assignments = {}
        for worker in [worker for worker in self._takers() if not worker.tasks][: len(self._to_isolate)]:
            task = self._to_isolate.popleft()
            self._give(worker, [task])
            worker.state = "isolated"
            assignments[worker.name] = Assignment((task,))
        return assignments

    def _back_up(self) -> dict[str, Assignment]:
        """Give the last rows of the fullest worker once more to those with free slots, in equal parts.

        Rows that wait there go to any, rows that run only to a worker that has none of its own.
        """
        helpers = sorted((w for w in self._takers() if w.num_waiting < 0), key=lambda w: len(w.tasks))
        holders = self.workers if helpers else {}
        open_rows = {n: [task for key, task in w.tasks.items() if self._may_back_up(key)] for n, w in holders.items()}
        assignments = {}
        for number, helper in enumerate(helpers):
            fullest = max(holders.values(), key=lambda worker: len(open_rows[worker.name]))
            rows = open_rows[fullest.name]
            count = len(rows) if helper.has_only_copies else min(len(rows), fullest.num_waiting)
            count = min(math.ceil(count / (len(helpers) - number)), -helper.num_waiting)
            if count > 0 and fullest is not helper:
                tasks = [self._with_tokens(task) for task in rows[-count:]]
                del rows[-count:]
                self._give(helper, tasks)
                helper.copies |= {task.key for task in tasks}
                assignments[helper.name] = Assignment(tuple(tasks))
        return assignments

    def _may_back_up(self, key: int) -> bool:
        """Whether one worker alone has the row, and none has been lost with it."""
        return self._holders[key] == 1 and key not in self._poison

    def check(self) -> None:
        """Hold the dispatcher against its invariants.

        Raises:
            AssertionError: one does not hold.
        """
        live = list(self.workers.values())
        waiting = [task.key for task in self._backlog()]
        held = Counter(key for worker in live for key in worker.tasks)
        assert len(waiting) == len(set(waiting)) and held.keys().isdisjoint(waiting), "a row is in two places"
        assert held == self._holders and max(held.values(), default=0) <= 2
        keys = {*waiting, *held}
        assert self._poison.keys <= keys and self._tokens.keys() <= keys, "an answered row is remembered"
        tasks = {task.key: task for task in (*self._backlog(), *chain.from_iterable(w.tasks.values() for w in live))}
        assert self._num_chars == sum(map(self._num_chars_of, tasks.values()))
        for worker in live:
            assert worker.ended_at is None and worker.state in ("running", "isolated", "leaving")
            assert worker.state != "isolated" or len(worker.tasks) == 1, "a row that must run alone has company"
            assert all(held[key] == 2 for key in worker.copies) and worker.copies <= worker.tasks.keys()

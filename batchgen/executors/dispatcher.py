"""Dispatcher of rows over workers: who runs what next, and what becomes of the rows of a worker that is lost.

Rows go out one window per worker, not in chunks, so that no engine ever drains. A row is in the backlog, with one
worker, or at the end with a second one that had nothing to do; the first answer to it is the only one that counts.
Pure: no thread, no I/O, and time comes through a clock, so that any interleaving can be played in a test.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import isqrt
from typing import Any, cast

from batchgen.executors.messages import HEARTBEAT_S, Answer, Assignment, Task, WorkerUpdate
from batchgen.executors.poison import PoisonRows
from batchgen.executors.worker_state import WorkerState, copies, even_shares

_HEAD_START = 256  # rows taken from the source before a worker has joined
_MAX_CHARS = 64 << 20  # of the rows of a worker, and for each worker of all rows that are not answered
_HELPS_S = 2 * HEARTBEAT_S  # between two looks at who could help another


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
        num_chars: Callable[[Any], int] = lambda task: 0,
    ) -> None:
        """``num_chars`` of a task is about how much memory it takes."""
        self.workers: dict[str, WorkerState] = {}  # that are here
        self._clock = clock
        self._num_chars_of = num_chars
        self._chars: dict[int, int] = {}  # of each row that is not answered, by key
        self._num_chars = 0  # their sum
        self._fresh: deque[Task] = deque()
        self._retried: deque[Task] = deque()
        self._to_isolate: deque[Task] = deque()
        self._holders: Counter[int] = Counter()  # of rows in flight: how many workers have each, one or two
        self._poison = PoisonRows()
        self._tokens: dict[int, tuple[int, ...]] = {}  # so far, of rows that are not answered
        self._to_stop: list[str] = []
        self._has_ended = False
        self._helped_at = clock()
        self._needs_no_help = False

    # Rows from the source

    @property
    def num_in_flight(self) -> int:
        """Rows with workers."""
        return len(self._holders)

    @property
    def room(self) -> int:
        """How many more tasks should be put now, so that there is a full margin for every worker in the backlog."""
        if self._has_ended or self._is_full:
            return 0
        number = max(len(self.workers), 1)
        wanted = sum(worker.window(number) + worker.margin(number) for worker in self._takers())
        return max(0, (wanted or _HEAD_START) - len(self._fresh) - self.num_in_flight)

    @property
    def _is_full(self) -> bool:
        """Whether the rows that are not answered take as much memory as they may."""
        return self._num_chars >= _MAX_CHARS * max(len(self.workers), 1)

    def put(self, task: Task) -> bool:
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

    def _backlog(self) -> Iterator[Task]:
        return chain(self._fresh, self._retried, self._to_isolate)

    # Workers that come and go

    def join(self, name: str, max_num_seqs: int) -> None:
        """Begin to give rows to a worker; names are used once."""
        now = self._clock()
        worker = WorkerState(name, max_num_seqs, now, now, round_at=now, most_in_a_round=max_num_seqs / 6)  # a guess
        self.workers[name] = worker

    def drain(self, name: str) -> None:
        """Stop a worker; the rows that it has go on elsewhere once it has said so, or is lost."""
        worker = self.workers.get(name)
        if worker is None or worker.state == "leaving":
            return
        worker.state = "leaving"
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        self._to_stop.append(name)

    def on_lost(self, name: str, *, has_hung: bool = False) -> list[Task]:
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
        shared = any(self._holders[key] > 1 for key in worker.tasks)
        for other in self.workers.values() if shared else [worker]:
            other.num_retried = len(other.tasks.keys() & self._poison.keys)
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
        if not self.is_winding_up or (self._holders and not self._needs_no_help):
            return []
        return [worker.name for worker in self._takers() if not worker.tasks]

    # Messages

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
        if update.stats is not None:
            worker.num_tokens = sum(update.stats.get(f"num_{kind}_tokens", 0) for kind in ("prefill", "output"))
        worker.count(len(first), now)
        if update.stopped:
            self._end(worker, "left")
        return first

    def assignments(self) -> dict[str, Assignment]:
        """What to send to which worker now; it is taken as sent."""
        assignments = {name: Assignment(stop=True) for name in self._to_stop if name in self.workers}
        self._to_stop.clear()
        if self._fresh or self._retried:
            assignments |= self._deal()
        elif self._to_isolate and self._has_ended:
            assignments |= self._isolate()
        elif self._has_ended and self._clock() - self._helped_at >= _HELPS_S:
            self._helped_at = self._clock()
            helps = self._help()
            self._needs_no_help = not helps
            assignments |= helps
        return assignments

    # Which rows go where

    def _takers(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if worker.state == "running"]

    def _deal(self) -> dict[str, Assignment]:
        """Fill up the windows, the emptiest worker first; where there are too few rows for that, in even shares."""
        assignments = {}
        takers, number = self._takers(), len(self.workers)
        rooms = {worker.name: worker.window(number) - len(worker.tasks) for worker in takers}
        num_ready = len(self._fresh) + len(self._retried)
        is_scarce = self._has_ended or num_ready < sum(rooms.values())
        shares = even_shares(takers, num_ready, self._clock()) if is_scarce else {}
        hungry = [worker for worker in takers if rooms[worker.name] > (0 if is_scarce else worker.slack(number))]
        for worker in sorted(hungry, key=lambda w: len(w.tasks) / w.max_num_seqs):
            # Few at once, so that few must run alone after a second loss; more where there is nothing else.
            has_others = self._fresh or not self._has_ended
            most_retried = isqrt(worker.max_num_seqs) if has_others else max(1, worker.max_num_seqs // 4)
            share = shares[worker.name] - len(worker.tasks) if is_scarce else rooms[worker.name]
            if tasks := self._pop(worker, min(rooms[worker.name], share), most_retried - worker.num_retried):
                assignments[worker.name] = Assignment(tuple(tasks))
        return assignments

    def _pop(self, worker: WorkerState, most: int, most_retried: int) -> list[Task]:
        """Give rows to a worker, retried ones first: as many as it may have, and as much as it may hold."""
        tasks: list[Task] = []
        while len(tasks) < most:
            queue = self._retried if self._retried and len(tasks) < most_retried else self._fresh
            if not queue or (worker.tasks and worker.num_chars + self._chars[queue[0].key] > _MAX_CHARS):
                break
            tasks.append(queue.popleft())
            self._give(worker, tasks[-1])
        return tasks

    def _give(self, worker: WorkerState, task: Task) -> None:
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        worker.tasks[task.key] = task
        worker.num_retried += task.key in self._poison
        worker.num_chars += self._chars[task.key]
        self._holders[task.key] += 1

    def _drop(self, worker: WorkerState, key: int) -> Task:
        """Remove a row from a worker."""
        task = worker.tasks.pop(key)
        worker.copies.discard(key)
        worker.num_retried -= key in self._poison
        worker.num_chars -= self._chars[key]
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

    def _put_back(self, tasks: list[Task]) -> int:
        """Put rows that a worker had before the backlog, in their order; the number of tokens that it added to them."""
        self._needs_no_help, num_tokens = False, 0
        for task in reversed(tasks):
            renewed = self._with_tokens(task)
            num_tokens += len(renewed.output_token_ids) - len(task.output_token_ids)
            if self._poison.must_run_alone(task.key):
                self._to_isolate.appendleft(renewed)  # until it is cleared: fewer workers are lost in a row
            else:
                (self._retried if task.key in self._poison else self._fresh).appendleft(renewed)
        return num_tokens

    def _with_tokens(self, task: Task) -> Task:
        tokens = self._tokens.get(task.key, ())
        if len(tokens) <= len(task.output_token_ids):
            return task
        renewed: Task = replace(cast(Any, task), output_token_ids=tokens)
        return renewed

    def _isolate(self) -> dict[str, Assignment]:
        """Run rows alone that must, each on a worker that has no other; for that, they come last."""
        assignments = {}
        for worker in [worker for worker in self._takers() if not worker.tasks][: len(self._to_isolate)]:
            task = self._to_isolate.popleft()
            self._give(worker, task)
            worker.state = "isolated"
            assignments[worker.name] = Assignment((task,))
        return assignments

    def _help(self) -> dict[str, Assignment]:
        """Give workers without rows of their own copies of rows of slow ones."""
        helpers = [worker for worker in self._takers() if len(worker.copies) == len(worker.tasks)]
        assignments = {}
        for helper, tasks in copies(helpers, list(self.workers.values()), self._may_copy, self._clock()):
            renewed = tuple(map(self._with_tokens, tasks))
            for task in renewed:
                self._give(helper, task)
                helper.copies.add(task.key)
            assignments[helper.name] = Assignment(renewed)
        return assignments

    def _may_copy(self, task: Task) -> bool:
        """Whether one worker alone has the row, and none has been lost with it."""
        return self._holders[task.key] == 1 and task.key not in self._poison

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
            assert worker.num_retried == len(worker.tasks.keys() & self._poison.keys)
            assert worker.num_chars == sum(map(self._num_chars_of, worker.tasks.values()))

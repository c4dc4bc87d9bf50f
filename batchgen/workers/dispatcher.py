"""Dispatcher of rows over workers: a queue of leases (guided self-scheduling), which takes back a lost worker's leases.

At the end, workers with free slots repeat the newest rows of others (backup tasks). Pure: no thread, no I/O.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from batchgen.core.records import Row
from batchgen.workers.messages import HEARTBEAT_S, Answer, Assignment, WorkerUpdate
from batchgen.workers.worker_state import ALONE_AFTER, Lease, WorkerState

_HEAD_START = 256  # rows taken from the source before a worker has joined
_MAX, _MIN = 1 / 2, 1 / 32  # rows of a lease, for each sequence that a worker runs at once
_AHEAD = 2  # rows of the backlog for each of these: the largest leases need half as many
_MAX_CHARS = 64 << 20  # of a worker's rows; times the number of workers, of all unanswered rows
_BACKUP_S = 2 * HEARTBEAT_S  # between two checks for leases to copy to idle workers


class RowDispatcher:
    """Distributes rows over workers.

    Example:
        >>> dispatcher = RowDispatcher()
        >>> dispatcher.join("a", max_num_seqs=128)
        >>> dispatcher.put(row)
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
        """``num_chars`` estimates the memory of a task; up to ``num_workers`` workers may join."""
        self.workers: dict[str, WorkerState] = {}  # current workers by name
        self._clock = clock
        self._num_chars_of = num_chars
        self._num_expected = num_workers
        self._chars: dict[int, int] = {}  # of each unanswered row, by key
        self._num_chars = 0  # their sum
        self._fresh: deque[Row] = deque()  # not in a lease yet
        self._lost: deque[Lease] = deque()
        self._alone: deque[Lease] = deque()  # leases that must run alone
        self._leases: dict[int, Lease] = {}  # in flight, by the keys of their rows, the oldest first
        self._tokens: dict[int, tuple[int, ...]] = {}  # so far, by the key of an unanswered row
        self._to_stop: list[str] = []
        self._has_ended = False
        self._backed_up_at = clock()

    @property
    def room(self) -> int:
        """Number of tasks to put now, so that the backlog is long enough for leases of full size."""
        if self._has_ended or self._is_full:
            return 0
        wanted = _AHEAD * sum(worker.max_num_seqs for worker in self._takers())
        return max(0, (wanted or _HEAD_START) - len(self._fresh))

    @property
    def _is_full(self) -> bool:
        """Whether the unanswered rows take as much memory as they may."""
        return self._num_chars >= _MAX_CHARS * max(len(self.workers), 1)

    def put(self, task: Row) -> bool:
        """Add a new row to the backlog; returns True if memory is full and the caller should not add more now."""
        count = self._chars[task.key] = self._num_chars_of(task)
        self._num_chars += count
        self._fresh.append(task)
        return self._is_full

    def end_of_source(self) -> None:
        self._has_ended = True

    @property
    def is_done(self) -> bool:
        return self.is_winding_up and not self._leases

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens so far, by key, of unanswered rows with tokens."""
        in_flight = chain.from_iterable(worker.tasks.values() for worker in self.workers.values())
        tokens = {task.key: task.output_token_ids for task in (*self._backlog(), *in_flight)} | self._tokens
        return {key: so_far for key, so_far in tokens.items() if so_far}

    def _backlog(self) -> Iterator[Row]:
        lost = (lease.tasks.values() for lease in (*self._lost, *self._alone))
        return chain(self._fresh, chain.from_iterable(lost))

    # Workers that come and go

    def join(self, name: str, max_num_seqs: int) -> None:
        """Begin to give rows to a worker; a name cannot be used again."""
        now = self._clock()
        self.workers[name] = WorkerState(name, max_num_seqs, now, now, interval_at=now, peak_rows=max_num_seqs / 6)

    def drain(self, name: str) -> None:
        """Stop a worker; its rows continue elsewhere once it has confirmed, or is lost."""
        worker = self.workers.get(name)
        if worker is None or worker.state == "leaving":
            return
        worker.state = "leaving"
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        self._to_stop.append(name)

    def on_lost(self, name: str) -> list[Row]:
        """Take back the leases of a lost worker; returns the rows blamed for its end, which count as answered.

        A row is blamed if it was lost twice while it ran alone.
        """
        worker = self.workers.get(name)
        if worker is None:
            return []
        if worker.state == "leaving":
            self._end(worker, "left")
            return []
        poison: list[Row] = []
        for lease in self._end(worker, "lost"):
            lease.num_losses += 1
            if lease.num_losses > ALONE_AFTER and len(lease.tasks) > 1:
                self._alone.extend(lease.halves())
            elif lease.num_losses < 2 * ALONE_AFTER:
                (self._alone if lease.num_losses >= ALONE_AFTER else self._lost).append(lease)
            else:
                poison += lease.tasks.values()
                self._forget(*lease.tasks)
        return poison

    @property
    def is_winding_up(self) -> bool:
        """Whether all rows are with workers, so that a new worker only gets rows if one is lost."""
        return self._has_ended and not any(self._backlog())

    def idle(self) -> list[str]:
        """Workers without rows that will not get any, unless another worker is lost."""
        if not self.is_winding_up or any(map(self._may_back_up, self._leases)):
            return []
        return [worker.name for worker in self._takers() if not worker.tasks]

    def on_update(self, name: str, update: WorkerUpdate) -> list[Answer]:
        """Take in a worker's update; returns its answers to unanswered rows."""
        worker = self.workers.get(name)
        if worker is None:
            return []
        now = self._clock()
        if update.progress != worker.progress or update.finished:
            worker.progress, worker.moved_at = update.progress, now
        first = [answer for answer in update.finished if self._answered(worker, answer.key)]
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
        if self._fresh or self._lost:
            assignments |= self._deal()
        elif self._alone and self._has_ended:
            assignments |= self._isolate()
        elif self._has_ended and self._clock() - self._backed_up_at >= _BACKUP_S:
            self._backed_up_at = self._clock()
            assignments |= self._back_up()
        return assignments

    # Which leases go where

    def _takers(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if worker.state == "running"]

    def _deal(self) -> dict[str, Assignment]:
        """Leases for all workers with few waiting rows, the emptiest first."""
        leased: dict[str, list[Row]] = {}
        hungry = self._takers()
        while hungry:
            num_left, fed = len(self._fresh) + sum(len(lease.tasks) for lease in self._lost), []
            for worker in sorted(hungry, key=lambda w: len(w.tasks) / w.max_num_seqs):
                num_ahead = worker.num_ahead(max(self._num_expected, len(self.workers)))
                if worker.num_waiting < num_ahead and (lease := self._next_lease(worker, num_left)):
                    leased.setdefault(worker.name, []).extend(self._give(worker, lease))
                    fed.append(worker)
            hungry = fed
        return {name: Assignment(tuple(tasks)) for name, tasks in leased.items()}

    def _next_lease(self, worker: WorkerState, num_left: int) -> Lease | None:
        """A lost lease, or fresh rows: half a worker's share of the rest, within bounds. None if it has no room."""
        room = _MAX_CHARS - sum(self._chars[key] for key in worker.tasks)
        if self._lost and (not worker.tasks or sum(self._chars[key] for key in self._lost[0].tasks) <= room):
            return self._lost.popleft()
        share = min(num_left / (2 * len(self.workers)), _MAX * worker.max_num_seqs)
        size = max(math.ceil(share), round(_MIN * worker.max_num_seqs))
        tasks: dict[int, Row] = {}
        while self._fresh and len(tasks) < size:
            room -= self._chars[self._fresh[0].key]
            if room < 0 and (worker.tasks or tasks):
                break
            task = self._fresh.popleft()
            tasks[task.key] = task
        return Lease(tasks) if tasks else None

    def _give(self, worker: WorkerState, lease: Lease) -> list[Row]:
        """Give a lease to a worker; returns its rows, with their tokens so far."""
        if not worker.tasks:
            worker.moved_at = self._clock()  # until now its silence meant nothing
        lease.holders.append(worker)
        lease.tasks = {key: self._with_tokens(task) for key, task in lease.tasks.items()}
        worker.tasks |= lease.tasks
        self._leases |= dict.fromkeys(lease.tasks, lease)
        return list(lease.tasks.values())

    def _with_tokens(self, task: Row) -> Row:
        tokens = self._tokens.get(task.key, ())
        return replace(task, output_token_ids=tokens) if len(tokens) > len(task.output_token_ids) else task

    def _answered(self, worker: WorkerState, key: int) -> bool:
        """Forget a row that a worker has answered; returns False if the row is unknown."""
        if key not in worker.tasks:
            return False
        lease = self._leases.pop(key)
        del lease.tasks[key]
        for holder in lease.holders:
            del holder.tasks[key]
            if holder.state == "isolated" and not holder.tasks:
                holder.state = "running"
        self._forget(key)
        return True

    def _forget(self, *keys: int) -> None:
        for key in keys:
            self._num_chars -= self._chars.pop(key)
            self._tokens.pop(key, None)

    def _end(self, worker: WorkerState, state: str) -> list[Lease]:
        """Remove a worker; returns the leases that only it had. If ``state`` is "left", their rows are fresh again."""
        run_continues = state == "lost" or worker.state == "leaving"
        del self.workers[worker.name]
        leases = list(dict.fromkeys(self._leases[key] for key in worker.tasks))
        for lease in leases:
            lease.holders.remove(worker)
        alone = [lease for lease in leases if not lease.holders]
        tasks = [task for lease in alone for task in lease.tasks.values()]
        worker.tasks, worker.state, worker.ended_at = {}, state, self._clock()
        for task in tasks:
            del self._leases[task.key]
        if run_continues:
            worker.num_given_back = len(tasks)
            renewed = map(self._with_tokens, tasks)
            gains = (
                len(new.output_token_ids) - len(old.output_token_ids) for new, old in zip(renewed, tasks, strict=True)
            )
            worker.num_tokens_taken_over = sum(gains)
        if state == "left":
            self._fresh.extendleft(map(self._with_tokens, reversed(tasks)))
        return alone

    def _isolate(self) -> dict[str, Assignment]:
        """Give each lease that must run alone to an idle worker. This comes last: only then are workers idle."""
        assignments = {}
        for worker in [worker for worker in self._takers() if not worker.tasks][: len(self._alone)]:
            assignments[worker.name] = Assignment(tuple(self._give(worker, self._alone.popleft())))
            worker.state = "isolated"
        return assignments

    def _back_up(self) -> dict[str, Assignment]:
        """Send copies of the fullest worker's newest rows to workers with free slots, in equal parts.

        Waiting rows are copied to any of these workers, running rows only to a worker whose rows are all copies.
        """
        helpers = sorted((w for w in self._takers() if w.num_waiting < 0), key=lambda w: len(w.tasks))
        holders = self.workers if helpers else {}
        open_keys = {name: [*filter(self._may_back_up, worker.tasks)] for name, worker in holders.items()}
        assignments = {}
        for number, helper in enumerate(helpers):
            fullest = max(holders.values(), key=lambda worker: len(open_keys[worker.name]))
            keys = open_keys[fullest.name]
            has_only_backups = all(self._leases[key].holders[1:] == [helper] for key in helper.tasks)
            count = len(keys) if has_only_backups else min(len(keys), fullest.num_waiting)
            count = min(math.ceil(count / (len(helpers) - number)), -helper.num_waiting)
            if count > 0 and fullest is not helper:
                tasks = {key: self._leases[key].tasks.pop(key) for key in keys[-count:]}
                del keys[-count:]
                assignments[helper.name] = Assignment(tuple(self._give(helper, Lease(tasks, holders=[fullest]))))
        return assignments

    def _may_back_up(self, key: int) -> bool:
        """Whether the row is with one worker only, and its lease was never lost."""
        lease = self._leases[key]
        return len(lease.holders) == 1 and not lease.num_losses

    def check(self) -> None:
        """Check the dispatcher's invariants. Raises AssertionError if one does not hold."""
        live = list(self.workers.values())
        waiting = [task.key for task in self._backlog()]
        held = set(chain.from_iterable(worker.tasks for worker in live))
        assert len(waiting) == len(set(waiting)) and held.isdisjoint(waiting), "a row is in two places"
        assert held == self._leases.keys() and {*waiting, *held} == self._chars.keys() >= self._tokens.keys()
        for key, lease in self._leases.items():
            holders = [worker for worker in live if key in worker.tasks]
            assert key in lease.tasks and 1 <= len(holders) == len(lease.holders) <= 2, (
                "a lease is not with its holders"
            )
        assert all(not lease.holders and lease.num_losses for lease in (*self._lost, *self._alone))
        assert self._num_chars == sum(self._chars.values())
        for worker in live:
            assert worker.ended_at is None and worker.state in ("running", "isolated", "leaving")
            leases = {self._leases[key] for key in worker.tasks}
            assert worker.state != "isolated" or len(leases) == 1, "a lease that must run alone has company"

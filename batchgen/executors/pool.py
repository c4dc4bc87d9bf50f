"""Pool of rows shared out over workers: who runs what next, and what becomes of the rows of a worker that is lost.

Rows go out one window per worker, not in chunks, so that no engine ever drains. A row is always in exactly one place:
the backlog, quarantine or one worker; so the first answer to it is the only one that counts. Pure: no thread, no I/O,
and time comes through a clock, so that any interleaving can be played in a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isqrt
from typing import Any, cast

from batchgen.executors.backlog import Backlog
from batchgen.executors.member import Member, even_shares, recall_surplus
from batchgen.executors.messages import HEARTBEAT_S, Answer, Answers, Grant, Task
from batchgen.executors.strikes import Strikes

_HEAD_START = 256  # rows taken from the source before a worker has joined


class Pool:
    """Shares out rows over workers.

    Example:
        >>> pool = Pool()
        >>> pool.join("a", max_num_seqs=128)
        >>> pool.put(requests)
        >>> pool.end_of_source()
        >>> while not pool.is_done:
        ...     for name, grant in pool.grants().items():
        ...         seats[name].send(grant)
        ...     results += pool.heard("a", next_answers("a"))
    """

    def __init__(
        self,
        *,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        expected_tokens: Callable[[Any], int] = lambda task: 0,
    ) -> None:
        """``expected_tokens`` of a task: those with the most go out first, equal ones in the order of the source."""
        self.patience_s = patience_s
        self.workers: dict[str, Member] = {}  # also those that have left or are lost
        self.num_given_again = 0
        self.num_tokens_taken_over = 0
        self.num_in_flight = 0
        self._clock = clock
        self._backlog = Backlog(expected_tokens)
        self._live: dict[str, Member] = {}
        self._hungry: dict[str, Member] = {}  # those that may have room
        self._wanted = 0  # rows for all windows, and as many again as wait in them
        self._strikes = Strikes()
        self._tokens: dict[int, tuple[int, ...]] = {}  # so far, of rows in flight
        self._to_stop: list[str] = []
        self._has_ended = False
        self._balanced_at = self._asked_at = clock()
        self._is_balanced = False

    # Rows from the source

    @property
    def room(self) -> int:
        """How many more tasks should be put now, so that there is a full margin for every worker in the backlog."""
        if self._has_ended:
            return 0
        return max(0, (self._wanted or _HEAD_START) - self._backlog.num_fresh - self.num_in_flight)

    def put(self, tasks: Iterable[Task]) -> None:
        """Add rows to the backlog, none of which the pool has had before."""
        self._backlog.put(tasks)

    def end_of_source(self) -> None:
        """No ``put`` will follow."""
        self._has_ended = True
        self._hungry.update(self._live)

    @property
    def is_done(self) -> bool:
        """Whether every row of the source is answered."""
        return self._has_ended and not self._backlog and not self.num_in_flight

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Tokens so far, by key, of the rows that have any and are not answered."""
        in_flight = (task for worker in self._live.values() for task in worker.tasks.values())
        tokens = {task.key: task.output_token_ids for task in (*self._backlog, *in_flight)} | self._tokens
        return {key: so_far for key, so_far in tokens.items() if so_far}

    # Workers that come and go

    def join(self, name: str, max_num_seqs: int) -> None:
        """Begin to give rows to a worker; names are used once."""
        now = self._clock()
        worker = Member(name, max_num_seqs, now, now, round_at=now, most_in_a_round=max_num_seqs / 6)  # a guess
        self.workers[name] = self._live[name] = worker
        self._resize()

    def leave(self, name: str) -> None:
        """Stop a worker; the rows that it has go on elsewhere once it has said so, or is lost."""
        worker = self._live.get(name)
        if worker is None or worker.state == "leaving":
            return
        worker.state = "leaving"
        if not worker.tasks:
            worker.heard_at = self._clock()  # until now its silence meant nothing
        self._to_stop.append(name)
        self._resize()

    def lose(self, name: str) -> list[Task]:
        """Give the rows of a worker that is gone to others; returns those that are convicted of ending workers.

        These count as answered. A row is convicted if its worker was lost while it ran there alone, again and again.
        """
        worker = self._live.get(name)
        if worker is None:
            return []
        if worker.state == "leaving":
            self._end(worker, "left")
            return []
        self._strikes.add(worker.tasks, is_alone=worker.state == "quarantine")
        worker.num_struck = len(worker.tasks)
        convicted = [task for key, task in worker.tasks.items() if self._strikes.is_convicted(key)]
        for task in convicted:
            self._strikes.convict(task.key)
            self._take(worker, task.key)
            self._forget(task.key)
        self._end(worker, "lost")
        return convicted

    def silent(self) -> list[str]:
        """Workers not heard of for ``patience_s`` although they have rows or are to stop; hear what has come first.

        Time in which the driver itself stood still, and so did not ask, is nobody's silence.
        """
        now = self._clock()
        stood_still = now - self._asked_at
        self._asked_at = now
        if stood_still > self.patience_s / 2:
            for worker in self._live.values():
                worker.heard_at = min(now, worker.heard_at + stood_still)
        owing = [worker for worker in self._live.values() if worker.tasks or worker.state == "leaving"]
        return [worker.name for worker in owing if now - worker.heard_at > self.patience_s]

    @property
    def is_winding_up(self) -> bool:
        """Whether all rows are with workers, so that there is none for another worker unless one is lost."""
        return self._has_ended and not self._backlog

    def idle(self) -> list[str]:
        """Workers without a row that none is left for, unless another worker is lost."""
        if not self.is_winding_up or (self.num_in_flight and not self._is_balanced):
            return []
        return [worker.name for worker in self._takers() if not worker.tasks]

    # Messages

    def heard(self, name: str, answers: Answers) -> list[Answer]:
        """Take in what a worker says; returns its answers to the rows that it was to run."""
        worker = self._live.get(name)
        if worker is None:
            return []
        now = worker.heard_at = self._clock()
        first = [answer for answer in answers.finished if self._take(worker, answer.key)]
        for answer in first:
            self._forget(answer.key)
        for key, tokens in (answers.partials or {}).items():
            if key in worker.tasks and len(tokens) > len(self._tokens.get(key, ())):
                self._tokens[key] = tuple(tokens)
        returned = [task for key in answers.returned if (task := self._take(worker, key))]
        self._put_back(returned)
        if answers.stats is not None:
            worker.num_output_tokens = answers.stats.get("num_output_tokens", worker.num_output_tokens)
        worker.count(len(first), now)
        if worker.state == "running":
            self._wanted += 2 * worker.set_margin(len(self._live))
            self._hungry[name] = worker
        if answers.stopped:
            self._end(worker, "left")
        elif answers.leaving:
            self.leave(name)
        return first

    def grants(self) -> dict[str, Grant]:
        """What to send to which worker now; it is taken as sent."""
        grants = {name: Grant(stop=True) for name in self._to_stop if name in self._live}
        self._to_stop.clear()
        if self._backlog.num_ready:
            grants |= self._deal()
        elif self._backlog.suspects and self._has_ended:
            grants |= self._quarantine()
        if self._has_ended and not self._backlog.num_fresh and self._clock() - self._balanced_at >= 2 * HEARTBEAT_S:
            self._balanced_at = self._clock()
            recalls = recall_surplus(self._takers(), self._backlog.num_ready)
            self._is_balanced = not recalls
            for name, keys in recalls.items():
                grants[name] = replace(grants.get(name, Grant()), recall=keys)
        return grants

    # Which rows go where

    def _takers(self) -> list[Member]:
        return [worker for worker in self._live.values() if worker.state == "running"]

    def _resize(self) -> None:
        """Shares of the look-ahead depend on how many there are to share it."""
        self._hungry = {worker.name: worker for worker in self._takers()}
        for worker in self._hungry.values():
            worker.set_margin(len(self._live))
        self._wanted = sum(worker.max_num_seqs + 2 * worker.margin for worker in self._hungry.values())

    def _deal(self) -> dict[str, Grant]:
        """Fill up the windows, the emptiest worker first; where there are too few rows for that, in even shares."""
        grants = {}
        missing = sum(worker.window - len(worker.tasks) for worker in self._hungry.values())
        is_scarce = self._has_ended or self._backlog.num_ready < missing
        shares = even_shares(self._takers(), self._backlog.num_ready) if is_scarce else {}
        for worker in sorted(self._hungry.values(), key=lambda w: len(w.tasks) / w.max_num_seqs):
            room = worker.window - len(worker.tasks)
            if worker.state != "running" or room <= (0 if is_scarce else worker.slack):
                del self._hungry[worker.name]
                continue
            # Few at once, so that few become suspects at a second loss; more where there is nothing else.
            has_others = self._backlog.num_fresh or not self._has_ended
            most_struck = isqrt(worker.max_num_seqs) if has_others else max(1, worker.max_num_seqs // 4)
            most = min(room, shares.get(worker.name, worker.window) - len(worker.tasks))
            if tasks := self._backlog.pop(most, most_struck - worker.num_struck):
                self._give(worker, tasks)
                grants[worker.name] = Grant(tuple(tasks))
            elif not self._backlog.num_ready:
                break
        return grants

    def _give(self, worker: Member, tasks: list[Task]) -> None:
        if not worker.tasks:
            worker.heard_at = self._clock()  # until now its silence meant nothing
        for task in tasks:
            worker.tasks[task.key] = task
            worker.num_struck += task.key in self._strikes
        self.num_in_flight += len(tasks)

    def _take(self, worker: Member, key: int) -> Task | None:
        """Remove a row from a worker; None if it is not there."""
        task = worker.tasks.pop(key, None)
        if task is not None:
            worker.recalled.discard(key)
            worker.num_struck -= key in self._strikes
            self.num_in_flight -= 1
            if worker.state == "quarantine":
                worker.state = "running"
                self._resize()
        return task

    def _forget(self, key: int) -> None:
        self._tokens.pop(key, None)
        self._strikes.forget(key)

    def _end(self, worker: Member, state: str) -> None:
        goes_on = state == "lost" or worker.state == "leaving"  # else the run stops: no other gets its rows
        worker.state, worker.ended_at = state, self._clock()
        del self._live[worker.name]
        tasks = list(worker.tasks.values())
        self.num_in_flight -= len(tasks)
        worker.tasks.clear()
        before = self.num_tokens_taken_over
        self._put_back(tasks)
        if goes_on:
            worker.num_given_back = len(tasks)
            worker.num_tokens_taken_over = self.num_tokens_taken_over - before
            self.num_given_again += len(tasks)
        self._resize()

    def _put_back(self, tasks: list[Task]) -> None:
        """Rows that a worker had go to the front of the backlog, in their order and with the tokens so far."""
        self._is_balanced = False
        for task in map(self._with_tokens, reversed(tasks)):
            if self._strikes.is_suspect(task.key):
                self._backlog.suspects.appendleft(task)  # until it is judged: fewer are lost in a row without an answer
            elif task.key in self._strikes:
                self._backlog.struck.appendleft(task)
            else:
                self._backlog.put_back(task)

    def _with_tokens(self, task: Task) -> Task:
        tokens = self._tokens.pop(task.key, ())
        more = len(tokens) - len(task.output_token_ids)
        if more <= 0:
            return task
        self.num_tokens_taken_over += more
        renewed: Task = replace(cast(Any, task), output_token_ids=tokens)
        return renewed

    def _quarantine(self) -> dict[str, Grant]:
        """Run suspects alone, each on a worker that has no other row; for that, they come last."""
        grants = {}
        suspects = self._backlog.suspects
        for worker in [worker for worker in self._takers() if not worker.tasks][: len(suspects)]:
            task = suspects.popleft()
            self._give(worker, [task])
            worker.state = "quarantine"
            grants[worker.name] = Grant((task,))
        self._resize()
        return grants

    def check(self) -> None:
        """Hold the pool against its invariants.

        Raises:
            AssertionError: one does not hold.
        """
        live = list(self._live.values())
        keys = [task.key for task in self._backlog] + [key for worker in live for key in worker.tasks]
        assert len(keys) == len(set(keys)), "a row is in two places"
        assert self._strikes.keys <= set(keys) and self._tokens.keys() <= set(keys), "an answered row is remembered"
        assert self.num_in_flight == len(keys) - len(self._backlog)
        assert self._wanted == sum(worker.window + worker.margin for worker in self._takers())
        for worker in live:
            assert worker.state in ("running", "quarantine", "leaving") and worker.ended_at is None
            assert worker.state != "quarantine" or len(worker.tasks) == 1, "a suspect has company"
            assert worker.recalled <= worker.tasks.keys()
            assert worker.num_struck == len(worker.tasks.keys() & self._strikes.keys)
        assert not any(worker.tasks for name, worker in self.workers.items() if name not in self._live)

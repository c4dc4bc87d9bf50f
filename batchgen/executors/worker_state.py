"""Worker as the dispatcher sees it: its rows in flight and its counters, and how rows are split among several.

Near the end of a run a slow worker has more rows than it will finish in time. Idle ones get copies of them, and the
first answer counts: cheaper than to wait, and simpler than to take rows back. A copy also covers a row that has begun.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from batchgen.executors.messages import HEARTBEAT_S, Task

_LOOK_AHEAD = 8  # times max_num_seqs, shared by all workers: what one engine alone keeps waiting


@dataclass(slots=True)
class WorkerState:
    """What the dispatcher knows of a worker, and its counters.

    ``state`` is "running", "isolated" (its one row must run alone), "leaving" (told to stop), "left" or "lost".
    ``num_rows`` were answered by it first. ``num_given_back`` were in flight when it was lost or left
    before the run stopped, and ``num_tokens_taken_over`` of their tokens need not be generated again.
    """

    name: str
    max_num_seqs: int
    joined_at: float
    moved_at: float
    state: str = "running"
    progress: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # computed, of prompts too
    num_given_back: int = 0
    num_tokens_taken_over: int = 0
    ended_at: float | None = None
    tasks: dict[int, Task] = field(default_factory=dict)  # in flight, in the order of their assignments
    copies: set[int] = field(default_factory=set)  # of these, given to help another worker, which has them too
    num_chars: int = 0  # of the tasks
    num_retried: int = 0  # of the tasks, those that were in flight at a loss
    round_at: float = 0.0
    round_rows: int = 0
    most_in_a_round: float = 0.0

    def margin(self, num_workers: int) -> int:
        """Rows that should wait in it: as many as finish before more can come, and some to choose from."""
        shared = _LOOK_AHEAD * self.max_num_seqs // num_workers
        return max(self._urgent, shared, self.max_num_seqs // 8, 2)

    def slack(self, num_workers: int) -> int:
        """How many of these may be missing, so that assignments are long runs."""
        return (self.margin(num_workers) - self._urgent) // 2

    def window(self, num_workers: int) -> int:
        """The most rows in flight."""
        return self.max_num_seqs + self.margin(num_workers)

    def count(self, num_finished: int, now: float) -> None:
        """Book answered rows, and learn how many can finish between two messages: the peak, which fades slowly."""
        self.num_rows += num_finished
        self.round_rows += num_finished
        if now - self.round_at >= HEARTBEAT_S:
            self.most_in_a_round = max(self.round_rows, 0.98 * self.most_in_a_round)
            self.round_rows, self.round_at = 0, now

    @property
    def _urgent(self) -> int:
        return 2 * round(self.most_in_a_round)


def speeds(workers: Iterable[WorkerState], now: float) -> dict[str, float]:
    """Tokens per second so far; of one that has computed none yet the mean of the others."""
    found = {m.name: m.num_tokens / max(now - m.joined_at, HEARTBEAT_S) for m in workers}
    known = [speed for speed in found.values() if speed]
    mean = sum(known) / len(known) if known else 1.0
    return {name: speed or mean for name, speed in found.items()}


def even_shares(workers: Sequence[WorkerState], num_waiting: int, now: float) -> dict[str, int]:
    """How many rows each would have if theirs and those that wait were shared out so that all end together."""
    num_rows = num_waiting + sum(len(worker.tasks) for worker in workers)
    found = speeds(workers, now)
    return {name: math.ceil(num_rows * speed / sum(found.values())) for name, speed in found.items()}


def copies(
    helpers: Sequence[WorkerState], workers: Sequence[WorkerState], may_copy: Callable[[Task], bool], now: float
) -> Iterator[tuple[WorkerState, list[Task]]]:
    """Rows that helpers, which have none of their own, should run too: of the worker that has most for its speed.

    They split what that one has left by their speeds, so a single row of a worker that is as fast is left alone. Rows
    that it got last come first, as they have hardly begun.
    """
    left = {worker.name: [task for task in worker.tasks.values() if may_copy(task)] for worker in workers}
    speed = speeds(workers, now)
    for helper in sorted(helpers, key=lambda worker: -speed[worker.name]):
        others = {name: tasks for name, tasks in left.items() if tasks and name != helper.name}
        if not others:
            return
        slowest = max(others, key=lambda name: len(left[name]) / speed[name])
        share = speed[helper.name] / (speed[helper.name] + speed[slowest])
        room = helper.max_num_seqs - len(helper.tasks)
        rest = len(left[slowest]) - min(round(share * len(left[slowest])), room)
        found, left[slowest] = left[slowest][rest:], left[slowest][:rest]
        if found:
            yield helper, found

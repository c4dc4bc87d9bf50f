"""Worker as the driver sees it: its leases of rows, its counters, and whether it gets anything done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from batchgen.core.records import Row
from batchgen.core.units import format_duration
from batchgen.workers.messages import HEARTBEAT_S

_SHARED_AHEAD = 4  # rows that may wait in all workers, for each sequence of one of them
ALONE_AFTER = 2  # losses


@dataclass(slots=True)
class WorkerState:
    """The rows of a worker, and its counters; ``moved_at`` is when it last made progress.

    ``state`` is "running", "isolated" (its one lease must run alone), "leaving" (told to stop), "left" or "lost".
    ``num_rows`` were answered by it first. ``num_given_back`` were in flight when it was lost or left before the run
    stopped; ``num_tokens_taken_over`` of their tokens need not be generated again.
    """

    name: str
    max_num_seqs: int
    joined_at: float
    moved_at: float
    state: str = "running"
    progress: int = 0
    num_rows: int = 0
    interval_at: float = 0.0
    num_interval_rows: int = 0
    peak_rows: float = 0.0
    num_given_back: int = 0
    num_tokens_taken_over: int = 0
    ended_at: float | None = None
    tasks: dict[int, Row] = field(default_factory=dict)  # in flight, in the order of their assignments

    @property
    def num_waiting(self) -> int:
        """Rows that it cannot run yet; negative for free slots."""
        return len(self.tasks) - self.max_num_seqs

    def num_ahead(self, num_workers: int) -> int:
        """The number of rows that should wait in the worker, so that it does not run out before new ones arrive.

        More if workers are few: full steps need many rows, and few workers soon repeat each other's last rows.
        """
        shared = _SHARED_AHEAD * self.max_num_seqs // num_workers
        return max(round(2 * self.peak_rows), self.max_num_seqs // 8, shared, 1)

    def count(self, num_finished: int, now: float) -> None:
        """Count answered rows, and the most that come between two heartbeats; an old peak fades."""
        self.num_rows += num_finished
        self.num_interval_rows += num_finished
        if now - self.interval_at >= HEARTBEAT_S:
            self.peak_rows = max(self.num_interval_rows, 0.98 * self.peak_rows)
            self.num_interval_rows, self.interval_at = 0, now


@dataclass(eq=False, slots=True)
class Lease:
    """Rows that are given to a worker, and lost, together; ``tasks`` are the unanswered ones, by key.

    ``holders`` are the workers that run it: none while it waits, two if it has a backup. After ALONE_AFTER losses (a
    half starts with as many) it must be its worker's only lease, so that the next loss can be blamed on it. A single
    row with twice as many losses has ended its workers.
    """

    tasks: dict[int, Row]
    num_losses: int = 0
    holders: list[WorkerState] = field(default_factory=list)

    def halves(self) -> list[Lease]:
        """Two leases of its rows, in order, that must run alone."""
        tasks = list(self.tasks.items())
        middle = len(tasks) // 2
        return [Lease(dict(part), ALONE_AFTER) for part in (tasks[:middle], tasks[middle:])]


class Liveness:
    """Judges workers by what they get done, since a worker that hangs in a step still sends updates.

    ``step_timeout_s`` is how long a worker may be without progress, ``load_timeout_s`` how long it may load its model.
    Time in which the driver itself was suspended does not count.
    """

    def __init__(
        self, step_timeout_s: float = 60.0, load_timeout_s: float = 1800.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step_timeout_s, self.load_timeout_s = step_timeout_s, load_timeout_s
        self._clock = clock
        self._known_late: set[str] = set()
        self._asked_at = clock()

    def late(self, loading: Mapping[str, float]) -> list[str]:
        """Workers that have been loading for longer than ``step_timeout_s``, each once; ``loading`` says since when."""
        now = self._clock()
        late = {name for name, since in loading.items() if now - since > self.step_timeout_s} - self._known_late
        self._known_late |= late
        return sorted(late)

    def unresponsive(self, workers: Collection[WorkerState], loading: Mapping[str, float] = {}) -> dict[str, str]:
        """Workers to be given up, and why; first take in their updates. ``loading`` are other workers, as in ``late``.

        A ready worker is only judged if it has rows or is to stop.
        """
        now = self._clock()
        stood_still, self._asked_at = now - self._asked_at, now
        if stood_still > self.step_timeout_s / 2:
            for worker in workers:
                worker.moved_at = min(now, worker.moved_at + stood_still)
        owing = [worker for worker in workers if worker.tasks or worker.state == "leaving"]
        silent = {
            worker.name: f"it has not finished a step in {format_duration(self.step_timeout_s)} (--step-timeout)"
            for worker in owing
            if now - worker.moved_at > self.step_timeout_s
        }
        too_long = f"it has not loaded the model in {format_duration(self.load_timeout_s)} (--load-timeout)"
        return silent | {name: too_long for name, since in loading.items() if now - since > self.load_timeout_s}

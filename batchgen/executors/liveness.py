"""Liveness of workers: which of them have loaded, or computed nothing, for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from batchgen.core.units import format_duration
from batchgen.executors.worker_state import WorkerState


class Liveness:
    """Judges workers by what they get done, since one that hangs in a step goes on speaking.

    ``step_timeout_s`` is how long a worker may make no progress, ``load_timeout_s`` how long it may load its model:
    both as long as a user says. Time in which the driver itself stood still, and so did not ask, does not count.
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
        """Workers to be given up, and why; take in first what they have told. ``loading`` are others, as in ``late``.

        Of those that are ready, these have rows or are to stop.
        """
        now = self._clock()
        stood_still, self._asked_at = now - self._asked_at, now
        if stood_still > self.step_timeout_s / 2:
            for worker in workers:
                worker.moved_at = min(now, worker.moved_at + stood_still)
        owing = [worker for worker in workers if worker.tasks or worker.state == "leaving"]
        found = {
            worker.name: f"no step of it has ended in {format_duration(self.step_timeout_s)} (--step-timeout)"
            for worker in owing
            if now - worker.moved_at > self.step_timeout_s
        }
        too_long = f"it has not loaded the model in {format_duration(self.load_timeout_s)} (--load-timeout)"
        return found | {name: too_long for name, since in loading.items() if now - since > self.load_timeout_s}

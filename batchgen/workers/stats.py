"""Counts of all workers of a run: their sums in the shape of one engine's (``EngineStats``), and each worker's.

Phases are means over the workers, steps and tokens sums.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.report.usage import add_up
from batchgen.workers.worker_state import WorkerState

_RATE_TELLS = 10  # counts of a worker, about a second apart, over which its rate is taken
_MEANS = ("phase_s", "forward_prefill_s")

Numbers = Mapping[str, Any]


@dataclass(slots=True)
class _Entry:
    """The last reported counts of a worker's engine, and its last counts of ``tokens`` with their times."""

    worker: WorkerState
    place: str
    stats: Numbers = field(default_factory=dict)
    tokens: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_TELLS))

    def tell(self, stats: Numbers, now: float) -> None:
        self.stats = stats
        self.tokens.append((now, stats.get("num_prefill_tokens", 0) + stats.get("num_output_tokens", 0)))

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens, of prompts too."""
        if len(self.tokens) < 2:
            return 0.0
        (then, before), (now, after) = self.tokens[0], self.tokens[-1]
        return (after - before) / max(now - then, 1e-3)


class WorkersStats:
    """Counts of all workers. Only the driver's thread may call methods other than ``to_dict`` and ``live``.

    ``num_prefill_tokens`` and ``num_output_tokens`` are sums over workers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_prefill_tokens = 0
        self.num_output_tokens = 0
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def join(self, worker: WorkerState, place: str) -> None:
        """A worker has joined."""
        self._entries[worker.name] = _Entry(worker, place)

    def tell(self, name: str, stats: Numbers) -> None:
        """Take in the newest counts of a worker that has joined."""
        entry, now = self._entries[name], self._clock()
        for count in ("num_prefill_tokens", "num_output_tokens"):
            setattr(self, count, getattr(self, count) + stats.get(count, 0) - entry.stats.get(count, 0))
        entry.tell(stats, now)

    def to_dict(self) -> dict[str, Any]:
        """Sums over workers, the largest of ``max_*``, means of times; also ``workers`` and ``mean_workers``.

        ``workers`` has each worker's numbers under NAME@PLACE: a later run with the same key adds to them.
        """
        entries = list(self._entries.values())
        total: dict[str, Any] = {}
        for entry in entries:
            total = add_up(total, entry.stats)
        for name in ("idle_s", "series"):
            total.pop(name, None)
        totals = [self._totals(entry) for entry in entries]
        began_at = min((entry.worker.joined_at for entry in entries), default=0.0)
        span_s = max((entry.worker.ended_at or self._clock() for entry in entries), default=0.0) - began_at
        mean_workers = sum(worker["present_s"] for worker in totals) / span_s if totals and span_s > 0 else 1.0
        for name in _MEANS:
            if name in total:
                total[name] = _divided(total[name], mean_workers)
        workers = {f"{worker['name']}@{worker['place']}": worker for worker in totals}
        return total | {"workers": workers, "mean_workers": mean_workers}

    def live(self) -> list[dict[str, Any]]:
        """The current workers: name, place, state, rows, tokens_per_s, in_flight."""
        return [
            {
                "name": entry.worker.name,
                "place": entry.place,
                "state": entry.worker.state,
                "rows": entry.worker.num_rows,
                "tokens_per_s": round(entry.tokens_per_s, 1),
                "in_flight": len(entry.worker.tasks),
            }
            for entry in list(self._entries.values())
            if entry.worker.ended_at is None
        ]

    def _totals(self, entry: _Entry) -> dict[str, Any]:
        worker, stats = entry.worker, entry.stats
        present_s = (self._clock() if worker.ended_at is None else worker.ended_at) - worker.joined_at
        return {
            "name": worker.name,
            "place": entry.place,
            "rows": worker.num_rows,
            "tokens": stats.get("num_output_tokens", 0),
            "present_s": present_s,
            "busy_s": max(present_s - stats.get("idle_s", 0.0), 0.0),
            "losses": int(worker.state == "lost"),
            "rows_given_again": worker.num_given_back,
            "tokens_taken_over": worker.num_tokens_taken_over,
        }


def _divided(value: Any, by: float) -> Any:
    return {name: part / by for name, part in value.items()} if isinstance(value, Mapping) else value / by

"""Counts of all workers of a run: together in the shape of one engine's (``EngineStats``), and of each by itself.

Times and series are such that a run on workers reads as a run of one large device: phases are means over the workers,
steps and tokens are sums. Nothing here slows down with the number of rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.executors.host import SERIES_S
from batchgen.executors.member import Member
from batchgen.executors.series import Columns, merged
from batchgen.report.usage import add_up

_RATE_TELLS = 10  # counts of a worker, about a second apart, over which its rate is taken
_MEANS = ("phase_s", "forward_prefill_s")


@dataclass(slots=True)
class _Told:
    """What a worker has told of its engine, and when."""

    place: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    series: Columns = field(default_factory=dict)
    tokens: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_TELLS))

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens, of prompts too."""
        if len(self.tokens) < 2:
            return 0.0
        (then, before), (now, after) = self.tokens[0], self.tokens[-1]
        return (after - before) / max(now - then, 1e-3)


class PoolStats:
    """``workers`` is that of the pool; a worker that is gone keeps its place. Its thread calls all but the readers.

    ``num_prefill_tokens`` and ``num_output_tokens`` are sums over workers.
    """

    def __init__(self, workers: Mapping[str, Member], clock: Callable[[], float] = time.monotonic) -> None:
        self.num_prefill_tokens = 0
        self.num_output_tokens = 0
        self._workers = workers
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._most_at_once = 0
        self._series: dict[str, Any] = {}
        self._merged_at = -SERIES_S

    def greet(self, name: str, place: str) -> None:
        """A worker has joined the pool."""
        self._told[name] = _Told(place)
        present = sum(worker.ended_at is None for worker in self._workers.values())
        self._most_at_once = max(self._most_at_once, present)

    def tell(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take in the newest counts of a worker that has joined; the instants of its series are ages."""
        told, now = self._told[name], self._clock()
        stats = dict(stats)
        if series := stats.pop("series", None):
            told.series = {**series, "at": [now - age for age in series["at"]]}
        for count in ("num_prefill_tokens", "num_output_tokens"):
            more = stats.get(count, 0) - told.stats.get(count, 0)
            setattr(self, count, getattr(self, count) + more)
        told.stats = stats
        told.tokens.append((now, stats.get("num_prefill_tokens", 0) + stats.get("num_output_tokens", 0)))

    def to_dict(self) -> dict[str, Any]:
        """Sums over workers, the largest of ``max_*``, means of times; also ``workers`` and ``mean_workers``.

        ``workers`` has the numbers of each under its name and place: those of a later run add up with them.
        """
        total: dict[str, Any] = {}
        told = list(self._told.items())
        for _, one in told:
            total = add_up(total, one.stats)
        total.pop("idle_s", None)
        present_s = {name: self._present_s(name) for name, _ in told}
        began_at = min((self._workers[name].joined_at for name, _ in told), default=0.0)
        span_s = max((self._workers[name].joined_at + present_s[name] for name, _ in told), default=0.0) - began_at
        mean_workers = sum(present_s.values()) / span_s if span_s > 0 else 1.0
        for name in _MEANS:
            if name in total:
                total[name] = _divided(total[name], mean_workers)
        series = self._merged_series()
        workers = {f"{name}@{one.place}": self._totals(name, one, present_s[name]) for name, one in told}
        total |= {"series": series} if series else {}
        return total | {"workers": workers, "mean_workers": mean_workers}

    def _merged_series(self) -> dict[str, Any]:
        """The series of all workers, as new as they tell theirs, and at the end whole: merging takes a while."""
        now = self._clock()
        has_ended = all(worker.ended_at is not None for worker in self._workers.values())
        if has_ended or now - self._merged_at >= SERIES_S:
            parts = [one.series for one in list(self._told.values()) if one.series]
            self._series, self._merged_at = merged(parts, max(self._most_at_once, 1)), now
        return self._series

    def live(self) -> list[dict[str, Any]]:
        """Those that are here: name, place, state, rows, tokens_per_s, in_flight."""
        return [
            {
                "name": name,
                "place": one.place,
                "state": worker.state,
                "rows": worker.num_rows,
                "tokens_per_s": round(one.tokens_per_s, 1),
                "in_flight": len(worker.tasks),
            }
            for name, one in list(self._told.items())
            if (worker := self._workers[name]).ended_at is None
        ]

    def _present_s(self, name: str) -> float:
        worker = self._workers[name]
        ended_at = self._clock() if worker.ended_at is None else worker.ended_at
        return ended_at - worker.joined_at

    def _totals(self, name: str, one: _Told, present_s: float) -> dict[str, Any]:
        worker = self._workers[name]
        return {
            "name": name,
            "place": one.place,
            "rows": worker.num_rows,
            "tokens": one.stats.get("num_output_tokens", 0),
            "present_s": present_s,
            "busy_s": max(present_s - one.stats.get("idle_s", 0.0), 0.0),
            "losses": int(worker.state == "lost"),
            "rows_given_again": worker.num_given_back,
            "tokens_taken_over": worker.num_tokens_taken_over,
        }


def _divided(value: Any, by: float) -> Any:
    return {name: part / by for name, part in value.items()} if isinstance(value, Mapping) else value / by

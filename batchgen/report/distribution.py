"""Percentiles and histograms of a stream of values, in memory that does not grow with the stream."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

PERCENTS = (50, 90, 99)
_BUCKETS_PER_E = 100  # buckets one percent wide
_HISTOGRAM_BINS = 30

Value = TypeVar("Value", int, float)


def percentile(counts: Iterable[tuple[Value, int]], num_values: int, percent: int) -> Value | None:
    """The value that ``percent`` % of all do not exceed, None of no values; ``counts`` holds values in order."""
    rank = -(-num_values * percent // 100)
    for value, number in counts:
        rank -= number
        if rank <= 0:
            return value
    return None


class Distribution:
    """Positive values kept as counts in buckets one percent wide, so that percentiles are right within 1 %."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()  # by bucket; values of zero and less are in bucket -inf

    def add(self, value: float) -> None:
        self._counts[round(math.log(value) * _BUCKETS_PER_E) if value > 0 else -math.inf] += 1

    def percentiles(self) -> dict[str, float | None]:
        """p50, p90 and p99."""
        counts, total = sorted(self._counts.items()), self._counts.total()
        buckets = {f"p{percent}": percentile(counts, total, percent) for percent in PERCENTS}
        return {key: None if b is None else round(math.exp(b / _BUCKETS_PER_E), 6) for key, b in buckets.items()}

    def histogram(self) -> dict[str, list[float]]:
        """At most 30 bins of equal width on a logarithmic axis: ``edges``, one more than ``counts``."""
        buckets = {int(bucket): number for bucket, number in self._counts.items() if bucket > -math.inf}
        if not buckets:
            return {"edges": [], "counts": []}
        low, high = min(buckets), max(buckets) + 1
        width = max(1, math.ceil((high - low) / _HISTOGRAM_BINS))
        counts = [0.0] * math.ceil((high - low) / width)
        for bucket, number in buckets.items():
            counts[(bucket - low) // width] += number
        edges = [math.exp((low + i * width - 0.5) / _BUCKETS_PER_E) for i in range(len(counts) + 1)]
        return {"edges": [float(f"{edge:.4g}") for edge in edges], "counts": counts}

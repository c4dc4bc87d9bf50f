"""What the finished rows of a run add up to: counts, token totals, distributions, the slowest rows.

It takes output records and dead letters as they are written, one by one, in memory that does not grow with them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.config.job import RECORD_KEYS

LATENCIES = ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s")
NUM_SLOWEST = 10
_BUCKETS_PER_E = 100  # buckets one percent wide
_HISTOGRAM_BINS = 30


class Distribution:
    """Positive values kept as counts in buckets one percent wide: bounded memory, percentiles within 1 %."""

    def __init__(self) -> None:
        self._counts: Counter[int | None] = Counter()

    def add(self, value: float) -> None:
        """Count one value; zero and less are kept apart."""
        self._counts[round(math.log(value) * _BUCKETS_PER_E) if value > 0 else None] += 1

    def percentile(self, share: float) -> float | None:
        """The value that ``share`` of all (of one) do not exceed; None while there are none."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts, key=lambda b: -math.inf if b is None else b):
            rank -= self._counts[bucket]
            if rank <= 0:
                return 0.0 if bucket is None else round(math.exp(bucket / _BUCKETS_PER_E), 6)
        return None

    def percentiles(self) -> dict[str, float | None]:
        """p50, p90 and p99."""
        return {f"p{share}": self.percentile(share / 100) for share in (50, 90, 99)}

    def histogram(self) -> dict[str, list[float]]:
        """At most 30 bins of equal width on a logarithmic axis: ``edges``, one more than ``counts``."""
        known = {bucket: count for bucket, count in self._counts.items() if bucket is not None}
        if not known:
            return {"edges": [], "counts": []}
        low, high = min(known), max(known) + 1
        width = max(1, math.ceil((high - low) / _HISTOGRAM_BINS))
        counts = [0] * math.ceil((high - low) / width)
        for bucket, count in known.items():
            counts[(bucket - low) // width] += count
        edges = [math.exp((low + i * width - 0.5) / _BUCKETS_PER_E) for i in range(len(counts) + 1)]
        return {"edges": [float(f"{edge:.4g}") for edge in edges], "counts": [float(c) for c in counts]}


@dataclass
class RowTotals:
    """What the rows add up to. ``expected`` names the column whose text an output is compared with, if any."""

    expected: str | None = None
    num_results: int = 0
    num_untimed: int = 0  # results without timings
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    correct: int = 0
    compared: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Distribution] = field(default_factory=lambda: {name: Distribution() for name in LATENCIES})
    prompt_lengths: Distribution = field(default_factory=Distribution)
    completion_lengths: Distribution = field(default_factory=Distribution)
    _slowest: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)

    def add_result(self, record: Mapping[str, Any]) -> None:
        """Take in an output record; one of older OpenAI batch outputs has no timings."""
        usage, timings = record["usage"], record.get("timings", {})
        self.num_results += 1
        self.num_untimed += not timings
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.prompt_lengths.add(usage["prompt_tokens"])
        self.completion_lengths.add(usage["completion_tokens"])
        self.cached_tokens += timings.get("cached_tokens", 0)
        self.preemptions += timings.get("preemptions", 0)
        self.finish_reasons[record["finish_reason"]] += 1
        for name in self.latencies.keys() & timings.keys():
            self.latencies[name].add(timings[name])
        if "total_s" in timings:
            self._note_slow(record, usage, timings)
        kept = f"input_{self.expected}" if self.expected in RECORD_KEYS else self.expected  # as outputs name it
        if kept is not None and record.get(kept) is not None:
            self.compared += 1
            self.correct += record.get("text", "").strip() == str(record[kept]).strip()

    def add_error(self, dead_letter: Mapping[str, Any]) -> None:
        """Take in a line of ``errors.jsonl``; an OpenAI error file nests the code."""
        self.errors[(dead_letter.get("error") or dead_letter)["code"]] += 1

    @property
    def slowest(self) -> list[dict[str, Any]]:
        """The rows with the longest ``total_s``, longest first."""
        return [row for _, _, row in sorted(self._slowest, key=lambda item: item[:2], reverse=True)]

    def histograms(self) -> dict[str, Any]:
        """Of token counts and latencies, by name."""
        lengths = {"prompt_tokens": self.prompt_lengths, "completion_tokens": self.completion_lengths}
        chosen = {name: self.latencies[name] for name in ("ttft_s", "tpot_s", "total_s")}
        return {name: distribution.histogram() for name, distribution in (lengths | chosen).items()}

    def _note_slow(self, record: Mapping[str, Any], usage: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        if len(self._slowest) == NUM_SLOWEST and timings["total_s"] <= self._slowest[0][0]:
            return
        row = {name: record.get(name) for name in ("id", "index")}
        row |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        row |= {name: timings.get(name) for name in ("queue_s", "prefill_s", "decode_s", "total_s", "preemptions")}
        heapq.heappush(self._slowest, (timings["total_s"], -self.num_results, row))
        if len(self._slowest) > NUM_SLOWEST:
            heapq.heappop(self._slowest)

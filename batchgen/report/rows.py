"""Totals over a run's finished rows: counts, tokens, distributions and the slowest rows.

Output records and lines of ``errors.jsonl`` are added one by one; memory does not grow with the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

from batchgen.core.logprobs import is_packed, numbers_of
from batchgen.report.accuracy import Accuracy, Finder

LATENCIES = ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s")
_LENGTHS = ("prompt_tokens", "completion_tokens")
_HISTOGRAMS = (*_LENGTHS, "ttft_s", "tpot_s", "total_s")
_SLOW_TIMINGS = ("queue_s", "prefill_s", "decode_s", "total_s", "preemptions")
_NUM_SLOWEST = 10
_MIN_TOKENS = {"decode_s": 1, "tpot_s": 2}  # that a row needs for a meaningful latency
PERCENTS = (50, 90, 99)
_BUCKETS_PER_E = 100  # buckets one percent wide
_HISTOGRAM_BINS = 30

Value = TypeVar("Value", int, float)


def percentile(counts: Iterable[tuple[Value, int]], num_values: int, percent: int) -> Value | None:
    """The least value that ``percent`` % of the values do not exceed, or None; ``counts`` is in order of value."""
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


@dataclass
class RowTotals:
    """Totals of rows; for ``expected``, ``answer`` and ``has_labels`` see ``Accuracy``.

    ``tokens`` has the report's kinds; ``num_copies`` copies have ``copied_tokens``, ``num_reused`` kept rows
    ``reused_tokens``.
    """

    expected: Finder | None = None
    answer: str | None = None
    has_labels: bool = False
    num_results: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    num_copies: int = 0
    copied_tokens: Counter[str] = field(default_factory=Counter)
    num_reused: int = 0
    reused_tokens: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    num_structured: int = 0
    completeness: Counter[bool] = field(default_factory=Counter)  # of samples with structured outputs
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    distributions: dict[str, Distribution] = field(
        default_factory=lambda: {name: Distribution() for name in (*_LENGTHS, *LATENCIES)}
    )
    slowest: list[dict[str, Any]] = field(default_factory=list)  # longest total_s first
    num_scored_tokens: int = 0  # of prompts, with prompt_logprobs
    sum_logprobs: float = 0.0

    def __post_init__(self) -> None:
        self.accuracy = self.expected and Accuracy(self.expected, self.answer, self.has_labels)

    def add_result(self, record: Mapping[str, Any]) -> None:
        """Take in an output record.

        Only computed rows have latencies: copies do not, nor rows that an earlier invocation computed almost to the
        end.
        """
        lengths, timings = {name: record["usage"][name] for name in _LENGTHS}, record["timings"]
        is_computed, cached = timings["prefill_s"] > 0, timings["cached_tokens"]
        self.num_results += 1
        self.preemptions += timings["preemptions"]
        tokens = {name.removesuffix("_tokens"): count for name, count in lengths.items()}
        if timings.get("reused"):
            self.num_reused += 1
            self.reused_tokens.update(tokens)
        elif not is_computed and cached == tokens["prompt"]:
            self.num_copies += 1
            self.copied_tokens.update(tokens)
            cached = 0
        self.tokens.update(tokens, cached=cached)
        for name, distribution in self.distributions.items():
            if name in _LENGTHS:
                distribution.add(lengths[name])
            elif is_computed and lengths["completion_tokens"] >= _MIN_TOKENS.get(name, 0):
                distribution.add(timings[name])
        is_slow = len(self.slowest) < _NUM_SLOWEST or timings["total_s"] > self.slowest[-1]["total_s"]
        if is_computed and is_slow:
            row = {name: record.get(name) for name in ("id", "index")}
            row |= lengths | {name: timings[name] for name in _SLOW_TIMINGS}
            self.slowest = sorted([*self.slowest, row], key=itemgetter("total_s"), reverse=True)[:_NUM_SLOWEST]
        samples = record.get("samples") or [record]
        reasons = [sample["finish_reason"] for sample in samples if "finish_reason" in sample]
        self.finish_reasons.update(record.get("finish_reasons") or reasons)
        complete = [sample["complete"] for sample in samples if sample.get("complete") is not None]
        self.completeness.update(complete)
        self.num_structured += bool(complete)
        if self.accuracy is not None:
            self.accuracy.add(record)
        if record.get("perplexity") is not None:
            tokens = record["prompt_logprobs"]
            logprobs = numbers_of(tokens) if is_packed(tokens) else [token["logprob"] for token in tokens]
            self.num_scored_tokens += len(logprobs)
            self.sum_logprobs += math.fsum(logprobs)

    def add_error(self, line: Mapping[str, Any]) -> None:
        """Take in a line of ``errors.jsonl``; an OpenAI error file nests the code."""
        self.errors[(line.get("error") or line)["code"]] += 1

    def report_section(self) -> dict[str, Any]:
        """The keys of a report that the rows alone determine; see ``build.KEYS``."""
        failed = self.errors.total()
        section: dict[str, Any] = {
            "rows": {"total": self.num_results + failed, "done": self.num_results, "failed": failed},
            "tokens": {name: self.tokens[name] for name in ("prompt", "cached", "completion")}
            | {"total": self.tokens["prompt"] + self.tokens["completion"]},
            "duplicates": self.num_copies,
            "copied_tokens": {name: self.copied_tokens[name] for name in ("prompt", "completion")},
            "errors": dict(sorted(self.errors.items())),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "latency_s": {name: self.distributions[name].percentiles() for name in LATENCIES},
            "histograms": {name: self.distributions[name].histogram() for name in _HISTOGRAMS},
            "slowest": self.slowest,
            "preemptions": self.preemptions,
        }
        if self.num_reused:
            names = ("prompt", "completion")
            section["reused"] = {"rows": self.num_reused, **{name: self.reused_tokens[name] for name in names}}
        if self.num_scored_tokens:
            mean = self.sum_logprobs / self.num_scored_tokens
            section["perplexity"] = {"value": round(math.exp(-mean), 6), "tokens": self.num_scored_tokens}
        section["compared"] = f"{self.accuracy.digest:016x}" if self.accuracy and self.accuracy.total else None
        if self.accuracy is not None:
            section["accuracy"] = self.accuracy.section()
        return section

"""Totals over a run's finished rows: counts, tokens, distributions and the slowest rows.

Output records and lines of ``errors.jsonl`` are added one by one; memory does not grow with the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.report.distribution import Distribution, Largest

LATENCIES = ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s")
_LENGTHS = ("prompt_tokens", "completion_tokens")
_HISTOGRAMS = (*_LENGTHS, "ttft_s", "tpot_s", "total_s")
_SLOW_TIMINGS = ("queue_s", "prefill_s", "decode_s", "total_s", "preemptions")
_NUM_SLOWEST = 10


@dataclass
class RowTotals:
    """Totals of rows. ``expected`` is the field of a record that its text is compared with, if any.

    ``has_complete`` is whether a ``complete`` in a record is the record's own, and not a column that was kept.
    """

    expected: str | None = None
    has_complete: bool = True
    num_results: int = 0
    num_untimed: int = 0  # results without timings
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    correct: int = 0
    compared: int = 0
    num_structured: int = 0
    num_incomplete: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    distributions: dict[str, Distribution] = field(
        default_factory=lambda: {name: Distribution() for name in (*_LENGTHS, *LATENCIES)}
    )
    _slowest: Largest[dict[str, Any]] = field(default_factory=lambda: Largest(_NUM_SLOWEST))

    def add_result(self, record: Mapping[str, Any]) -> None:
        """Take in an output record; one of older OpenAI batch outputs has no timings."""
        usage, timings = record["usage"], record.get("timings", {})
        self.num_results += 1
        self.num_untimed += not timings
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cached_tokens += timings.get("cached_tokens", 0)
        self.preemptions += timings.get("preemptions", 0)
        self.finish_reasons[record["finish_reason"]] += 1
        for name, distribution in self.distributions.items():
            measured = usage if name in _LENGTHS else timings
            if name in measured:
                distribution.add(measured[name])
        if "total_s" in timings and self._slowest.has_room(timings["total_s"]):
            row = {name: record.get(name) for name in ("id", "index")}
            row |= {name: usage[name] for name in _LENGTHS} | {name: timings.get(name) for name in _SLOW_TIMINGS}
            self._slowest.add(timings["total_s"], row)
        complete = {sample.get("complete") for sample in record.get("samples") or [record]} - {None}
        if complete and self.has_complete:
            self.num_structured += 1
            self.num_incomplete += False in complete
        if self.expected is not None and record.get(self.expected) is not None:
            self.compared += 1
            self.correct += record.get("text", "").strip() == str(record[self.expected]).strip()

    def add_error(self, line: Mapping[str, Any]) -> None:
        """Take in a line of ``errors.jsonl``; an OpenAI error file nests the code."""
        self.errors[(line.get("error") or line)["code"]] += 1

    def report_section(self) -> dict[str, Any]:
        """The keys of a report that the rows alone determine; see ``build.KEYS``."""
        failed = self.errors.total()
        found: dict[str, Any] = {
            "rows": {"total": self.num_results + failed, "done": self.num_results, "failed": failed},
            "errors": dict(sorted(self.errors.items())),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "latency_s": {name: self.distributions[name].percentiles() for name in LATENCIES},
            "histograms": {name: self.distributions[name].histogram() for name in _HISTOGRAMS},
            "slowest": self._slowest.items(),
            "preemptions": self.preemptions,
        }
        if self.expected is not None:
            share = round(self.correct / self.compared, 6) if self.compared else None
            found["accuracy"] = {"correct": self.correct, "total": self.compared, "exact_match": share}
        return found

"""How long a surveyed job will take: what is known of its output lengths, and rates from an earlier run's report.

Every figure carries its basis, and where there is none there is no figure. Calibration, which needs torch, is in
``plan_calibrate``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.plan.survey import Survey

NUM_QUANTILES = 64


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """What rows without a fixed length are expected to generate.

    ``values`` are equally likely lengths, before each row's own limit; empty means that only the limit is known.
    ``basis`` says where they come from, in words for a person.
    """

    basis: str
    values: tuple[int, ...] = ()

    @classmethod
    def around(cls, basis: str, mean: float) -> OutputLengths:
        """Every row as long as the mean."""
        return cls(basis, (max(1, round(mean)),))

    @classmethod
    def observed(cls, finished: list[int], unfinished: list[int]) -> OutputLengths | None:
        """From rows that were run, some of them not to their end; None if none of them ended.

        With unfinished ones lengths are taken to be geometric, of the rate at which tokens seen were last ones.
        """
        if not finished:
            return None
        basis = f"{len(finished)} sampled rows run to their end"
        if not unfinished:
            return cls(basis, tuple(sorted(finished)))
        mean = (sum(finished) + sum(unfinished)) / len(finished)
        shares = ((i + 0.5) / NUM_QUANTILES for i in range(NUM_QUANTILES))
        return cls(basis, tuple(max(1, round(-mean * math.log1p(-share))) for share in shares))

    def of_row(self, number: int, max_output: int, is_fixed: bool) -> int:
        """The length to reckon with for the ``number``-th row of a sample; spread evenly over the values."""
        if is_fixed or not self.values:
            return max_output
        return min(self.values[number * 7919 % len(self.values)], max_output)  # a prime: neighbours differ

    def total(self, survey: Survey) -> int:
        """Output tokens of all rows together."""
        return round(
            sum(self._mean(max_output, is_fixed) * count for (max_output, is_fixed), count in survey.outputs.items())
        )

    def _mean(self, max_output: int, is_fixed: bool) -> float:
        if is_fixed or not self.values:
            return max_output
        return sum(min(value, max_output) for value in self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds a run would take from start to end, and of them those of the engine; ``basis`` for a person."""

    basis: str
    wall_s: float
    engine_s: float


def comparable(report: Mapping[str, Any] | None, model: str, processor: str) -> Mapping[str, Any] | None:
    """The report if it is of this model on this machine and has anything to tell, else None."""
    if report is None or report["model"] != model or report["machine"]["processor"] != processor:
        return None
    return report if report["tokens"]["completion"] and report["generate_s"] > 0 else None


def limits(survey: Survey) -> OutputLengths:
    """Every row at its limit: what is known before any has run."""
    if all(is_fixed for _, is_fixed in survey.outputs):
        return OutputLengths("fixed by ignore_eos")
    return OutputLengths("max_tokens, an upper bound")


def reported_lengths(report: Mapping[str, Any]) -> OutputLengths:
    """Output lengths as in an earlier run."""
    mean = report["tokens"]["completion"] / report["rows"]["done"]
    return OutputLengths.around(f"the mean of the last run, {mean:,.1f}", mean)


def estimate_from_report(report: Mapping[str, Any], survey: Survey, output_tokens: int) -> Estimate:
    """The job at the earlier run's rate: all tokens, prompt and output, over its seconds of generating."""
    rate = report["tokens"]["total"] / report["generate_s"]
    engine_s = (survey.prompt_tokens + output_tokens) / rate
    load_s = report["seconds"].get("load", 0.0) / report["sessions"]
    return Estimate("the last run's rate", load_s + survey.read_s + engine_s, engine_s)

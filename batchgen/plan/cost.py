"""What a step costs on this machine, and what a job of given lengths then takes.

The engine's own scheduler is played out with no model behind it, each step charged a fitted cost; so packing, the
token budget, memory and the tail count as they will. It measures nothing itself (``plan_calibrate`` does).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.simulation import StepWork, simulate
from batchgen.plan.estimate import OutputLengths
from batchgen.plan.survey import Lengths

SIMULATED_OUTPUTS = 400_000  # tokens: what can be played out in a few seconds
_KNEES = (32, 128)  # token counts where a step's cost changes its slope: first weights are read, then products count
_FIT_ROUNDS = 4
Planned = tuple[Lengths, int]  # a row, and how many tokens it is going to generate


def _features(work: StepWork) -> tuple[float, ...]:
    """What a step's seconds are a sum of."""
    return (1.0, *(min(work.tokens, knee) for knee in _KNEES), work.tokens, work.logits, work.attended)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per unit of each of ``_features``, none of them negative."""

    weights: tuple[float, ...]

    @classmethod
    def fit(cls, steps: Many[tuple[StepWork, float]]) -> StepCost:
        """Least squares over measured (work, seconds), each error taken relative to what the step should take.

        Relative to what it did take would favour the fast steps, where a busy machine makes some of them slow.
        """
        features = np.array([_features(work) for work, _ in steps], dtype=np.float64)
        seconds = np.array([seconds for _, seconds in steps])
        expected = seconds
        for _ in range(_FIT_ROUNDS):
            weights = _non_negative(features / expected[:, None], seconds / expected)
            expected = np.maximum(features @ weights, seconds.min() / 10)
        return cls(tuple(weights.tolist()))

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return sum(w * f for w, f in zip(self.weights, _features(work), strict=True))


def _non_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with the negative coefficients taken out, worst first: what they stood for is noise."""
    kept = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, kept], target, rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    weights = np.zeros(features.shape[1])
    weights[kept] = np.maximum(found, 0)
    return weights


@dataclass(frozen=True, slots=True)
class Machine:
    """How an engine of certain sizes fares here."""

    sizes: SchedulerConfig
    look_ahead: int
    cost: StepCost

    def engine_s(self, sample: Many[Lengths], num_rows: int, lengths: OutputLengths, shared: int = 0) -> float:
        """Seconds of all steps for ``num_rows`` rows like those of the sample, which begin with ``shared`` same tokens.

        Rows beyond the sample are charged what its latter half adds: that is free of the start, and of the tail too.
        """
        rows = [(row, lengths.of_row(i, row.max_output, row.is_fixed)) for i, row in enumerate(sample)]
        few = self._affordable(rows)
        whole_s = self.simulate(rows[:few], shared)
        if few == num_rows or few < 2:
            return whole_s
        half = few // 2
        return whole_s + (whole_s - self.simulate(rows[:half], shared)) / (few - half) * (num_rows - few)

    def simulate(self, rows: Many[Planned], shared: int = 0) -> float:
        """Seconds of the steps that run these rows; those that can never run are left out, as in the engine.

        Prompts begin with ``shared`` same tokens, which the scheduler's prefix cache finds as it would in a run.
        """
        requests = ((_request(key, lengths, shared), output) for key, (lengths, output) in enumerate(rows))
        steps = simulate(Scheduler(self.sizes), requests, self.look_ahead)
        return sum(self.cost.step_s(work) for work, _ in steps)

    def _affordable(self, rows: Many[Planned]) -> int:
        """How many of the rows can be played out in reasonable time."""
        totals = np.cumsum([output for _, output in rows])
        within = int(np.searchsorted(totals, SIMULATED_OUTPUTS, side="right"))
        return min(len(rows), max(within, 2 * self.sizes.max_num_seqs))


def _request(key: int, lengths: Lengths, shared: int) -> Request:
    """A made-up prompt of the given length that begins with ``shared`` same tokens."""
    own = max(lengths.prompt - shared, 0)
    prompt = (0,) * (lengths.prompt - own) + (key + 1,) * own
    return Request(key, prompt, SamplingParams(max_tokens=max(1, lengths.max_output)))

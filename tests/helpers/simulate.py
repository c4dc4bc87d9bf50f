"""The scheduler played out without a model: what admission does to the time of a job, for lengths of five kinds.

``python tests/helpers/simulate.py`` prints the gain of known lengths. A step is taken to cost ``StepCost``; outputs
have the lengths drawn for them. Everything else is the engine's own: the scheduler, and how far it looks ahead.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simulation import StepWork, advance, simulate

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.engine.sizes import SchedulerConfig


@dataclass(frozen=True)
class Row:
    """Tokens of a prompt and of its answer; ``max_tokens`` is what the scheduler is told, the length itself if 0."""

    prompt: int
    output: int
    max_tokens: int = 0

    def request(self, key: int) -> Request:
        """Every prompt is of its own tokens: nothing is shared."""
        params = SamplingParams(max_tokens=self.max_tokens or self.output, ignore_eos=not self.max_tokens)
        return Request(key, (key,) * self.prompt, params)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a fixed part, one for each token, one for each position a token attends to.

    ``mixed`` comes on top where there are other tokens than the newest of each sequence. The defaults are of the order
    of LFM2-350M on two CPU cores: reading the weights, multiplying, attention.
    """

    fixed: float = 0.04
    token: float = 0.0012
    attended: float = 1.5e-7
    mixed: float = 0.0

    def of(self, work: StepWork) -> float:
        """Seconds of one step."""
        launches = self.mixed if work.tokens > work.logits else 0.0
        return self.fixed + launches + self.token * work.tokens + self.attended * work.attended


GPU = StepCost(fixed=0.0008, token=1.2e-6, attended=3e-9, mixed=0.003)  # of the order of an H200's, with graphs


@dataclass
class Played:
    """What came of it. ``tail_s`` is the time after the last row was admitted."""

    steps: int = 0
    seconds: float = 0.0
    tail_s: float = 0.0
    num_tokens: int = 0
    num_ended: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0


def play(config: SchedulerConfig, rows: list[Row], cost: StepCost = StepCost(), *, check: bool = False) -> Played:
    """Run the rows to their end, pulling them in as ``Engine.run`` does."""
    scheduler, played = Scheduler(config), Played()
    requests = ((row.request(key), row.output) for key, row in enumerate(rows))
    for work, ended in simulate(scheduler, requests, 8 * config.max_num_seqs):
        seconds = cost.of(work)
        played.steps += 1
        played.seconds += seconds
        played.tail_s = 0.0 if scheduler.waiting else played.tail_s + seconds
        played.num_tokens += work.tokens
        played.num_ended += len(ended)
        if check:
            scheduler.check()
    played.num_preemptions = scheduler.num_preemptions
    played.num_recomputed = scheduler.num_recomputed_tokens
    return played


def one_step(scheduler: Scheduler, ends: Callable[[Sequence], bool] = lambda s: False) -> Schedule:
    """One step without a model, checked; a sequence ends at max_tokens or when ``ends`` says so."""
    scheduler.check()
    schedule = scheduler.schedule()
    advance(scheduler, schedule, lambda s: s.max_new_tokens <= 0 or ends(s))
    scheduler.check()
    return schedule


def _lognormal(rng: random.Random) -> int:
    """Answers to grade-school maths: 25 to 300 tokens, about 110 on the mean."""
    return min(300, max(25, round(rng.lognormvariate(4.6, 0.5))))


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "constant": lambda rng: 128,
    "uniform": lambda rng: rng.randint(1, 256),
    "exponential": lambda rng: 1 + min(1000, int(rng.expovariate(1 / 128))),
    "bimodal": lambda rng: 400 if rng.random() < 0.2 else 40,
    "GSM8K-like": _lognormal,
}


def rows_of(kind: str, count: int, *, seed: int = 0, max_tokens: int = 0) -> list[Row]:
    """Rows with outputs of one of ``DISTRIBUTIONS`` and prompts of 40 to 160 tokens."""
    rng = random.Random(seed)
    return [Row(rng.randint(40, 160), DISTRIBUTIONS[kind](rng), max_tokens) for _ in range(count)]


def config_of(
    budget: int, num_seqs: int = 128, *, num_blocks: int = 5000, longest_first: bool = True, forecast: bool = True
) -> SchedulerConfig:
    """The engine's sizes for the CPU, with memory for everything unless told otherwise."""
    return SchedulerConfig(
        budget, num_seqs, 32, num_blocks, 10**5, longest_first=longest_first, forecast_memory=forecast
    )


def table(count: int = 1319, seeds: int = 3) -> Iterator[str]:
    """Lines: seconds in order of arrival and longest first, what that saves, of steps too, and the tail of each.

    Steps saved are what would be saved on a device where a step costs the same however many tokens it has.
    """
    yield f"{count} rows, 128 slots, means of {seeds} draws; {StepCost()}"
    yield f"{'outputs':<12}{'budget':>7}{'arrival':>10}{'longest':>10}{'saved':>8}{'steps':>8}{'tails':>18}"
    for kind in DISTRIBUTIONS:
        for budget in (256, 512):
            sums = {False: Played(), True: Played()}
            for seed in range(seeds):
                for longest_first, total in sums.items():
                    played = play(config_of(budget, longest_first=longest_first), rows_of(kind, count, seed=seed))
                    total.seconds += played.seconds / seeds
                    total.tail_s += played.tail_s / seeds
                    total.steps += played.steps
            arrival, longest = sums[False], sums[True]
            times = f"{arrival.seconds:>8.1f} s{longest.seconds:>8.1f} s"
            saved = f"{1 - longest.seconds / arrival.seconds:>8.1%}{1 - longest.steps / arrival.steps:>8.1%}"
            tails = f"{arrival.tail_s:.1f} -> {longest.tail_s:.1f} s"
            yield f"{kind:<12}{budget:>7}{times}{saved}{tails:>18}"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)

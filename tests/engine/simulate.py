"""The scheduler played out without a model: what admission does to the time of a job, for lengths of five kinds.

``python tests/engine/simulate.py`` prints the table. A step is taken to cost ``StepCost``; outputs have the lengths
drawn for them. Everything else is the engine's own: the scheduler, and how far it looks ahead.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from batchgen.engine.config import SchedulerConfig
from batchgen.engine.group import Group
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.records import Request, SamplingParams


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

    The defaults are of the order of LFM2-350M on two CPU cores: reading the weights, multiplying, attention.
    """

    fixed: float = 0.04
    token: float = 0.0012
    attended: float = 1.5e-7

    def of(self, schedule: Schedule) -> float:
        """Seconds of one step, asked before its tokens are booked."""
        attended = sum(n * s.num_computed_tokens + n * (n + 1) // 2 for s, n in schedule.entries)
        return self.fixed + self.token * schedule.num_tokens + self.attended * attended


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
    source = iter([(Group(row.request(key)).sequences[0], row.output) for key, row in enumerate(rows)])
    lengths: dict[Sequence, int] = {}
    more = True
    while True:
        while more and len(scheduler.waiting) < 8 * config.max_num_seqs:
            pulled = next(source, None)
            if pulled is None:
                more = False
                break
            lengths[pulled[0]] = pulled[1]
            assert scheduler.refusal(pulled[0]) is None
            scheduler.add(pulled[0])
        if not scheduler.has_work:
            break
        schedule = scheduler.schedule()
        seconds = cost.of(schedule)
        played.steps += 1
        played.seconds += seconds
        played.tail_s = 0.0 if scheduler.waiting else played.tail_s + seconds
        played.num_tokens += schedule.num_tokens
        played.num_ended += _advance(scheduler, schedule, lengths)
        if check:
            scheduler.check()
    played.num_preemptions = scheduler.num_preemptions
    played.num_recomputed = scheduler.num_recomputed_tokens
    return played


def _advance(scheduler: Scheduler, schedule: Schedule, lengths: dict[Sequence, int]) -> int:
    """The model's part: a token for every sequence that is due one; how many ended."""
    completing = schedule.completing
    scheduler.computed(schedule)
    ended = 0
    for sequence in completing:
        sequence.append(1, 0.0)
        if sequence.num_output_tokens == lengths[sequence]:
            scheduler.finish(sequence)
            ended += 1
    return ended


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

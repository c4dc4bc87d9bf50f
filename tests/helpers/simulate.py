"""The scheduler played out without a model: what admission does to the time of a job, for lengths of five kinds.

``python tests/helpers/simulate.py [WORKLOAD.jsonl]`` prints two tables: what it brings to know the lengths, and what it
brings to learn them, of a bench's workload file too. A step is taken to cost ``StepCost``; outputs have the lengths
drawn for them. Everything else is the engine's own: the scheduler, and how far it looks ahead.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.engine.sizes import SchedulerConfig
from batchgen.plan.simulation import StepWork, advance, simulate


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


def related_rows(count: int, correlation: float, *, seed: int = 0, max_tokens: int = 2000) -> list[Row]:
    """Rows whose prompt and answer lengths have logarithms with a correlation; the engine knows ``max_tokens`` only."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = rng.gauss(0, 1)
        output = correlation * prompt + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        num_prompt, num_output = (round(math.exp(m + 0.5 * drawn)) for m, drawn in ((4.4, prompt), (4.6, output)))
        rows.append(Row(num_prompt, num_output, max_tokens))
    return rows


def workload_rows(path: Path) -> list[Row]:
    """The rows of a bench's workload file, all with one ``max_tokens``."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    most = max(row["max_tokens"] for row in rows)
    return [Row(len(row["prompt_token_ids"]), row["max_tokens"], most) for row in rows]


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


def unknown_table(workloads: Mapping[str, Callable[[int], list[Row]]], seeds: int = 12) -> Iterator[str]:
    """Lines: seconds in order of arrival, and what is saved of them, and of steps, by learnt and by known lengths.

    A workload is rows by seed.
    """
    yield f"lengths unknown, budget 256, means of {seeds} draws"
    yield f"{'rows':<24}{'slots':>6}{'arrival':>10}{'learnt saves':>22}{'known saves':>22}"
    for name, draw in workloads.items():
        for num_seqs in (64, 128):
            sums = {way: Played() for way in ("arrival", "learnt", "known")}
            for seed in range(seeds):
                rows = draw(seed)
                told = [replace(row, max_tokens=0) for row in rows]
                for way, total in sums.items():
                    config = config_of(256, num_seqs, num_blocks=40_000, longest_first=way != "arrival")
                    played = play(config, told if way == "known" else rows)
                    total.seconds += played.seconds / seeds
                    total.steps += played.steps
            arrival = sums["arrival"]
            line = f"{name:<24}{num_seqs:>6}{arrival.seconds:>8.1f} s"
            for way in ("learnt", "known"):
                saved_s, saved_steps = 1 - sums[way].seconds / arrival.seconds, 1 - sums[way].steps / arrival.steps
                line += f"{saved_s:>8.2%} ({saved_steps:.1%} steps)"
            yield line


def _related(correlation: float, seed: int) -> list[Row]:
    return related_rows(1000, correlation, seed=seed)


def _shuffled(rows: list[Row], seed: int) -> list[Row]:
    return random.Random(seed).sample(rows, len(rows))


if __name__ == "__main__":
    drawn = {f"correlation {r}": partial(_related, r) for r in (-0.5, 0.0, 0.25, 0.5, 0.8)}
    given = {f"{Path(name).stem}, shuffled": partial(_shuffled, workload_rows(Path(name))) for name in sys.argv[1:]}
    for line in itertools.chain(table(), unknown_table(given | drawn)):
        print(line, flush=True)

"""The scheduler played out without a model: what admission does to the time of a job, for lengths of five kinds.

A step is taken to cost ``StepCost``; generated tokens are placeholders, and outputs have the lengths drawn for them.
Everything else is the engine's own: look-ahead, packing into steps, KV memory, the prefix cache and preemption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.schedule import Schedule
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence
from batchgen.engine.sizes import SchedulerConfig

_PLACEHOLDER = 0  # the id of every generated token


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: tokens, rows of logits, and positions that its tokens attend to."""

    tokens: int
    logits: int
    attended: int

    @classmethod
    def of(cls, schedule: Schedule) -> StepWork:
        """The work of a schedule that is not booked yet."""
        return cls(schedule.num_tokens, len(schedule.completing), schedule.num_attended())


def simulate(
    scheduler: Scheduler, requests: Iterable[tuple[Request, int]], look_ahead: int
) -> Iterator[tuple[StepWork, list[Sequence]]]:
    """Run (request, output length) pairs to their end; yields the work of each step and the sequences it finished.

    At most ``look_ahead`` requests wait at once. A request that could never run is left out, as in the engine.
    """
    source, lengths = iter(requests), dict[int, int]()
    while True:
        while len(scheduler.waiting) < look_ahead and (pulled := next(source, None)) is not None:
            request, lengths[request.key] = pulled
            for sequence in RequestState(request).sequences:
                if scheduler.refusal(sequence) is None:
                    scheduler.add(sequence)
        if not scheduler.has_work:
            return
        schedule = scheduler.schedule()
        work = StepWork.of(schedule)
        ended = advance(scheduler, schedule, lambda s: s.num_output_tokens >= lengths[s.request.key])
        yield work, ended


def advance(scheduler: Scheduler, schedule: Schedule, ends: Callable[[Sequence], bool]) -> list[Sequence]:
    """Book a schedule and append a token where one is due; finishes the sequences that ``ends`` names, returns them."""
    completing, _ = schedule.completing, schedule.starts
    scheduler.on_launched(schedule)
    finished = []
    for sequence in completing:
        sequence.token_ids.append(_PLACEHOLDER)
    scheduler.on_tokens_known(schedule)
    for sequence in completing:
        if ends(sequence):
            scheduler.finish(sequence)
            finished.append(sequence)
    return finished


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

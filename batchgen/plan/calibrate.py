"""Some seconds of real steps of this model on this machine, and what they say about a job. Imports torch.

Real rows of the job are run first, for their own mix of work and for the lengths of their answers; then made-up
batches of other sizes, so that a cost can be fitted over all a run will meet. No made-up prompt comes twice: the
engine would not compute it again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle

from batchgen.config.job import JobSpec
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine
from batchgen.engine.simulation import StepWork
from batchgen.plan.cost import Machine, StepCost
from batchgen.plan.estimate import Estimate, OutputLengths
from batchgen.plan.survey import PREFIX_BLOCK, SampledPrompt, Survey
from batchgen.run.loader import ModelInfo, load_engine

CALIBRATION_S = 10.0
_REAL_SHARE = 0.5  # of the time: real rows; the rest goes to made-up batches
_LEVELS = 6  # batch sizes the decode probe passes through


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learnt; ``lengths`` is None when no sampled row came to its end. ``load_s`` includes the first steps."""

    machine: Machine
    numerics: dict[str, str]
    load_s: float
    measured_s: float
    lengths: OutputLengths | None

    def estimate(self, survey: Survey, lengths: OutputLengths) -> Estimate:
        """The whole job: loading, reading, and the schedule played out over a sample of its rows."""
        num_rows, shared = survey.computed_rows, survey.shared_tokens_per_row
        engine_s = self.machine.engine_s(survey.sample.items, num_rows, lengths, shared)
        return Estimate(f"{self.measured_s:.0f} s of real steps", self.load_s + survey.read_s + engine_s, engine_s)


def calibrate(
    spec: JobSpec, info: ModelInfo, survey: Survey, *, began: float, seconds: float = CALIBRATION_S
) -> Calibration:
    """Load the model and run steps for about ``seconds``, one step of each kind at least.

    ``began`` is the monotonic instant before this module was imported: loading torch is part of a run too.
    Raises ModelError.
    """
    backend = load_engine(spec, info, step_by_step=True)
    engine = backend.engine
    assert isinstance(engine, Engine)
    probe = _Probe(engine)
    prompts = survey.sampled_prompts.items
    probe.run(_requests(prompts[:2], max_tokens=2), began)  # first steps compile kernels and touch memory
    probe.steps.clear()
    load_s = time.monotonic() - began
    start = time.monotonic()
    finished, unfinished = probe.run(_requests(prompts), start + _REAL_SHARE * seconds)
    lengths = [len(prompt.token_ids) for prompt in prompts] or [PREFIX_BLOCK]  # rows may only score
    made_up = _MadeUp(engine, info.config.vocab_size, lengths)
    while True:
        probe.run(made_up.prefill(), time.monotonic() + seconds / 10)
        probe.run(made_up.decode(), time.monotonic() + seconds / 3)
        probe.run(made_up.single(), time.monotonic() + seconds / 10)
        if time.monotonic() - start >= seconds:
            break
    return Calibration(
        machine=Machine(engine.config, engine.look_ahead, StepCost.fit(probe.steps)),
        numerics=backend.numerics,
        load_s=load_s,
        measured_s=time.monotonic() - start,
        lengths=OutputLengths.observed(finished, unfinished),
    )


@dataclass
class _Probe:
    """Runs requests on one engine, step by step, and keeps what each step did and took."""

    engine: Engine
    steps: list[tuple[StepWork, float]] = field(default_factory=list)

    def run(self, requests: Iterable[Request], until: float) -> tuple[list[int], list[int]]:
        """Output lengths of those that ended and of those that had not by the instant ``until``."""
        scheduler = self.engine.scheduler
        finished: list[int] = []
        fixed = set()
        for request in requests:
            refused = self.engine.submit(request)
            if refused is None and request.params.has_fixed_length:
                fixed.add(request.key)
        while scheduler.has_work:
            for result in self._step():
                if result.key not in fixed:
                    finished.append(len(result.token_ids))
            if time.monotonic() >= until:
                break
        running = [n for s in scheduler.unfinished() if s.request.key not in fixed and (n := s.num_output_tokens)]
        self._abandon()
        return finished, running

    def _step(self) -> list[Result]:
        tokens, logits, attended = self._counts()
        start = time.monotonic()
        results = self.engine.step()
        seconds = time.monotonic() - start
        now = self._counts()
        self.steps.append((StepWork(now[0] - tokens, now[1] - logits, now[2] - attended), seconds))
        return results

    def _counts(self) -> tuple[int, int, int]:
        stats = self.engine.stats
        return stats.num_prefill_tokens + stats.num_decode_tokens, stats.num_output_tokens, stats.num_attended

    def _abandon(self) -> None:
        """Forget what is under way."""
        scheduler = self.engine.scheduler
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
        while scheduler.waiting:
            scheduler.waiting.pop()


def _requests(prompts: Iterable[SampledPrompt], max_tokens: int | None = None) -> Iterator[Request]:
    """The sampled rows as requests, as they are or cut to ``max_tokens``."""
    for key, prompt in enumerate(prompts):
        most = prompt.params.max_tokens
        params = replace(prompt.params, max_tokens=min(most, max_tokens or most))
        yield Request(key, tuple(prompt.token_ids), params)


class _MadeUp:
    """Requests of random tokens, as long as real prompts."""

    def __init__(self, engine: Engine, vocab_size: int, lengths: Sequence[int]) -> None:
        self._sizes = engine.config
        self._vocab_size = vocab_size
        self._lengths = cycle(lengths)
        self._keys = count()
        self._rng = random.Random(0)

    def _request(self, length: int, max_tokens: int) -> Request:
        prompt = tuple(self._rng.choices(range(self._vocab_size), k=length))
        return Request(next(self._keys), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def prefill(self) -> Iterator[Request]:
        """About two full steps of prompts with one token each to generate."""
        left = 2 * self._sizes.max_num_batched_tokens
        while left > 0:
            length = next(self._lengths)
            left -= length
            yield self._request(length, 1)

    def decode(self) -> Iterator[Request]:
        """As many sequences as run at once, with short prompts, ending in groups: the batch shrinks by and by."""
        longest = max(1, 2 * self._sizes.max_num_batched_tokens // self._sizes.max_num_seqs)
        for number in range(self._sizes.max_num_seqs):
            yield self._request(min(next(self._lengths), longest), 2 + number % _LEVELS)

    def single(self) -> Iterator[Request]:
        """One alone."""
        yield self._request(next(self._lengths), 4)

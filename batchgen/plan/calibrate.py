"""Calibration: times real steps of the model for some seconds and predicts the time of a whole job. Imports torch.

Real rows of the job run first, for their mix of work and their output lengths; then made-up batches of other sizes, so
that the fitted cost covers every step size of a run. No made-up prompt occurs twice, or the engine would skip it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np

from batchgen.config.job import JobSpec
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine
from batchgen.engine.duplicates import Duplicates
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sizes import SchedulerConfig
from batchgen.plan.estimate import Estimate, ExpectedLengths, Forecast
from batchgen.plan.simulation import StepWork, simulate
from batchgen.plan.survey import PREFIX_BLOCK, Lengths, SampledPrompt, Survey
from batchgen.run.loader import ModelInfo, load_engine

CALIBRATION_S = 10.0
_REAL_SHARE = 0.5  # of the time; made-up batches take the rest
_LEVELS = 6  # batch sizes of the decode probe
_KNEES = (32, 128)  # token counts where the slope changes: a step first waits for weights, then for products
_FIT_ROUNDS = 4
_SIMULATED_OUTPUTS = 400_000  # tokens: some seconds of simulation


@dataclass(frozen=True, slots=True)
class StepCost:
    """Linear model of a step's seconds: a weight, not negative, for each of ``_features``."""

    weights: tuple[float, ...]

    @classmethod
    def fit(cls, steps: Sequence[tuple[StepWork, float]]) -> StepCost:
        """Least squares over measured (work, seconds), with errors relative to the predicted seconds.

        Relative to the measured seconds the fast steps would weigh too much, as a busy machine slows some steps down.
        Negative weights are noise: each round fits without those of the round before.
        """
        features = np.array([_features(work) for work, _ in steps], dtype=np.float64)
        seconds = np.array([seconds for _, seconds in steps])
        expected, kept = seconds, np.arange(features.shape[1])
        for _ in range(_FIT_ROUNDS):
            found = np.linalg.lstsq(features[:, kept] / expected[:, None], seconds / expected, rcond=None)[0]
            weights = np.zeros(features.shape[1])
            weights[kept] = np.maximum(found, 0)
            kept = kept[found > 0]
            expected = np.maximum(features @ weights, seconds.min() / 10)
        return cls(tuple(weights.tolist()))

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return sum(w * f for w, f in zip(self.weights, _features(work), strict=True))


def _features(work: StepWork) -> tuple[float, ...]:
    return (1.0, *(min(work.tokens, knee) for knee in _KNEES), work.tokens, work.logits, work.attended)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the time of jobs: the engine's scheduler runs without a model, and each step costs ``cost``.

    So packing, the token budget, memory and the tail of a job count as in a real run.
    """

    sizes: SchedulerConfig
    look_ahead: int
    cost: StepCost

    def engine_s(self, sample: Sequence[Lengths], num_rows: int, lengths: ExpectedLengths, shared: int = 0) -> float:
        """Seconds of all steps for ``num_rows`` rows like those of the sample.

        Rows beyond the sample cost what its second half adds, which includes neither the start nor the tail.
        """
        rows = [(row, lengths.of_row(i, row.max_output, row.is_fixed)) for i, row in enumerate(sample)]
        few = self._num_affordable(rows)
        whole_s = self.simulated_s(rows[:few], shared, lengths.tokens_per_sample)
        if few == num_rows or few < 2:
            return whole_s
        half = few // 2
        half_s = self.simulated_s(rows[:half], shared, lengths.tokens_per_sample)
        return whole_s + (whole_s - half_s) / (few - half) * (num_rows - few)

    def simulated_s(
        self, rows: Sequence[tuple[Lengths, int]], shared: int = 0, tokens_per_sample: float = 1.0
    ) -> float:
        """Seconds of the steps that run rows of (lengths, output tokens); a row that can never run is left out.

        All prompts begin with the same ``shared`` tokens, which the prefix cache finds as in a real run.
        """
        requests = ((_request(key, lengths, shared), output) for key, (lengths, output) in enumerate(rows))
        steps = simulate(Scheduler(self.sizes), requests, self.look_ahead, tokens_per_sample)
        return sum(self.cost.step_s(work) for work, _ in steps)

    def _num_affordable(self, rows: Sequence[tuple[Lengths, int]]) -> int:
        """How many of the rows can be simulated in a few seconds."""
        totals = np.cumsum([output for _, output in rows])
        within = int(np.searchsorted(totals, _SIMULATED_OUTPUTS, side="right"))
        return min(len(rows), max(within, 2 * self.sizes.max_num_seqs))


def _request(key: int, lengths: Lengths, shared: int) -> Request:
    own = max(lengths.prompt - shared, 0)
    prompt = (0,) * (lengths.prompt - own) + (key + 1,) * own
    return Request(key, prompt, SamplingParams(max_tokens=max(1, lengths.max_output)))


def calibrate(
    spec: JobSpec,
    info: ModelInfo,
    survey: Survey,
    given: ExpectedLengths | None = None,
    *,
    began: float,
    seconds: float = CALIBRATION_S,
) -> Forecast:
    """Load the model, time steps for about ``seconds`` and predict the job from them.

    Output lengths are those ``given``, else those of the sampled rows. At least one step of each kind runs. ``began``
    is the monotonic time before this module was imported: loading torch is part of a run too. Raises ModelError.
    """
    backend = load_engine(spec, info)
    engine = backend.engine
    assert isinstance(engine, Engine)
    probe = _Probe(engine)
    prompts, pooling = survey.sampled_prompts.items, spec.embed.pooling or ""
    probe.run(_requests(prompts[:2], pooling, max_tokens=2), began)  # first steps compile kernels and touch memory
    probe.steps.clear()
    start = time.monotonic()
    finished, unfinished = probe.run(_requests(prompts, pooling), start + _REAL_SHARE * seconds)
    tokens_per_sample = engine.stats.num_output_tokens / max(1, probe.num_sampled)
    prompt_lengths = [len(prompt.token_ids) for prompt in prompts] or [PREFIX_BLOCK]  # rows may only score
    rng = random.Random(0)
    while True:
        for share, rows in _made_up(engine.config, prompt_lengths):
            requests = _random_requests(rows, info.config.vocab_size, pooling, rng)
            probe.run(requests, time.monotonic() + share * seconds)
        if time.monotonic() - start >= seconds:
            break
    measured_s = time.monotonic() - start
    lengths = given or ExpectedLengths.observed(finished, unfinished) or ExpectedLengths.limits(survey)
    lengths = replace(lengths, tokens_per_sample=max(1.0, tokens_per_sample))
    model = CostModel(engine.config, engine.look_ahead, StepCost.fit(probe.steps))
    engine_s = model.engine_s(survey.sample.items, survey.computed_rows, lengths, survey.shared_tokens_per_row)
    wall_s = (start - began) + survey.read_s + engine_s
    estimate = Estimate(f"{measured_s:.0f} s of real steps", wall_s, engine_s)
    return Forecast(lengths, estimate, backend.numerics, engine.config)


@dataclass
class _Probe:
    """Runs requests on one engine and records the work and the seconds of each step.

    Where steps overlap, a call launches one and waits for the one before, whose work its time is then for: the rate is
    that of a run.
    """

    engine: Engine
    steps: list[tuple[StepWork, float]] = field(default_factory=list)
    done: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))  # by all steps that are not in flight

    def run(self, requests: Iterable[Request], until: float) -> tuple[list[int], list[int]]:
        """Output lengths of the requests that finished and of those still running at the monotonic time ``until``."""
        scheduler = self.engine.scheduler
        finished: list[int] = []
        fixed = set()
        for request in requests:
            answer = self.engine.submit(request)
            if answer is not None and answer.error is None:  # all its tokens are forced
                finished.append(len(answer.token_ids))
            elif answer is None and request.params.has_fixed_length:
                fixed.add(request.key)
        while scheduler.has_work:
            finished += [len(result.token_ids) for result in self._timed(self.engine.step) if result.key not in fixed]
            if time.monotonic() >= until:
                break
        finished += [len(result.token_ids) for result in self._timed(self.engine.flush) if result.key not in fixed]
        running = [n for s in scheduler.unfinished() if s.request.key not in fixed and (n := s.num_output_tokens)]
        self._abandon()
        return finished, running

    def _timed(self, advance: Callable[[], list[Result]]) -> list[Result]:
        """The results of a call; its seconds are recorded with the work that is done since the call before."""
        launched, start = self._launched(), time.monotonic()
        results = advance()
        seconds, before = time.monotonic() - start, self.done
        overlap = self.engine.overlap
        tokens, attended = launched if overlap is not None and overlap.in_flight is not None else self._launched()
        self.done = StepWork(tokens, self.num_sampled, attended)
        if tokens > before.tokens:
            work = (tokens - before.tokens, self.num_sampled - before.logits, attended - before.attended)
            self.steps.append((StepWork(*work), seconds))
        return results

    def _launched(self) -> tuple[int, int]:
        """Tokens and attended positions of all steps so far, of one in flight too."""
        stats = self.engine.stats
        return stats.num_prefill_tokens + stats.num_decode_tokens, stats.num_attended

    @property
    def num_sampled(self) -> int:
        return self.engine.stats.num_output_tokens - self.engine.stats.num_forced_tokens

    def _abandon(self) -> None:
        """Drop the unfinished requests, and what later ones equal to them would wait for."""
        self.engine.duplicates = Duplicates()
        scheduler = self.engine.scheduler
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
        while scheduler.waiting:
            scheduler.waiting.pop()


def _requests(prompts: Iterable[SampledPrompt], pooling: str, max_tokens: int | None = None) -> Iterator[Request]:
    """The sampled rows as requests, with at most ``max_tokens``; ``pooling`` is that of vectors, or ""."""
    for key, prompt in enumerate(prompts):
        most = prompt.params.max_tokens
        params = replace(prompt.params, max_tokens=min(most, max_tokens or most))
        yield Request(key, tuple(prompt.token_ids), params, pooling=pooling)


def _made_up(sizes: SchedulerConfig, lengths: Sequence[int]) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Batches of made-up requests as (prompt tokens, output tokens), each with its share of the time.

    Two full steps of prompts; as many sequences as run at once, which end in groups, so that the batch shrinks; one
    request alone.
    """
    prompts = cycle(lengths)
    num_tokens = 2 * sizes.max_num_batched_tokens
    yield 1 / 10, [(next(prompts), 1) for _ in range(-(-num_tokens * len(lengths) // sum(lengths)))]
    longest = max(1, num_tokens // sizes.max_num_seqs)
    yield 1 / 3, [(min(next(prompts), longest), 2 + i % _LEVELS) for i in range(sizes.max_num_seqs)]
    yield 1 / 10, [(next(prompts), 4)]


def _random_requests(
    rows: Iterable[tuple[int, int]], vocab_size: int, pooling: str, rng: random.Random
) -> Iterator[Request]:
    for key, (num_tokens, max_tokens) in enumerate(rows):
        prompt = tuple(rng.choices(range(vocab_size), k=num_tokens))
        params = SamplingParams(max_tokens=0 if pooling else max_tokens, ignore_eos=True)
        yield Request(key, prompt, params, pooling=pooling)

"""Calibration: runs a sample of a job's rows in the real engine and scales their time to the whole job. Imports torch.

Rates come from steps at least half as full as the fullest; the later, emptier steps count once, as the job's end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.config.job import JobSpec
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine
from batchgen.engine.stats import EngineStats
from batchgen.plan.estimate import Estimate, ExpectedLengths, Forecast, Survey
from batchgen.run.loader import ModelInfo, load_engine

CALIBRATION_S = 20.0


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds per prompt token and per answer token; seconds and answer tokens of the end of the sample."""

    prefill_s: float
    decode_s: float
    tail_s: float
    tail_tokens: int

    @classmethod
    def of(cls, stats: EngineStats, began_at: float) -> _Rates:
        """The rates of the steps that began after an instant of the monotonic clock."""
        series = stats.series.to_columns()
        first = sum(at <= began_at for at in series["at"])
        names = ("span_s", "tokens", "prefill_tokens", "sequences")
        steps = list(zip(*(series[name][first:] for name in names), strict=True))
        max_seqs = max((sequences for *_, sequences in steps), default=0)
        num_full = max((number for number, step in enumerate(steps, 1) if step[3] >= max_seqs / 2), default=0)
        full, tail = steps[:num_full], steps[num_full:]
        prefill_s = sum(span_s * prefill / tokens for span_s, tokens, prefill, _ in full)
        decode_s = sum(span_s for span_s, *_ in full) - prefill_s
        num_prefill = sum(prefill for _, _, prefill, _ in full)
        num_decode = sum(tokens for _, tokens, *_ in full) - num_prefill
        return cls(
            prefill_s / max(num_prefill, 1),
            decode_s / max(num_decode, 1),
            sum(span_s for span_s, *_ in tail),
            round(sum(tokens - prefill for _, tokens, prefill, _ in tail)),
        )


def calibrate(
    spec: JobSpec,
    info: ModelInfo,
    survey: Survey,
    lengths: ExpectedLengths | None = None,
    *,
    began: float,
    seconds: float = CALIBRATION_S,
) -> Forecast:
    """Load the model, run the sampled rows for at most ``seconds`` and predict the job from them.

    If ``lengths`` is None, the lengths of the sampled rows are used. ``began`` is the monotonic time before this module
    was imported: loading torch is part of a run too. Raises ModelError.
    """
    loaded = load_engine(spec, info)
    engine, requests = loaded.engine, survey.sampled.items
    assert isinstance(engine, Engine)
    loaded.prepare()
    _warm_up(engine, requests[:2])
    before = engine.stats.counts()
    last_step = max(engine.stats.series.to_columns()["at"], default=0.0)
    start = time.monotonic()
    timer = threading.Timer(seconds, engine.stop)
    timer.start()
    try:
        results = [result for result in engine.run(requests) if result.error is None]
    finally:
        timer.cancel()
    measured_s = time.monotonic() - start
    lengths = lengths or _observed(engine, requests, results) or ExpectedLengths.limits(survey)
    rates = _Rates.of(engine.stats, last_step)
    names = ("num_decode_tokens", "num_output_tokens", "num_cached_tokens", "num_queried_tokens")
    num_decoded, num_output, num_cached, num_queried = (getattr(engine.stats, name) - before[name] for name in names)
    num_tokens = lengths.total(survey) * num_decoded / max(num_output, 1)
    others = num_queried * (1 - 1 / len(requests))  # the first row finds nothing in the cache
    num_computed = (survey.prompt_tokens + survey.label_tokens) * (1 - min(num_cached / max(others, 1), 1))
    engine_s = rates.tail_s + rates.prefill_s * num_computed
    engine_s += rates.decode_s * max(num_tokens - rates.tail_tokens, 0.0)
    basis = f"{len(requests)} rows run for {measured_s:.1f} s, scaled by tokens; ± 25 %"
    estimate = Estimate(basis, (start - began) + survey.read_s + engine_s, engine_s)
    return Forecast(lengths, estimate, loaded.numerics, engine.config)


def _observed(engine: Engine, requests: Sequence[Request], results: Sequence[Result]) -> ExpectedLengths | None:
    """Lengths of the answers that could end by themselves."""
    fixed = {request.key for request in requests if request.labels or request.params.has_fixed_length}
    finished = [len(result.first.token_ids) for result in results if result.samples and result.key not in fixed]
    running = [s.num_output_tokens for s in engine.scheduler.unfinished() if s.request.key not in fixed]
    return ExpectedLengths.observed(finished, [count for count in running if count])


def _warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Run first steps, which touch memory. Prompts are reversed, so that the real ones find no cached blocks later."""
    params = SamplingParams(max_tokens=0 if requests[0].pooling else 2)
    prompts = [request.prompt_token_ids[::-1] for request in requests]
    for _ in engine.run([Request(key, ids, params, pooling=requests[0].pooling) for key, ids in enumerate(prompts)]):
        pass

"""An engine without a model: tokens are a hash of request and position, so any two runs must agree to the byte.

It keeps to the protocol of the real one (lazy pulling, look-ahead, continuous batching, stop, unfinished) and nothing
more. Not a test itself; drivers in subprocesses inject it too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import FinishReason, Request, Result, Sample, Timings, TokenLogprob
from batchgen.run.backend import Backend
from batchgen.run.loader import ModelInfo


def stub_token(request: Request, position: int, vocab_size: int) -> int:
    """The token at a position: greedy ones ignore the seed, as a model would."""
    params = request.params
    keyed = (request.key, params.seed) if not params.is_greedy else ()
    text = repr((request.prompt_token_ids, keyed, position)).encode()
    return 8 + int.from_bytes(blake2b(text, digest_size=4).digest()) % (vocab_size - 8)


def stub_length(request: Request) -> int:
    """How many tokens a request gets: from one to max_tokens, by its prompt."""
    digest = blake2b(repr(request.prompt_token_ids).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest) % request.params.max_tokens if request.params.max_tokens else 0


def stub_logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities by token id; None where the request asks for none."""
    if num_top is None:
        return None
    top = tuple((8 + rank, -0.5 - rank) for rank in range(num_top))
    return tuple(TokenLogprob(token_id, -token_id / 100, top) for token_id in token_ids)


def stub_result(request: Request, tokens: Sequence[int], timings: Timings) -> Result:
    """All that a request asks for beside its tokens, each derived from them."""
    params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
    if request.choices:
        sums = tuple(-sum(choice) / 100 for choice in request.choices)
        means = tuple(total / len(choice) for total, choice in zip(sums, request.choices, strict=True))
        base = Result(request.key, num_prompt_tokens, (), FinishReason.STOP, timings)
        scored = replace(base, choice_logprobs=sums, choice_means=means)
        scores = scored.choice_scores(params)
        return replace(scored, token_ids=request.choices[scores.index(max(scores))])
    reason = FinishReason.LENGTH if len(tokens) == params.max_tokens else FinishReason.STOP
    samples = [tuple(tokens), *(tuple(tokens[: len(tokens) - number]) for number in range(1, params.n))]
    is_complete = reason is FinishReason.STOP if params.structured_outputs else None
    first, *others = (Sample(ids, reason, None, stub_logprobs(ids, params.logprobs), is_complete) for ids in samples)
    return Result(
        request.key,
        num_prompt_tokens,
        first.token_ids,
        first.finish_reason,
        timings,
        logprobs=first.logprobs,
        is_complete=is_complete,
        more_samples=tuple(others),
        prompt_logprobs=stub_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs),
    )


@dataclass
class StubStats:
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    counts = to_dict


@dataclass
class StubEngine:
    """``fails`` names keys that end in an ``internal`` error; ``step_s`` is how long a step takes.

    After ``stop`` the step under way lasts ``stops_after_s`` more; step ``crashes_at`` raises; step ``stops_at`` sends
    SIGTERM to its own process. ``before_step`` is called with the number of each step.
    """

    vocab_size: int = 640
    max_num_seqs: int = 8
    look_ahead: int = 16
    step_s: float = 0.0
    stops_after_s: float = 0.0
    crashes_at: int | None = None
    stops_at: int | None = None
    fails: frozenset[int] = frozenset()
    before_step: Callable[[int], object] | None = None
    stats: StubStats = field(default_factory=StubStats)
    running: dict[int, tuple[Request, list[int], float]] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    num_pulled: int = 0
    num_started: int = 0
    is_stopping: bool = False

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        source = iter(requests)
        more = True
        while not self.is_stopping:
            while more and len(self.waiting) < self.look_ahead:
                request = next(source, None)
                if request is None:
                    more = False
                    break
                self.submit(request)
            if not self.has_work:
                return
            yield from self.step()
            if self.is_stopping:
                time.sleep(self.stops_after_s)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        self.num_pulled += 1
        self.waiting.append(request)

    def flush(self) -> list[Result]:
        return []

    def step(self) -> list[Result]:
        while self.waiting and len(self.running) < self.max_num_seqs:
            # Not in order, as the real one, and as there no row waits for ever.
            request = self.waiting.pop(0 if self.num_started % 3 == 0 else len(self.waiting) // 2)
            self.num_started += 1
            self.running[request.key] = (request, list(request.output_token_ids), time.monotonic())
            self.stats.num_prefill_tokens += len(request.prompt_token_ids)
        if self.step_s:
            time.sleep(self.step_s)
        if self.stats.num_steps == self.crashes_at:
            raise RuntimeError("out of luck")
        if self.stats.num_steps == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.before_step is not None:
            self.before_step(self.stats.num_steps)
        self.stats.num_steps += 1
        results = []
        for key, (request, tokens, started_at) in list(self.running.items()):
            total_s = max(time.monotonic() - started_at, 1e-5)
            timings = Timings(prefill_s=total_s / 2, decode_s=total_s / 2, ttft_s=total_s / 2, total_s=total_s)
            if key in self.fails:
                error = RowError(RowErrorCode.INTERNAL, "the stub fails this row")
                results.append(Result(key, len(request.prompt_token_ids), timings=timings, error=error))
            elif not request.choices and len(tokens) < stub_length(request):
                tokens.append(stub_token(request, len(tokens), self.vocab_size))
                self.stats.num_output_tokens += 1
                continue
            else:
                results.append(stub_result(request, tokens, timings))
            del self.running[key]
        return results

    def stop(self) -> None:
        self.is_stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        return {key: tuple(tokens) for key, (_, tokens, _) in self.running.items() if tokens}


@dataclass
class StubFactory:
    """Makes stub engines as ``EngineFactory``; it can be pickled, for workers that are processes."""

    made: list[StubEngine] | None
    load_s: float
    load_until: str | None
    options: dict[str, Any]

    def __call__(self, spec: JobSpec, model: ModelInfo) -> Backend:
        time.sleep(self.load_s)
        while self.load_until is not None and not Path(self.load_until).exists():
            time.sleep(0.05)
        engine = StubEngine(vocab_size=model.config.vocab_size, **self.options)
        if self.made is not None:
            self.made.append(engine)
        return Backend(engine, {"dtype": "float32", "device": "stub"}, 1)


def stub_factory(
    made: list[StubEngine] | None = None, *, load_s: float = 0.0, load_until: str | None = None, **options: Any
) -> StubFactory:
    """A factory for ``run_job``; every engine it makes is added to ``made``, after ``load_s`` seconds.

    Nor before the file ``load_until`` is there.
    """
    return StubFactory(made, load_s, load_until, options)

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
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.config.job import JobSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.logprobs import Logprobs, TokenLogprob
from batchgen.core.numerics import Numerics
from batchgen.core.records import FinishReason, Request, Result, Sample, Timings
from batchgen.model.config import ModelConfig
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import ModelInfo
from batchgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # processes that tests start need no pytest
    import pytest


def stub_token(request: Request, position: int, vocab_size: int) -> int:
    """The token at a position, by the prompt and all values that decide tokens: greedy ones ignore seed and draw."""
    digest = _digest_of(request).copy()
    digest.update(f"{position})".encode())
    return 8 + int.from_bytes(digest.digest()) % (vocab_size - 8)


@lru_cache
def _digest_of(request: Request) -> blake2b:
    params = replace(request.params, max_tokens=0, n=1, logprobs=None, prompt_logprobs=None)
    drawn = None if params.is_greedy else rng_key_of(request)
    keyed = replace(params, seed=0) if params.is_greedy else params
    return blake2b(f"({request.prompt_token_ids}, {keyed}, {drawn}, ".encode(), digest_size=4)


def stub_length(request: Request) -> int:
    """How many tokens a request gets where no limit cuts it, by its prompt: more of them begin with what fewer are."""
    return max(_length_after(request.prompt_token_ids), request.params.min_tokens)


@lru_cache
def _length_after(prompt_token_ids: tuple[int, ...]) -> int:
    digest = blake2b(f"({prompt_token_ids},)".encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest) % 24


def rng_key_of(request: Request) -> int:
    """What the randomness of a request is keyed by."""
    return request.key if request.rng_key is None else request.rng_key


def stub_logprobs(token_ids: Sequence[int], num_top: int | None) -> Logprobs | None:
    """Log-probabilities by token id; None where the request asks for none."""
    if num_top is None:
        return None
    top = tuple((8 + rank, -0.5 - rank) for rank in range(num_top))
    return Logprobs.of(TokenLogprob(token_id, -token_id / 100, top) for token_id in token_ids)


def stub_sample(request: Request, number: int) -> Request:
    """The request of a later sample, which has tokens and a length of its own."""
    return replace(request, prompt_token_ids=(*request.prompt_token_ids, -number))


def sample_number(request: Request) -> int:
    """Which sample a request of ``stub_sample`` is for; 0 for the first."""
    return max(-request.prompt_token_ids[-1], 0) if request.prompt_token_ids else 0


def _sample(request: Request, tokens: Sequence[int] | None, vocab_size: int) -> Sample:
    """A sample, of the tokens that are known or else its own."""
    length, limit = stub_length(request), request.params.max_tokens
    if tokens is None:
        tokens = [stub_token(request, position, vocab_size) for position in range(min(length, limit))]
    reason = FinishReason.STOP if length <= limit else FinishReason.LENGTH
    is_complete = reason is FinishReason.STOP if request.params.structured_outputs else None
    return Sample(tuple(tokens), reason, None, stub_logprobs(tokens, request.params.logprobs), is_complete)


def stub_result(request: Request, tokens: Sequence[int], timings: Timings, vocab_size: int) -> Result:
    """All that a request asks for beside its tokens, each derived from them."""
    params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
    if request.labels:
        sums = tuple(-sum(label) / 100 for label in request.labels)
        means = tuple(total / len(label) for total, label in zip(sums, request.labels, strict=True))
        scored = Result(request.key, num_prompt_tokens, (), timings, label_logprobs=sums, label_means=means)
        scores = scored.label_scores(params)
        best = Sample(request.labels[scores.index(max(scores))], FinishReason.STOP)
        return replace(scored, samples=(best,))
    samples = tuple(
        _sample(request if number == 0 else stub_sample(request, number), None if number else tokens, vocab_size)
        for number in range(params.n)
    )
    prompt_logprobs = stub_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs)
    return Result(request.key, num_prompt_tokens, samples, timings, prompt_logprobs=prompt_logprobs)


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
    SIGTERM to its own process. ``before_step`` is called with the number of each step. ``finished`` holds all results
    if it ``keeps_results``.
    """

    vocab_size: int = 640
    max_model_len: int | None = None
    max_num_seqs: int = 8
    look_ahead: int = 16
    step_s: float = 0.0
    stops_after_s: float = 0.0
    crashes_at: int | None = None
    stops_at: int | None = None
    fails: frozenset[int] = frozenset()
    keeps_results: bool = False
    before_step: Callable[[int], object] | None = None
    stats: StubStats = field(default_factory=StubStats)
    running: dict[int, tuple[Request, list[int], float]] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    num_pulled: int = 0
    num_started: int = 0
    finished: dict[int, Result] = field(default_factory=dict)
    is_stopping: bool = False

    def run(self, requests: Iterable[Request | None]) -> Iterator[Result]:
        source = iter(requests)
        more = True
        while not self.is_stopping:
            while more and len(self.waiting) < self.look_ahead:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:  # it follows from a result
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
        if self.max_model_len is not None:
            room = max(self.max_model_len - len(request.prompt_token_ids), 0)
            limited = replace(request.params, max_tokens=min(request.params.max_tokens, room))
            request = replace(request, params=limited)
        self.waiting.append(request)

    def flush(self) -> list[Result]:
        return []

    def step(self) -> list[Result]:
        while self.waiting and len(self.running) < self.max_num_seqs:
            # Not in order, as the real one, and as there no row waits for ever.
            request = self.waiting.pop(0 if self.num_started % 3 == 0 else len(self.waiting) // 2)
            self.num_started += 1
            known = request.output_token_ids[: min(stub_length(request), request.params.max_tokens)]
            self.running[request.key] = (request, list(known), time.monotonic())
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
            elif not request.labels and len(tokens) < min(stub_length(request), request.params.max_tokens):
                tokens.append(stub_token(request, len(tokens), self.vocab_size))
                self.stats.num_output_tokens += 1
                continue
            else:
                results.append(stub_result(request, tokens, timings, self.vocab_size))
            if self.keeps_results:
                self.finished[key] = results[-1]
            del self.running[key]
        return results

    def stop(self) -> None:
        self.is_stopping = True

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        return {key: tuple(tokens) for key, (_, tokens, _) in self.running.items() if tokens}


def stub_numerics(spec: JobSpec, config: ModelConfig) -> Numerics:
    """The numerics that a job asks for; "auto" is the checkpoint's dtype on a device of its own."""
    asked, cached = spec.model, spec.engine.kv_cache_dtype
    dtype = config.auto_dtype(is_cpu=False) if asked.dtype == "auto" else asked.dtype
    device = "stub" if asked.device == "auto" else asked.device.partition(":")[0]
    return Numerics(dtype, device, asked.weights, asked.activations, "auto" if cached == dtype else cached)


@dataclass
class StubFactory:
    """Makes stub engines as ``EngineFactory``; it can be pickled, for workers that are processes."""

    made: list[StubEngine] | None
    on_load: Callable[[], object]
    loaded: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        self.on_load()
        longest = spec.engine.max_model_len
        engine = StubEngine(vocab_size=model.config.vocab_size, max_model_len=longest, **self.options)
        if self.made is not None:
            self.made.append(engine)
        return replace(LoadedEngine(engine, stub_numerics(spec, model.config).plain, 1), **self.loaded)


def stub_factory(
    made: list[StubEngine] | None = None, *, on_load: Callable[[], object] = bool, **options: Any
) -> StubFactory:
    """A factory for ``run_job``; every engine it makes is added to ``made`` after a call of ``on_load``.

    Options with the name of a field of ``LoadedEngine`` replace it, the others are the engine's.
    """
    loaded = {name: options.pop(name) for name in [*options] if name in LoadedEngine.__dataclass_fields__}
    return StubFactory(made, on_load, loaded, options)


def load_slowly(seconds: float, until: str | None = None) -> None:
    """As ``on_load``: take that long, and until the file is there."""
    time.sleep(seconds)
    while until is not None and not Path(until).exists():
        time.sleep(0.05)


def answer_with(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, text_of: Callable[[Request], str]) -> None:
    """Let stub engines answer a request with a text; a later sample lacks as many tokens at its end as its number."""

    def ids(request: Request) -> list[int]:
        [found] = tokenizer.encode_batch([text_of(request)], False)
        assert not isinstance(found, Exception)
        return found[: len(found) - sample_number(request)]

    monkeypatch.setattr("stub_engine.stub_token", lambda request, position, _: ids(request)[position])
    monkeypatch.setattr("stub_engine.stub_length", lambda request: len(ids(request)))

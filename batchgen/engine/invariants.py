"""Runs the same requests in several ways, whose logits must be equal, and compares them.

The self-test runs a small random model, ``batchgen check`` the user's own; equal tokens can hide different logits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from batchgen.config.job import EngineConfig
from batchgen.core.errors import GateFailed
from batchgen.core.records import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.sampler import Sampler, TokenMask
from batchgen.engine.sequence import Sequence as Sequence_
from batchgen.kernels.interface import Kernels, Router
from batchgen.kernels.torch_kernels import TorchRouter, rank, weigh
from batchgen.model.decoder import Decoder
from batchgen.model.layers import ExpertFeedForward

_FIRST_TOKEN = 8  # lower ids are often special tokens
_SMALL_STEP = 37  # tokens: cuts most prompts, never at the end of a block
# Largest difference of two scores of experts, as a share of the row's largest, that rounding of their inputs explains.
_NEAR_TIE = {torch.float32: 1e-3, torch.float16: 2**-4, torch.bfloat16: 2**-2}

Prompt = tuple[int, ...]


def made_up_prompts(
    vocab_size: int, max_tokens: int, lengths: Sequence[int], prefix: int, suffixes: Sequence[int]
) -> list[Prompt]:
    """Random prompts of these lengths, then some with a common prefix, cut to ``max_tokens``; always the same."""
    rng, first = random.Random(0), min(_FIRST_TOKEN, vocab_size - 1)

    def tokens(count: int) -> Prompt:
        return tuple(rng.randrange(first, vocab_size) for _ in range(count))

    common = tokens(prefix)
    prompts = [tokens(length) for length in lengths] + [common + tokens(length) for length in suffixes]
    return [prompt[: max(max_tokens, 1)] for prompt in prompts]


def texts_for(prompts: Sequence[Prompt]) -> list[Request]:
    """A request per prompt for the hidden states of all its tokens, from which vectors are made."""
    params = SamplingParams(max_tokens=0)
    return [Request(key, prompt, params, pooling="tokens") for key, prompt in enumerate(prompts)]


class LogitsRecorder(Sampler):
    """Sampler that keeps a copy of all logits as they were before sampling.

    ``logits`` holds rows [vocab_size] by request key and by the position of the token that they choose. Without a head
    it holds hidden states, by the position after their token.
    """

    def __init__(self, kernels: Kernels, eos_token_ids: frozenset[int], num_slots: int = 0) -> None:
        super().__init__(kernels, eos_token_ids, num_slots)
        self.logits: dict[int, dict[int, Tensor]] = {}

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[Sequence_],
        mask: TokenMask | None = None,
        best: Tensor | None = None,
    ) -> Tensor:
        for sequence, row in zip(sequences, logits.to("cpu", copy=True), strict=True):
            self._keep(sequence, len(sequence.token_ids), row)
        return super().sample(logits, sequences, mask, best)

    def score(self, logits: Tensor, scored: Sequence[tuple[Sequence_, range]]) -> None:
        rows = iter(logits.to("cpu", copy=True))
        for sequence, positions in scored:
            for position in positions:
                self._keep(sequence, position, next(rows))
            if sequence.request.pooling:  # vectors are not computed
                sequence.generation.next_scored += len(positions)
        super().score(logits, [part for part in scored if not part[0].request.pooling])

    def _keep(self, sequence: Sequence_, position: int, row: Tensor) -> None:
        self.logits.setdefault(sequence.request.key, {})[position] = row


@dataclass
class Trace:
    """Tokens of requests by key, prompts included, and the logits of each by key and position."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of all logits as float32: the same on machines that compute the same bits."""
        digest = blake2b(digest_size=16)
        for _, rows in sorted(self.logits.items()):
            for _, row in sorted(rows.items()):
                digest.update(row.float().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def add(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Add a run of requests on an engine whose sampler is a ``LogitsRecorder``.

        Raises GateFailed if a request ends with an error.
        """
        assert isinstance(engine.sampler, LogitsRecorder)
        prompts = {request.key: request.prompt_token_ids for request in requests}
        for result in engine.run(requests):
            if result.error is not None:
                raise GateFailed(f"request {result.key} cannot be run: {result.error.message}")
            self.tokens[result.key] = (*prompts[result.key], *result.first.token_ids)
        self.logits |= engine.sampler.logits


@dataclass(frozen=True, slots=True)
class Divergence:
    """First place where a run differs from the expected one: the token at ``position`` of request ``key``.

    ``got`` was chosen in place of ``expected``. It is the same token if only the logits differ, by at most ``gap``; it
    is None if the run ended earlier or did not choose a token.
    """

    key: int
    position: int
    expected: int | None
    got: int | None
    gap: float


@dataclass
class Comparison:
    """Comparison of a run with the ``expected`` one: each request up to its first token that differs.

    Rows of logits must be equal to the bit or, with a ``tolerance``, differ by at most that share of the row's largest
    logit. ``num_flipped`` counts rows with another likeliest token; ``divergence`` is the first one, by request.
    """

    expected: InitVar[Trace]
    got: InitVar[Trace]
    name: str
    tolerance: float = 0.0
    note: str = ""
    num_tokens: int = 0
    num_flipped: int = 0
    largest_gap: float = 0.0
    largest_share: float = 0.0
    divergence: Divergence | None = None

    def __post_init__(self, expected: Trace, got: Trace) -> None:
        for key in sorted(expected.tokens):
            divergence = self._compare(key, expected, got)
            self.divergence = self.divergence or divergence

    def _compare(self, key: int, expected: Trace, got: Trace) -> Divergence | None:
        divergence = None
        for position, row in sorted(expected.logits[key].items()):
            wanted, token = (dict(enumerate(trace.tokens[key])).get(position) for trace in (expected, got))
            gap, share = self._gap(row, got.logits[key].get(position))
            is_apart = not share <= self.tolerance  # NaN is apart
            if divergence is None and (is_apart or token != wanted):
                divergence = Divergence(key, position, wanted, token, gap if is_apart else 0.0)
            if token != wanted:
                break
        return divergence

    def _gap(self, wanted: Tensor, row: Tensor | None) -> tuple[float, float]:
        """The largest gap between two logits of a row, and its share of the largest logit."""
        if row is None:  # the run ended earlier
            return 0.0, 0.0
        self.num_tokens += 1
        if torch.equal(row, wanted):
            return 0.0, 0.0
        got, expected = row.float(), wanted.float()
        gap = float((got - expected).abs().max())
        share = gap / max(float(expected.abs().max()), 1e-30)
        self.largest_gap, self.largest_share = max(self.largest_gap, gap), max(self.largest_share, share)
        self.num_flipped += int(got.argmax()) != int(expected.argmax())
        return gap, share


class Runs:
    """Runs of ``requests`` on a ``model``, each in a new engine; for a model without a head the requests are texts.

    ``block_size`` is used by runs whose sizes do not name another.
    """

    SIZES: Mapping[str, Mapping[str, Any]] = {  # by the invariant that a run with these sizes proves
        "batched = solo": {"max_num_seqs": 64, "block_size": 32},
        "chunked = whole": {"max_num_seqs": 5, "max_num_batched_tokens": _SMALL_STEP},
        "cached = cold": {"prefix_caching": True},
        "preempted = undisturbed": {
            **{"max_num_seqs": 64, "block_size": 1, "max_num_batched_tokens": 4096},
            "is_tight": True,
        },
        "all at once": {"max_num_seqs": 16, "max_num_batched_tokens": _SMALL_STEP, "prefix_caching": True},
    }

    def __init__(
        self, model: Decoder, requests: Sequence[Request], kv_cache_dtype: str = "auto", block_size: int = 16
    ) -> None:
        self.model, self.requests = model, requests
        self.kv_cache_dtype, self.block_size = kv_cache_dtype, block_size

    def solo(self, requests: Sequence[Request]) -> Trace:
        """Requests one by one, each prompt in one step."""
        trace = Trace()
        for request in requests:
            engine = self.engine([request], max_num_seqs=1, max_num_batched_tokens=len(request.prompt_token_ids))
            trace.add(engine, [request])
        return trace

    def together(self, name: str) -> tuple[Trace, Engine]:
        """The trace of all requests in one run, with the ``SIZES`` of that name, and the engine of the run."""
        trace, engine = Trace(), self.engine(self.requests, **self.SIZES[name])
        trace.add(engine, self.requests)
        return trace, engine

    def prefilled(self, tokens: Mapping[int, Prompt], routing: Routing, *, with_prompts: bool = False) -> Trace:
        """Run prompt and generated ``tokens`` of each request as one text; returns the generated tokens' logits.

        ``with_prompts`` adds the logits of the prompts. The first of two models fills ``routing``, the second takes the
        same experts.
        """
        requests = [self._text(request, tokens[request.key], with_prompts) for request in self.requests]
        engine = self.engine(requests)
        if routing.wrap(self.model):
            engine.runner.replays = None  # a recording gives ids of experts only after the step
        trace = Trace()
        trace.add(engine, requests)
        return trace

    @staticmethod
    def _text(request: Request, tokens: Prompt, with_prompts: bool) -> Request:
        if request.pooling:
            return request
        if with_prompts:
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            return replace(request, prompt_token_ids=tokens, params=params)
        label = tokens[len(request.prompt_token_ids) :]
        return replace(request, params=SamplingParams(labels=("what was generated",)), labels=(label,))

    def engine(self, requests: Sequence[Request], *, is_tight: bool = False, **sizes: Any) -> Engine:
        """An engine with memory for all requests at once or, if ``is_tight``, for their prompts and little more."""
        sizes = {"block_size": self.block_size, "prefix_caching": False, **sizes}
        blocks = [-(-(len(r.prompt_token_ids) + r.params.max_tokens) // sizes["block_size"]) for r in requests]
        num_blocks = max(*blocks, sum(len(r.prompt_token_ids) + 2 for r in requests)) if is_tight else sum(blocks)
        sizes |= {"kv_cache_dtype": self.kv_cache_dtype, "share_duplicates": False, "forecast_memory": False}
        config, itemsize = self.model.config, self.model.dtype.itemsize
        block_bytes = config.kv_block_bytes(sizes["block_size"], itemsize, self.kv_cache_dtype)
        engine_config = EngineConfig(kv_cache_memory=max(num_blocks * block_bytes, 1), **sizes)
        return Engine(self.model, engine_config, sampler=LogitsRecorder)


class Routing:
    """Experts that one model chooses; another model chooses them too if its own scores are nearly as high.

    A last bit may decide between two experts with nearly the same score but different outputs. With the same experts
    the numbers of two models only differ by rounding.
    """

    def __init__(self) -> None:
        self._chosen: list[Tensor] = []
        self._is_first = True

    def wrap(self, model: Decoder) -> bool:
        """Make the first model note its choices, the second take them; returns False for a model without experts."""
        parts = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertFeedForward)]
        noted = iter(self._chosen)
        for part in parts:
            part.route = self._noting(part.route) if self._is_first else self._taking(part.route, model, noted)
        self._is_first = False
        return bool(parts)

    def _noting(self, route: Router) -> Router:
        def noting(x: Tensor) -> tuple[Tensor, Tensor]:
            ids, weights = route(x)
            self._chosen.append(ids.to("cpu", torch.int64, copy=True))
            return ids, weights

        return noting

    @staticmethod
    def _taking(route: Router, model: Decoder, noted: Iterator[Tensor]) -> Router:
        assert isinstance(route, TorchRouter), "the second model is plain torch's"
        near = _NEAR_TIE[torch.bfloat16 if model.kernels.activations == "int8" else model.dtype]

        def taking(x: Tensor) -> tuple[Tensor, Tensor]:
            own, ids = route(x)[0].long(), next(noted).to(x.device)
            scores, ranks = rank(route.linear(x.float()), route.routing)
            if ids.shape == own.shape and bool(((ids >= 0) & (ids < ranks.shape[1])).all()):
                lowest, best_left = ranks.gather(1, ids).amin(1), ranks.scatter(1, ids, -torch.inf).amax(1)
                is_near = (best_left - lowest <= near * ranks.abs().amax(1)) & (ids.diff(dim=1) > 0).all(1)
                own = torch.where(is_near[:, None], ids, own)
            return own.int(), weigh(scores, own, route.routing)

        return taking

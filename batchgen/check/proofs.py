"""The proofs of ``batchgen check``: requests run in several ways must give the logits of each request run alone.

Each proof needs little memory and takes seconds on a small model. The model with the fast kernels is released before
the one with the reference kernels is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from batchgen.check.logits import Divergence, LogitsComparison, LogitsRecorder, StatesRecorder, Trace
from batchgen.config.job import JobSpec, ModelSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.load import load_weights
from batchgen.engine.sizes import cache_dtype
from batchgen.input.columns import check_columns
from batchgen.input.source import open_source
from batchgen.kernels.reference import ReferenceKernels
from batchgen.run.loader import ModelInfo
from batchgen.run.stdin import stdin_as_file

# Largest gap between fast and reference kernels as a share of a row's largest logit. Both round every activation to
# the dtype, in another order, and the differences add up over the layers: 5 % in bfloat16 over the 16 of the 350M.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-3, torch.float16: 2**-6}
# More of it where a last bit decides between two neighbouring numbers that a key or value, or an input, is rounded to:
# then most rows are as near as ever, and a few are 5 % apart in float32.
KV_TOLERANCE = {"auto": 0.0, "bfloat16": 2**-6, "int8": 2**-6}
ACTIVATIONS_TOLERANCE = {"auto": 0.0, "int8": 2**-3}
# And where a last bit decides between two experts, whose outputs have nothing in common; in float32 it decides nothing.
EXPERTS_TOLERANCE = 2**-1
_BLOCK_SIZE = 16
_SMALL_STEP = 37  # tokens: cuts most prompts, never at the end of a block
_MAX_TOKENS = 16  # generated per request
_FIRST_TOKEN = 8  # lower ids are special tokens
_LENGTHS = (1, 5, 40, 100, 520)  # below a KV block, above one, above the token budget of a step on the CPU
_PREFIX, _SUFFIXES = 80, (0, 10, 25)  # lengths of prompts with a common prefix
GREEDY = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
_DRAWN = replace(GREEDY, temperature=1.0, top_k=50, top_p=0.95, seed=1)
_PENALIZED = replace(_DRAWN, repetition_penalty=1.05, presence_penalty=0.2)

Prompt = tuple[int, ...]
Write = Callable[[str], None]


def made_up_prompts(vocab_size: int, max_model_len: int) -> list[Prompt]:
    """Prompts of random tokens in mixed lengths, some with a common prefix; the same in every call."""
    rng = random.Random(0)
    first = min(_FIRST_TOKEN, vocab_size - 1)

    def tokens(count: int) -> Prompt:
        return tuple(rng.randrange(first, vocab_size) for _ in range(count))

    prefix = tokens(_PREFIX)
    prompts = [tokens(length) for length in _LENGTHS] + [prefix + tokens(length) for length in _SUFFIXES]
    room = max(max_model_len - _MAX_TOKENS, max_model_len // 2)
    return [prompt[:room] for prompt in prompts]


def read_prompts(spec: JobSpec, info: ModelInfo, params: SamplingParams) -> list[Prompt]:
    """The prompts of a job's input, tokenized as a run would; no bad row is let pass.

    Raises:
        UsageError: the input is unreadable, lacks a named column, has no rows, or has one that could not run.
    """
    with stdin_as_file(spec.input) as readable:
        job = replace(spec, input=readable, sampling=params, fills_context=False)
        builder = info.builder(job if info.config.has_head else info.resolved(job))
        source = open_source(readable)
        check_columns(source.read(), spec, builder.finder)
        prompts = []
        for read in source.read():
            row, request = next(builder.build([read]))
            if row.error is not None:
                raise UsageError(f"{row.source}:{row.line}: {row.error.code}: {row.error.message}")
            prompts += [request.prompt_token_ids] if request else []
    if not prompts:
        raise UsageError(f"--input {spec.input.path[0]}: holds no rows")
    return prompts


def requests_for(prompts: list[Prompt]) -> list[Request]:
    """A request per prompt, greedy and sampled by turns, with and without penalties."""
    kinds = (GREEDY, _PENALIZED, GREEDY, _DRAWN)
    return [Request(key, prompt, kinds[key % 4]) for key, prompt in enumerate(prompts)]


def texts_for(prompts: list[Prompt]) -> list[Request]:
    """A request per prompt for the hidden states of all its tokens, which any vector is made of."""
    params = SamplingParams(max_tokens=0)
    return [Request(key, prompt, params, pooling="tokens") for key, prompt in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of one proof: ``num_tokens`` rows of logits compared, ``largest_gap`` between any two logits.

    ``largest_share`` is the largest gap as a share of its row's largest logit; at most ``tolerance`` is allowed.
    """

    name: str
    num_tokens: int
    tolerance: float
    largest_gap: float
    largest_share: float
    note: str
    divergence: Divergence | None


class _Variant(NamedTuple):
    """Another way to run the requests: arguments of ``Check._engine``, and a note on the finished run."""

    name: str
    sizes: dict[str, Any]
    note: Callable[[Engine], str]


_VARIANTS = (
    _Variant(
        "batched = solo",
        {"max_num_seqs": 64, "block_size": 32},
        lambda engine: f"up to {engine.stats.max_running} at once",
    ),
    _Variant(
        "chunked = whole",
        {"max_num_seqs": 5, "max_num_batched_tokens": _SMALL_STEP},
        lambda engine: counted(engine.stats.num_steps, "step"),
    ),
    _Variant(
        "cached = cold",
        {"prefix_caching": True},
        lambda engine: f"{counted(engine.stats.num_cached_tokens, 'token')} cached",
    ),
    _Variant(
        "preempted = undisturbed",
        {"max_num_seqs": 64, "block_size": 1, "max_num_batched_tokens": 4096, "is_tight": True},
        lambda engine: counted(engine.stats.num_preemptions, "preemption"),
    ),
)


class Check:
    """The loaded ``model`` and the ``requests`` that its proofs run; ``solo`` are their results one by one."""

    def __init__(self, where: ModelSpec, prompts: list[Prompt], kv_cache_dtype: str = "auto") -> None:
        self.model = load_weights(where, kv_cache_dtype=kv_cache_dtype, always_proves=True)
        self.kv_cache_dtype = cache_dtype(kv_cache_dtype, self.model)
        self._has_head = self.model.config.has_head
        self.requests = requests_for(prompts) if self._has_head else texts_for(prompts)
        self.solo = Trace()
        self._where = where

    def proofs(self, log: Write) -> Iterator[Proof]:
        """All proofs in turn; to be called once. ``log`` takes messages about progress.

        Raises:
            GateFailed: a request ends with an error.
        """
        log(f"running {len(self.requests)} requests one by one")
        for request in self.requests:
            budget = len(request.prompt_token_ids)
            self.solo.record(self._engine([request], max_num_seqs=1, max_num_batched_tokens=budget), [request])
        for variant in _VARIANTS if self._has_head else _VARIANTS[:1]:
            log(f"proving {variant.name}")
            engine = self._engine(self.requests, **variant.sizes)
            yield self._prove(variant.name, engine, self.requests, note=variant.note)
        if self._has_head:
            log("proving decoded = prefilled")
            yield self._prove_scored("decoded = prefilled")
        dtype, device = self.model.dtype, self.model.device
        log("proving fast kernels ~ reference")
        del engine, self.model  # memory may not hold two models
        where = self._where
        reference = ReferenceKernels(device, dtype, weights=where.weights, activations=where.activations)
        self.model = load_weights(where, reference)
        tolerance = TOLERANCE[dtype] + KV_TOLERANCE[self.kv_cache_dtype] + ACTIVATIONS_TOLERANCE[where.activations]
        if dtype != torch.float32 and self.model.config.feed_forward == "experts":
            tolerance += EXPERTS_TOLERANCE
        yield self._prove_scored("fast kernels ~ reference", tolerance)

    def _engine(self, requests: list[Request], *, is_tight: bool = False, **sizes: Any) -> Engine:
        """An engine with memory for all requests at once or, if ``is_tight``, for their prompts and little more."""
        sizes = {"block_size": _BLOCK_SIZE, "prefix_caching": False, **sizes}
        blocks = [-(-(len(r.prompt_token_ids) + r.params.max_tokens) // sizes["block_size"]) for r in requests]
        num_blocks = max(*blocks, sum(len(r.prompt_token_ids) + 2 for r in requests)) if is_tight else sum(blocks)
        sizes |= {"kv_cache_dtype": self.kv_cache_dtype, "share_duplicates": False, "forecast_memory": False}
        block_bytes = self.model.config.kv_block_bytes(
            sizes["block_size"], self.model.dtype.itemsize, sizes["kv_cache_dtype"]
        )
        config = EngineConfig(kv_cache_memory=max(num_blocks * block_bytes, 1), **sizes)
        return Engine(self.model, config, sampler=LogitsRecorder if self._has_head else StatesRecorder)

    def _prove_scored(self, name: str, tolerance: float = 0.0) -> Proof:
        """Prefill each prompt with its output as one text; the logits must be those that the output came from."""
        if not self._has_head:
            return self._prove(name, self._engine(self.requests), self.requests, tolerance)
        params = SamplingParams(labels=("what was generated",))
        texts = [replace(r, params=params, labels=(self.solo.tokens[r.key],)) for r in self.requests]
        return self._prove(name, self._engine(self.requests), texts, tolerance)

    def _prove(
        self,
        name: str,
        engine: Engine,
        requests: list[Request],
        tolerance: float = 0.0,
        note: Callable[[Engine], str] = lambda engine: "",
    ) -> Proof:
        comparison = LogitsComparison(self.solo, Trace().record(engine, requests), tolerance)
        flipped = f"{counted(comparison.num_flipped, 'near tie')} flipped" if comparison.num_flipped else ""
        gaps = (tolerance, comparison.largest_gap, comparison.largest_share)
        return Proof(name, comparison.num_compared, *gaps, note(engine) or flipped, comparison.divergence)

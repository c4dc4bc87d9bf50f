"""The proofs: the same requests run in another way, every logit held against what they gave when run alone.

Each needs little memory and ends in seconds on a small model; the fast kernels' model is let go of before the
reference's is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from batchgen.check.requests import requests_for
from batchgen.check.witness import Comparison, Divergence, See, Trace, Witness, tokens_of
from batchgen.config.job import ModelSpec
from batchgen.core.records import Request, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine, EngineConfig
from batchgen.kernels.reference import ReferenceKernels
from batchgen.model import load_model
from batchgen.model.decoder import Decoder

# Largest gap between fast and reference kernels as a share of a row's largest logit. Both round every activation to
# the dtype, in another order, and the differences add up over the layers: 5 % in bfloat16 over the 16 of the 350M.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-3, torch.float16: 2**-6}
_BLOCK_SIZE = 16
_SMALL_STEP = 37  # tokens: cuts most prompts, never at the end of a block

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Proof:
    """How one came out: ``num_tokens`` rows of logits compared, ``largest_gap`` between any two logits.

    ``largest_share`` is the largest gap as a share of its row's largest logit and may be ``tolerance`` at most.
    """

    name: str
    num_tokens: int
    tolerance: float
    largest_gap: float
    largest_share: float
    note: str
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class _Way:
    """Another way to run the same requests: sizes of the engine, and what there is to say about it afterwards."""

    name: str
    sizes: dict[str, Any]
    note: Callable[[Engine], str]
    is_tight: bool = False  # blocks of one token, enough for all prompts but not for what follows them


def _steps(engine: Engine) -> str:
    return counted(engine.stats.num_steps, "step")


_WAYS = (
    _Way("batched = solo", {"max_num_seqs": 64, "block_size": 32}, lambda e: f"up to {e.stats.max_running} at once"),
    _Way("chunked = whole", {"max_num_seqs": 5, "max_num_batched_tokens": _SMALL_STEP}, _steps),
    _Way("cached = cold", {"prefix_caching": True}, lambda e: f"{counted(e.stats.num_cached_tokens, 'token')} cached"),
    _Way(
        "preempted = undisturbed",
        {"max_num_seqs": 64, "block_size": 1, "max_num_batched_tokens": 4096},
        lambda e: counted(e.stats.num_preemptions, "preemption"),
        is_tight=True,
    ),
)


class Check:
    """A loaded model and what its requests give when each is run alone."""

    def __init__(self, where: ModelSpec, model: Decoder, prompts: list[tuple[int, ...]]) -> None:
        self._where = where
        self._model = model
        self.requests = requests_for(prompts)
        self._trace = Trace()

    def proofs(self, say: Say) -> Iterator[Proof]:
        """One after the other; to be called once. ``say`` is told what is being done.

        Raises:
            GateFailed: a request gives no result at all.
        """
        say(f"running {len(self.requests)} requests one by one")
        for request in self.requests:
            self._run_alone(request)
        for way in _WAYS:
            say(f"proving {way.name}")
            yield self._run(way)
        say("proving decoded = prefilled")
        yield self._scored("decoded = prefilled", 0.0)
        fast, dtype, device = self._model.kernels.name, self._model.dtype, self._model.device
        if fast != ReferenceKernels.name:
            say("proving fast kernels ~ reference")
            del self._model  # two models may be more than the memory holds
            where = self._where
            self._model = load_model(
                where.path, where.revision, dtype=where.dtype, device=where.device, kernels=ReferenceKernels(device)
            )
            yield self._scored("fast kernels ~ reference", TOLERANCE[dtype])

    def _engine(self, requests: list[Request], see: See, *, is_tight: bool = False, **sizes: Any) -> Engine:
        """An engine with memory for all requests at once or, if ``is_tight``, for their prompts and little more."""
        sizes = {"block_size": _BLOCK_SIZE, "prefix_caching": False, **sizes}
        blocks = [-(-(len(r.prompt_token_ids) + r.params.max_tokens) // sizes["block_size"]) for r in requests]
        num_blocks = max(*blocks, sum(len(r.prompt_token_ids) + 2 for r in requests)) if is_tight else sum(blocks)
        memory = num_blocks * self._model.config.kv_block_bytes(sizes["block_size"], self._model.dtype.itemsize)
        config = EngineConfig(kv_memory=max(memory, 1), share_duplicates=False, forecast_memory=False, **sizes)
        return Engine(self._model, config, sampler=partial(Witness, see=see))

    def _run_alone(self, request: Request) -> None:
        engine = self._engine(
            [request], self._trace.see, max_num_seqs=1, max_num_batched_tokens=len(request.prompt_token_ids)
        )
        self._trace.tokens |= tokens_of(engine, [request])

    def _run(self, way: _Way) -> Proof:
        comparison = Comparison(self._trace)
        engine = self._engine(self.requests, comparison.see, is_tight=way.is_tight, **way.sizes)
        tokens = tokens_of(engine, self.requests)
        return _proof(way.name, 0.0, comparison, way.note(engine), tokens)

    def _scored(self, name: str, tolerance: float) -> Proof:
        """Every text again as a whole, its logits behind the generated tokens held against those it was made of."""
        params = SamplingParams(choices=("what was generated",))
        texts = [replace(r, params=params, choices=(self._trace.tokens[r.key],)) for r in self.requests]
        comparison = Comparison(self._trace, tolerance)
        tokens = tokens_of(self._engine(self.requests, comparison.see), texts)
        flipped = comparison.num_flipped
        note = f"{counted(flipped, 'near tie')} flipped" if flipped else ""
        return _proof(name, tolerance, comparison, note, tokens)


def _proof(name: str, tolerance: float, comparison: Comparison, note: str, tokens: dict[int, tuple[int, ...]]) -> Proof:
    return Proof(
        name,
        comparison.num_compared,
        tolerance,
        comparison.largest_gap,
        comparison.largest_share,
        note,
        comparison.divergence(tokens),
    )

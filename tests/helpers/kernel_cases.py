"""Inputs and exact answers that the tests of several back ends share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference_kernels import ReferenceKernels
from tiny_model import BACK_ENDS, packed_keys, ragged_input
from torch import Tensor

from batchgen.kernels.inputs import ConvState, KVCache, ModelInput
from batchgen.kernels.interface import Heads, Kernels, SamplingRows
from batchgen.kernels.torch_kernels import to_int8
from batchgen.model.config import LANES

EVERY_BACK_END: dict[str, Callable[[], Any]] = {**BACK_ENDS}  # of ``Kernels``, or of what is called like them
try:
    from triton_device import OnDevice
except pytest.skip.Exception:  # Triton is not installed, or cannot run here
    pass
else:
    EVERY_BACK_END["cuda"] = OnDevice
INTERPRETED = pytest.mark.interpreted  # see tests/kernels/conftest.py
# Back ends of tests that are small enough for the interpreter; larger ones take ``BACK_ENDS``.
EVERY_NAME = [pytest.param(name, marks=INTERPRETED) if name == "cuda" else name for name in EVERY_BACK_END]
Shape = tuple[int, int, int]  # num_heads, num_kv_heads, head_dim
KvDtype = torch.dtype | None  # what is cached of what is computed: None for the same
DTYPES: list[tuple[torch.dtype, KvDtype]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
every_dtype = pytest.mark.parametrize(("dtype", "kv_cache_dtype"), DTYPES, ids=str)


@dataclass(frozen=True)
class Case:
    """Queries of this step and the keys and values of every position, per sequence."""

    pieces: Sequence[tuple[int, int]]
    heads: Shape
    queries: list[Tensor]  # [count, num_heads, head_dim], float32, as the model's dtype rounds them
    keys: list[Tensor]  # [past + count, num_kv_heads, head_dim]
    values: list[Tensor]
    kv_cache_dtype: KvDtype = None  # of the cache, if it is not that of ``keys`` and ``values``
    window: int = 0
    gates: list[Tensor] | None = None  # logits [count, num_heads] in the model's dtype
    is_causal: bool = True

    def only(self, row: int) -> Case:
        """One sequence by itself."""
        lists: dict[str, Sequence[Any]] = {
            "pieces": self.pieces,
            "queries": self.queries,
            "keys": self.keys,
            "values": self.values,
        }
        own: dict[str, Any] = {name: found[row : row + 1] for name, found in lists.items()}
        return replace(self, **own, gates=self.gates and self.gates[row : row + 1])

    def chunk(self, past: int, count: int) -> Case:
        """``count`` tokens from ``past`` on of a case of one whole prompt."""
        end = past + count
        gates = self.gates and [self.gates[0][past:end]]
        keys, values = [self.keys[0][:end]], [self.values[0][:end]]
        return replace(
            self, pieces=[(past, count)], queries=[self.queries[0][past:end]], keys=keys, values=values, gates=gates
        )

    def cached(self, x: Tensor) -> Tensor:
        """What is left of keys or values in the cache, as the numbers that they stand for."""
        if self.kv_cache_dtype is torch.int8:
            integers, scales = to_int8(x.float())
            return integers * scales[..., None]
        return x.to(self.kv_cache_dtype or x.dtype)


def make_case(
    pieces: Sequence[tuple[int, int]],
    heads: Shape,
    dtype: torch.dtype,
    seed: int,
    kv_cache_dtype: KvDtype = None,
    window: int = 0,
    is_gated: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Case(
        pieces,
        heads,
        [random(count, num_heads, head_dim).to(dtype).float() for _, count in pieces],
        [2 * random(past + count, num_kv_heads, head_dim).to(dtype) for past, count in pieces],
        [random(past + count, num_kv_heads, head_dim).to(dtype) for past, count in pieces],
        kv_cache_dtype,
        window,
        [3 * random(count, num_heads).to(dtype) for _, count in pieces] if is_gated else None,
    )


def poisoned_cache(case: Case, inputs: ModelInput, num_blocks: int, block_size: int) -> KVCache:
    """The case's keys and values in their blocks; NaN, inf and -inf wherever a sequence could have left them.

    Of positions before a window, which kernels may read up to a multiple of 64 positions, only those are right.
    """
    _, num_kv_heads, head_dim = case.heads
    width = -(-head_dim // LANES) * LANES
    lanes = -(-block_size // LANES) * LANES
    dtype = case.kv_cache_dtype or case.keys[0].dtype
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf])
    poison = torch.tensor([127, -128, -1], dtype=dtype) if dtype is torch.int8 else bad.to(dtype)
    keys = torch.zeros(num_blocks + 1, num_kv_heads, width, lanes, dtype=dtype)
    values = torch.zeros(num_blocks, num_kv_heads, block_size, width, dtype=dtype)
    for cache in (keys[:, :, :head_dim], values[..., :head_dim]):
        cache.copy_(poison.repeat(-(-cache.numel() // 3))[: cache.numel()].view(cache.shape))
    scales = bad.repeat(-(-num_blocks * num_kv_heads * 2 * lanes // 3))[: num_blocks * num_kv_heads * 2 * lanes]
    scales = scales.view(num_blocks, num_kv_heads, 2, lanes).contiguous()
    for row, heads in enumerate(zip(case.keys, case.values, strict=True)):
        past = case.pieces[row][0]
        first = max(past + 1 - case.window, 0) // 64 * 64 if case.window else 0
        k, v = (x[first:] for x in heads)
        position = torch.arange(first, first + len(k))
        block, offset = inputs.block_tables[row].long()[position // block_size], position % block_size
        if dtype is torch.int8:
            (k, scales[block, :, 0, offset]), (v, scales[block, :, 1, offset]) = to_int8(k.float()), to_int8(v.float())
        keys[block, :, :head_dim, offset] = k.to(dtype)
        values[block, :, offset, :head_dim] = v.to(dtype)
    return KVCache(packed_keys(keys), values, block_size, scales if dtype is torch.int8 else None)


def attend(kernels: Kernels, case: Case, block_size: int, seed: int = 0) -> list[Tensor]:
    """Attention through a paged cache; [count, num_heads * head_dim] per sequence."""
    inputs, num_blocks = ragged_input(case.pieces, block_size, seed, is_causal=case.is_causal)
    return attend_over(kernels, case, inputs, poisoned_cache(case, inputs, num_blocks, block_size))


def attend_over(kernels: Kernels, case: Case, inputs: ModelInput, cache: KVCache) -> list[Tensor]:
    """Attention with inputs and a cache that are there."""
    num_heads, _, head_dim = case.heads
    q = torch.zeros(inputs.num_tokens, num_heads, cache.width)
    q[..., :head_dim] = torch.cat(case.queries) * head_dim**-0.5
    dtype = case.keys[0].dtype
    qkv = torch.empty(inputs.num_tokens, 0, dtype=dtype)
    if case.gates:  # behind columns of something else
        qkv = torch.cat((torch.full((inputs.num_tokens, 5), torch.nan, dtype=dtype), torch.cat(case.gates)), 1)
    heads = Heads(num_heads, head_dim, None, None, 1e-5, case.window, is_gated=bool(case.gates))
    out = kernels.attention(q, qkv, heads, inputs, cache)
    return list(out.split([count for _, count in case.pieces]))


def dense(case: Case) -> list[Tensor]:
    """The same in float64 without pages."""
    num_heads, num_kv_heads, head_dim = case.heads
    group = num_heads // num_kv_heads
    out = []
    for row, ((past, count), q, k, v) in enumerate(zip(case.pieces, case.queries, case.keys, case.values, strict=True)):
        wide_k, wide_v = (case.cached(x).double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.double().transpose(0, 1) @ wide_k.transpose(1, 2) * head_dim**-0.5
        distances = past + torch.arange(count)[:, None] - torch.arange(past + count)
        hidden = (distances < 0) & case.is_causal | (distances.abs() >= (case.window or past + count))
        mixed = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide_v).transpose(0, 1)
        if case.gates:
            mixed = mixed * case.gates[row].double().sigmoid()[..., None]
        out.append(mixed.flatten(1))
    return out


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotary_table(num_positions: int, head_dim: int) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return torch.stack((angles.cos(), angles.sin())).contiguous()


def empty_cache(inputs: ModelInput, num_blocks: int, block_size: int, kv: int, dim: int, dtype: torch.dtype) -> KVCache:
    width, lanes = (-(-n // LANES) * LANES for n in (dim, block_size))
    keys = torch.full((num_blocks + 1, kv, width, lanes), 77, dtype=dtype)
    values = torch.full((num_blocks, kv, block_size, width), 77, dtype=dtype)
    scales = torch.full((num_blocks, kv, 2, lanes), 77.0) if dtype is torch.int8 else None
    return KVCache(packed_keys(keys), values, block_size, scales)


def conv_state(slots: Tensor, num_blocks: int, block_size: int) -> ConvState:
    """State of one layer whose blocks hold what nobody wrote."""
    unwritten = torch.full((num_blocks, *slots.shape[1:]), torch.nan, dtype=slots.dtype)
    return ConvState(slots, unwritten, block_size)


JUST_BELOW_ONE = 1 - 2.0**-53


def rows_of(
    uniforms: list[float], temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> SamplingRows:
    """The same parameters for every uniform."""
    n = len(uniforms)
    return SamplingRows(
        temperature=torch.full((n,), temperature, dtype=torch.float32),
        min_p=torch.full((n,), min_p, dtype=torch.float32),
        top_k=torch.full((n,), top_k, dtype=torch.int64),
        top_p=torch.full((n,), top_p, dtype=torch.float64),
        uniform=torch.tensor(uniforms, dtype=torch.float64),
    )


def draw(name: str, logits: Tensor, uniforms: list[float], **params: float) -> list[int]:
    """One row of logits drawn from once per uniform."""
    rows = rows_of(uniforms, **params)  # type: ignore[arg-type]
    drawn: list[int] = EVERY_BACK_END[name]().sample(logits.expand(len(uniforms), -1).contiguous(), rows).tolist()
    return drawn


def logits_of(width: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * scale


def filtered(logits: Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> Tensor:
    """What ``SamplingRows`` promises, in float64 and plain Python: temperature, min_p, top_k, top_p, equals kept."""
    p = (logits.double() / temperature).softmax(-1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    ranked = sorted(p.tolist(), reverse=True)
    if top_k:
        p = torch.where(p >= ranked[min(top_k, len(ranked)) - 1], p, 0.0)
        ranked = sorted(p.tolist(), reverse=True)
    if top_p < 1:
        wanted, total = top_p * sum(ranked), 0.0
        for least in ranked:
            total += least
            if total >= wanted:
                break
        p = torch.where(p >= least, p, 0.0)
    return p / p.sum()


def is_settled(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Rows whose draw no rounding could change: the reference draws the same a little to either side."""
    draws = [
        ReferenceKernels().sample(
            logits,
            SamplingRows(rows.temperature, rows.min_p, rows.top_k, rows.top_p + p, (rows.uniform + u).clamp(min=0)),
        )
        for p, u in itertools.product((-1e-5, 0, 1e-5), (-1e-5, 0, 1e-5))
    ]
    return torch.stack([d == draws[0] for d in draws]).all(0)

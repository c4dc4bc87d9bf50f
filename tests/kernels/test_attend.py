"""``CpuKernels.attend`` makes keys within attention where it can: to the bit what its two parts give one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, every_dtype, make_case, normal, poisoned_cache, rotary_table
from tiny_model import ragged_input
from torch import Tensor

from batchgen.kernels.cpu import parallel
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.inputs import KVCache
from batchgen.kernels.interface import Heads, Kernels
from batchgen.model.subset import build_subset

# (positions cached before, tokens of this step): single tokens first, as a step has them, and one behind prompts.
PIECES = [(0, 1), (5, 1), (31, 1), (254, 1), (255, 1), (256, 1), (700, 1), (15, 17), (0, 40), (3, 1)]


def bits(cache: KVCache) -> list[Tensor]:
    parts = [cache.keys, cache.values, *([] if cache.scales is None else [cache.scales])]
    return [part.flatten().view(torch.uint8) for part in parts]  # of NaN too


def assert_equal_to_parts(
    heads: Shape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    block_size: int,
    pieces: list[tuple[int, int]],
    *,
    window: int = 0,
    is_gated: bool = False,
    is_normed: bool = False,
    narrows: bool = False,
    spoilt: tuple[int, ...] = (),
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    inputs, num_blocks = ragged_input(pieces, block_size)
    if narrows:
        inputs = replace(inputs, subset=build_subset(inputs, block_size, 0))
        assert inputs.subset is not None and inputs.subset.inputs.num_alone == inputs.num_alone
    columns = (num_heads + 2 * num_kv_heads) * head_dim + (num_heads if is_gated else 0)
    qkv = normal(inputs.num_tokens, columns, seed=1, dtype=dtype)
    for token in spoilt:
        qkv[token, -1] = torch.inf
    norms = [1 + normal(head_dim, seed=s, dtype=dtype) if is_normed else None for s in (2, 3)]
    shape = Heads(num_heads, head_dim, *norms, 1e-5, window, is_gated)
    case, rotary = make_case(pieces, heads, dtype, 4, kv_dtype, window), rotary_table(1000, head_dim)
    found = []
    for attend in (CpuKernels.attend, Kernels.attend):
        cache = poisoned_cache(case, inputs, num_blocks, block_size)
        for memory in parallel._SCRATCH.values():
            memory.fill_(torch.nan)
        out = attend(CpuKernels(dtype), qkv, shape, rotary, inputs, cache, subset=inputs.subset)
        found.append([out.view(torch.uint8), *bits(cache)])
    assert all(map(torch.equal, *found)), "an output or the cache differs"


@every_dtype
@pytest.mark.parametrize("heads", [(3, 3, 16), (5, 1, 8), (6, 2, 24), (9, 3, 64), (12, 1, 16)], ids=str)
@pytest.mark.parametrize("block_size", [1, 24, 32, 64])
def test_attend_gives_the_bits_of_its_parts(
    heads: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int
) -> None:
    assert_equal_to_parts(heads, dtype, kv_dtype, block_size, PIECES)
    assert_equal_to_parts(heads, dtype, kv_dtype, block_size, PIECES, narrows=True, is_gated=True, is_normed=True)
    assert_equal_to_parts(heads, dtype, kv_dtype, block_size, PIECES[:6], window=40)


@every_dtype
def test_a_spoilt_token_leaves_what_its_parts_leave(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    assert_equal_to_parts((4, 2, 16), dtype, kv_dtype, 32, PIECES, spoilt=(1, 4, 20))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 600), max_size=9),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=3),
    st.sampled_from([1, 3, 16, 32, 96]),
    st.sampled_from([(2, 2, 16), (8, 2, 8), (24, 1, 16)]),
    st.sampled_from([0, 17, 64]),
)
def test_attend_gives_the_bits_of_its_parts_whatever_shares_a_step(
    alone: list[int], others: list[tuple[int, int]], block_size: int, heads: Shape, window: int
) -> None:
    pieces = [(past, 1) for past in alone] + others
    if pieces:
        assert_equal_to_parts(heads, torch.float32, None, block_size, pieces, window=window)

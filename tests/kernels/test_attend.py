"""``CpuKernels.attend`` makes keys within attention where it can: to the bit what its two parts give one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, every_dtype, make_case, normal, poisoned_cache, rotary_table
from tiny_model import ragged_input
from torch import Tensor

from batchgen.kernels.cpu import backend
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.inputs import KVCache, ModelInput, build_subset, query_blocks
from batchgen.kernels.interface import Heads, Kernels

# (positions cached before, tokens of this step): single tokens first, as a step has them, and one behind prompts.
PIECES = [(0, 1), (5, 1), (31, 1), (254, 1), (255, 1), (256, 1), (700, 1), (15, 17), (0, 40), (3, 1)]
ALIKE = [(288 + 9 * i % 40, 1) for i in range(18)] + [(300, 5)]  # whose first 288 positions may be shared
GUARD, UNTOUCHED = 64, 7.0  # float32 on either side of a worker's scratch memory, and what they are


@contextmanager
def guarded_scratch() -> Iterator[None]:
    """Scratch memory of NaN, which another kernel may have left, between numbers that no kernel may write over."""
    given: list[Tensor] = []

    def scratch(floats: int) -> tuple[int, int]:
        memory = torch.full((torch.get_num_threads(), floats + 2 * GUARD), UNTOUCHED)
        memory[:, GUARD:-GUARD] = torch.nan
        given.append(memory)
        return memory.data_ptr() + 4 * GUARD, 4 * memory.shape[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "scratch", scratch)
        yield
    beside = [part for memory in given for part in (memory[:, :GUARD], memory[:, -GUARD:])]
    assert beside and all((part == UNTOUCHED).all() for part in beside), "written beside scratch memory"


def sharing(inputs: ModelInput, block_size: int, num_blocks: int) -> ModelInput:
    """The inputs with the first blocks of the first sequence as those of all; each has so many cached."""
    tables, bounds = inputs.block_tables, inputs.cu_seqlens.numpy()
    tables[:, :num_blocks] = tables[:1, :num_blocks]
    runs = np.arange(inputs.num_seqs), bounds[:-1], bounds[1:]
    blocks = query_blocks(*runs, inputs.positions.numpy(), tables.numpy(), block_size)
    assert (blocks[:, 4] == num_blocks * block_size).any(), "none are attended to together"
    return replace(inputs, query_blocks=blocks)


def bits(cache: KVCache) -> list[Tensor]:
    parts = [cache.keys, cache.values, *([] if cache.scales is None else [cache.scales])]
    return [part.flatten().view(torch.uint8) for part in parts]  # of NaN too


def assert_equal_to_parts(
    heads: Shape,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None,
    block_size: int,
    pieces: list[tuple[int, int]],
    *,
    window: int = 0,
    is_gated: bool = False,
    is_normed: bool = False,
    narrows: bool = False,
    num_shared: int = 0,
    spoilt: tuple[int, ...] = (),
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    inputs, num_blocks = ragged_input(pieces, block_size)
    if num_shared:
        inputs = sharing(inputs, block_size, num_shared)
    if narrows:
        inputs = replace(inputs, subset=build_subset(inputs, block_size, 0))
        assert inputs.subset is not None and inputs.subset.inputs.num_alone == inputs.num_alone
    columns = (num_heads + 2 * num_kv_heads) * head_dim + (num_heads if is_gated else 0)
    qkv = normal(inputs.num_tokens, columns, seed=1, dtype=dtype)
    for token in spoilt:
        qkv[token, -1] = torch.inf
    norms = [1 + normal(head_dim, seed=s, dtype=dtype) if is_normed else None for s in (2, 3)]
    shape = Heads(num_heads, head_dim, *norms, 1e-5, window, is_gated)
    case, rotary = make_case(pieces, heads, dtype, 4, kv_cache_dtype, window), rotary_table(1000, head_dim)
    found = []
    for attend in (CpuKernels.attend, Kernels.attend):
        cache = poisoned_cache(case, inputs, num_blocks, block_size)
        with guarded_scratch():
            out = attend(CpuKernels(dtype), qkv, shape, rotary, inputs, cache, subset=inputs.subset)
        assert spoilt or out.isfinite().all()
        found.append([out.view(torch.uint8), *bits(cache)])
    assert all(map(torch.equal, *found)), "an output or the cache differs"


@every_dtype
@pytest.mark.parametrize("heads", [(3, 3, 16), (5, 1, 8), (6, 2, 24), (9, 3, 64), (12, 1, 16)], ids=str)
@pytest.mark.parametrize("block_size", [1, 24, 32, 64])
def test_attend_gives_the_bits_of_its_parts(
    heads: Shape, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None, block_size: int
) -> None:
    assert_equal_to_parts(heads, dtype, kv_cache_dtype, block_size, PIECES)
    assert_equal_to_parts(heads, dtype, kv_cache_dtype, block_size, PIECES, narrows=True, is_gated=True, is_normed=True)
    assert_equal_to_parts(heads, dtype, kv_cache_dtype, block_size, PIECES[:6], window=40)


@every_dtype
@pytest.mark.parametrize("heads", [(8, 8, 24), (16, 8, 16), (12, 1, 16), (48, 1, 8)], ids=str)
def test_attend_gives_the_bits_of_its_parts_where_sequences_share_blocks(
    heads: Shape, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None
) -> None:
    assert_equal_to_parts(heads, dtype, kv_cache_dtype, 24, ALIKE, num_shared=12)
    assert_equal_to_parts(heads, dtype, kv_cache_dtype, 32, ALIKE, num_shared=9, is_gated=True, narrows=True)


@pytest.mark.usefixtures("attention_by_tiles")
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 128), (8, 1, 32)], ids=str)
@pytest.mark.parametrize("block_size", [1, 24, 32])
def test_attend_by_tiles_gives_the_bits_of_its_parts(heads: Shape, block_size: int) -> None:
    assert_equal_to_parts(heads, torch.bfloat16, None, block_size, PIECES, is_normed=True)
    assert_equal_to_parts(heads, torch.bfloat16, None, block_size, PIECES[:6], window=40, is_gated=True)
    assert_equal_to_parts(heads, torch.bfloat16, None, 24, ALIKE, num_shared=12)


@every_dtype
def test_a_spoilt_token_leaves_what_its_parts_leave(dtype: torch.dtype, kv_cache_dtype: torch.dtype | None) -> None:
    assert_equal_to_parts((4, 2, 16), dtype, kv_cache_dtype, 32, PIECES, spoilt=(1, 4, 20))


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

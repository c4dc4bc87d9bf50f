"""Attention over a window of positions, with gated heads: as dense attention, and nothing before the window is read.

Keys and values there are poisoned. Bits depend on the position and the window alone, wherever the work is cut.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_cases import EVERY_BACK_END, EVERY_NAME, attend, dense, every_dtype, make_case
from tiny_model import BACK_ENDS

from batchgen.kernels.cpu.backend import CpuKernels

# (positions cached before, tokens of this step): windows end and begin in every part of a tile of 256
PIECES = [(0, 1), (0, 40), (254, 1), (255, 1), (275, 1), (350, 1), (511, 1), (250, 13), (512, 40), (700, 3), (895, 1)]
HEADS = [(3, 3, 16), (4, 1, 40), (8, 4, 128)]  # one, four and two query heads on each key
every_window = pytest.mark.parametrize(
    ("window", "heads", "block_size"),
    [(3, HEADS[0], 24), (20, HEADS[1], 32), (97, HEADS[2], 128), (256, HEADS[1], 3), (256, HEADS[2], 32)],
    ids=str,
)


@every_dtype
@every_window
@pytest.mark.parametrize("name", BACK_ENDS)
def test_windowed_attention_equals_dense_attention(
    name: str,
    window: int,
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    case = make_case(PIECES, heads, dtype, window, kv_dtype, window, is_gated=True)
    tolerance = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for got, expected in zip(attend(BACK_ENDS[name](), case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerance)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_what_lies_just_before_a_window_does_not_count_however_high_it_scores(name: str) -> None:
    case = make_case([(280, 1), (90, 3)], (4, 2, 16), torch.float32, 5, window=20)
    for keys, (past, _) in zip(case.keys, case.pieces, strict=True):
        keys[: past - 19] *= 1e4
    for got, expected in zip(attend(EVERY_BACK_END[name](), case, 16), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@every_dtype
@every_window
def test_bits_do_not_depend_on_blocks_or_other_sequences_or_how_a_prompt_is_cut(
    window: int, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    batch = make_case(PIECES, heads, dtype, 1, kv_dtype, window, is_gated=True)
    expected = attend(CpuKernels(), batch, block_size)
    for row in range(len(PIECES)):
        assert torch.equal(attend(CpuKernels(), batch.only(row), (3, 16, 64)[row % 3])[0], expected[row])
    whole = make_case([(0, 430)], heads, dtype, 2, kv_dtype, window, is_gated=True)
    expected = attend(CpuKernels(), whole, block_size)
    starts = [0, 5, 12, 21, 240, *range(250, 262), 279, 280, 316, 429, 430]
    cuts = [whole.chunk(start, end - start) for start, end in pairwise(starts)]
    assert torch.equal(torch.cat([attend(CpuKernels(), chunk, 32)[0] for chunk in cuts]), expected[0])


@every_dtype
def test_a_window_that_holds_all_positions_changes_no_bit(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    pieces = [(0, 20), (290, 1), (280, 20)]
    for heads in HEADS:
        expected = attend(CpuKernels(), make_case(pieces, heads, dtype, 3, kv_dtype), 32)
        for window in (300, 10_000):
            windowed = make_case(pieces, heads, dtype, 3, kv_dtype, window)
            assert all(map(torch.equal, attend(CpuKernels(), windowed, 32), expected))


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_open_and_close_each_head_by_itself(dtype: torch.dtype, name: str) -> None:
    case = make_case([(20, 3), (0, 5), (70, 1)], (4, 2, 16), dtype, 4)
    whole = attend(EVERY_BACK_END[name](), case, 16)
    logits = torch.tensor([200.0, -200.0, 0.0, torch.nan], dtype=dtype)
    gated = replace(case, gates=[logits.repeat(count, 1) for _, count in case.pieces])
    for got, expected in zip(attend(EVERY_BACK_END[name](), gated, 16), whole, strict=True):
        opened, closed, half, unknown = got.unflatten(1, (4, 16)).unbind(1)
        parts = expected.unflatten(1, (4, 16))
        torch.testing.assert_close(opened, parts[:, 0], rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
        assert closed.abs().max() < 1e-30
        torch.testing.assert_close(half, parts[:, 2] / 2, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
        assert unknown.isnan().all(), "what is not finite stays so"

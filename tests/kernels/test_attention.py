"""Paged attention: equal to dense attention in float64, and bit for bit the same however the work is cut up.

Every cache here is poisoned: what no query may see (free blocks, positions past a sequence's end, lanes that only
pad a block, positions before a window) holds NaN and infinities, as it may after another sequence went wrong.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_cases import DTYPES, EVERY_BACK_END, EVERY_NAME, Case, KvDtype, Shape, attend, dense, every_dtype, make_case
from tiny_model import BACK_ENDS
from torch import Tensor

from batchgen.kernels.cpu import backend, layout
from batchgen.kernels.cpu.backend import CpuKernels

BLOCK_SIZES = [1, 3, 16, 24, 32, 64, 96, 300]
# (num_heads, num_kv_heads, head_dim)
HEADS = [(3, 3, 16), (5, 5, 8), (4, 2, 64), (6, 2, 24), (4, 1, 40), (12, 1, 16), (1, 1, 128)]
# (positions cached before, tokens of this step): whole prompts, chunks, single tokens, across the tile of 256
PIECES = [(0, 1), (0, 7), (5, 1), (15, 17), (254, 1), (255, 1), (256, 1), (250, 13), (0, 260), (511, 2), (700, 3)]


@functools.cache
def solved_case(heads: Shape, dtype: torch.dtype, kv_cache_dtype: KvDtype, seed: int) -> tuple[Case, list[Tensor]]:
    """A case of all ``PIECES`` and its dense attention, for all tests that leave it as it is."""
    case = make_case(PIECES, heads, dtype, seed, kv_cache_dtype)
    return case, dense(case)


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("name", BACK_ENDS)
def test_paged_attention_equals_dense_attention(
    name: str, block_size: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    for seed, heads in enumerate(HEADS):
        case, solution = solved_case(heads, dtype, kv_cache_dtype, seed)
        # bfloat16: probabilities and results are rounded to 8 bits each, and values are as large as 4.
        tolerance = {"rtol": 2**-8, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
        for got, expected in zip(attend(BACK_ENDS[name](), case, block_size), solution, strict=True):
            torch.testing.assert_close(got.double(), expected, **tolerance)
            mean_error = (got.double() - expected).norm() / expected.norm()
            assert mean_error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@every_dtype
@pytest.mark.parametrize("heads", [(8, 8, 16), (6, 6, 24), (24, 12, 16), (32, 8, 8), (48, 6, 16)], ids=str)
@pytest.mark.usefixtures("threads_as_before")
def test_bits_do_not_depend_on_how_many_heads_an_item_walks(
    heads: Shape, dtype: torch.dtype, kv_cache_dtype: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    for window, block_size in ((0, 32), (0, 24), (40, 64)):
        case = make_case(PIECES, heads, dtype, 4, kv_cache_dtype, window, is_gated=window > 0)
        found = []
        for most in range(1, layout.MAX_HEADS + 1):
            monkeypatch.setattr(backend, "MAX_HEADS", most)
            found.append(attend(CpuKernels(), case, block_size))
        assert all(all(map(torch.equal, one, found[0])) for one in found)


@every_dtype
@pytest.mark.parametrize("name", BACK_ENDS)
def test_positions_far_below_the_highest_score_weigh_nothing(
    name: str, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    case = make_case([(40, 1)], (2, 1, 16), dtype, 5, kv_cache_dtype)
    keys, values = torch.full_like(case.keys[0], -5), torch.full_like(case.values[0], 2e38)
    keys[7], values[7] = 5, 1
    case = replace(case, queries=[torch.full_like(case.queries[0], 10)], keys=[keys], values=[values])
    (found,) = attend(BACK_ENDS[name](), case, 32)
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.usefixtures("threads_as_before")
def test_items_leave_every_worker_its_share() -> None:
    for num_blocks, threads, heads in [(1, 1, 8), (1, 2, 4), (7, 2, 4), (8, 2, 8), (1, 16, 1), (16, 4, 8), (15, 4, 4)]:
        torch.set_num_threads(threads)
        assert backend.heads_of_an_item(num_blocks, 8) == heads
    torch.set_num_threads(1)
    assert [backend.heads_of_an_item(1, heads) for heads in (1, 6, 7, 11, 12, 32)] == [1, 6, 7, 1, 6, 8]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_attention_follows_scores_of_any_size(name: str) -> None:
    case = make_case([(300, 4), (0, 20)], (4, 2, 16), torch.float32, 4)
    case = replace(case, queries=[200 * q for q in case.queries])  # so sharp that one position takes all
    for got, expected in zip(attend(EVERY_BACK_END[name](), case, 16), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


@every_dtype
def test_a_sequence_of_nan_spoils_no_other(dtype: torch.dtype, kv_cache_dtype: KvDtype) -> None:
    case = make_case([(20, 3), (0, 9), (40, 1)], (4, 2, 16), dtype, 5, kv_cache_dtype)
    clean = attend(CpuKernels(), case, 16)
    for poison in (torch.nan, torch.inf):
        case.keys[1][4], case.values[1][4] = poison, poison
        dirty = attend(CpuKernels(), case, 16)
        assert torch.equal(dirty[0], clean[0])
        assert torch.equal(dirty[2], clean[2])
        assert dirty[1][4:].isnan().all()


# ---------------------------------------------------------------- windows and gates

# (positions cached before, tokens of this step): windows end and begin in every part of a tile of 256
WINDOWED = [(0, 1), (0, 40), (254, 1), (255, 1), (275, 1), (350, 1), (511, 1), (250, 13), (512, 40), (700, 3), (895, 1)]
WINDOWED_HEADS = ONE, FOUR, TWO = (3, 3, 16), (4, 1, 40), (8, 4, 128)  # query heads on each key
every_window = pytest.mark.parametrize(
    ("window", "heads", "block_size"), [(3, ONE, 24), (20, FOUR, 32), (97, TWO, 128), (256, FOUR, 3), (256, TWO, 32)]
)
ALL = (0, (6, 2, 24), 32), (0, (12, 1, 16), 1)  # of attention to all positions


@every_dtype
@every_window
@pytest.mark.parametrize("name", BACK_ENDS)
def test_windowed_attention_equals_dense_attention(
    name: str,
    window: int,
    heads: Shape,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: KvDtype,
) -> None:
    case = make_case(WINDOWED, heads, dtype, window, kv_cache_dtype, window, is_gated=True)
    tolerance = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for got, expected in zip(attend(BACK_ENDS[name](), case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerance)


WHOLE = [(0, 1), (0, 2), (0, 40), (0, 257), (0, 600)]  # texts whose tokens see later ones too


@every_dtype
@every_window
@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_window_to_both_sides_equals_dense_attention(
    name: str, window: int, heads: Shape, block_size: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    case = replace(make_case(WHOLE, heads, dtype, window, kv_cache_dtype, window), is_causal=False)
    tolerance = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 5e-6}
    for got, expected in zip(attend(BACK_ENDS[name](), case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerance)


@every_dtype
@every_window
def test_bits_in_a_window_to_both_sides_do_not_depend_on_blocks_or_other_texts(
    window: int, heads: Shape, block_size: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    batch = replace(make_case(WHOLE, heads, dtype, 1, kv_cache_dtype, window), is_causal=False)
    expected = attend(CpuKernels(), batch, block_size)
    for row in range(len(WHOLE)):
        assert torch.equal(attend(CpuKernels(), batch.only(row), (3, 16, 64)[row % 3])[0], expected[row])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_what_lies_just_before_a_window_does_not_count_however_high_it_scores(name: str) -> None:
    case = make_case([(280, 1), (90, 3)], (4, 2, 16), torch.float32, 5, window=20)
    for keys, (past, _) in zip(case.keys, case.pieces, strict=True):
        keys[: past - 19] *= 1e4
    for got, expected in zip(attend(EVERY_BACK_END[name](), case, 16), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-6)


@every_dtype
@pytest.mark.parametrize(
    ("window", "heads", "block_size"), [*every_window.args[1], (0, (6, 2, 24), 32), (0, (12, 1, 16), 1)]
)
@pytest.mark.usefixtures("threads_as_before")
def test_bits_do_not_depend_on_blocks_or_other_sequences_or_how_a_prompt_is_cut(
    window: int, heads: Shape, block_size: int, dtype: torch.dtype, kv_cache_dtype: KvDtype
) -> None:
    batch = make_case(WINDOWED, heads, dtype, 1, kv_cache_dtype, window, is_gated=True)
    torch.set_num_threads(1)
    expected = attend(CpuKernels(), batch, block_size)
    torch.set_num_threads(2)
    assert all(map(torch.equal, attend(CpuKernels(), batch, block_size, 1), expected))
    for row in range(len(WINDOWED)):
        assert torch.equal(attend(CpuKernels(), batch.only(row), (3, 16, 64)[row % 3])[0], expected[row])
    whole = make_case([(0, 430)], heads, dtype, 2, kv_cache_dtype, window, is_gated=True)
    expected = attend(CpuKernels(), whole, block_size)
    starts = [0, 1, 5, 12, 21, 240, *range(250, 262), 279, 280, 316, 429, 430]
    cuts = [whole.chunk(start, end - start) for start, end in pairwise(starts)]
    assert torch.equal(torch.cat([attend(CpuKernels(), chunk, 32)[0] for chunk in cuts]), expected[0])


@every_dtype
def test_a_window_that_holds_all_positions_changes_no_bit(dtype: torch.dtype, kv_cache_dtype: KvDtype) -> None:
    pieces = [(0, 20), (290, 1), (280, 20)]
    for heads in WINDOWED_HEADS:
        expected = attend(CpuKernels(), make_case(pieces, heads, dtype, 3, kv_cache_dtype), 32)
        for window in (300, 10_000):
            windowed = make_case(pieces, heads, dtype, 3, kv_cache_dtype, window)
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

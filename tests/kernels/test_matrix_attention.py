"""Attention by tiles in memory: the bits of the model of AMX, and a row's bits are its own in any company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tile_model
import torch
from kernel_cases import Case, Shape, attend, dense, make_case
from numba import types
from numpy.typing import NDArray
from repeats import slow
from tiny_model import engine_for, random_requests, solo, tiny_model, tokens_of

from batchgen.kernels.cpu import backend, layout
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.compiled import matrix_attention, simd, tiles
from batchgen.kernels.cpu.compiled.simd import BF16, BYTES, F32, TILED

pytestmark = pytest.mark.usefixtures("attention_by_tiles")
BFLOAT16 = torch.bfloat16
Array = NDArray[Any]
# (num_heads, num_kv_heads, head_dim): groups of 1, 2, 3, 4, 8 and more query heads on each key
HEADS = [(2, 2, 64), (2, 1, 128), (9, 3, 64), (4, 1, 32), (8, 1, 64), (12, 1, 96)]
every_shape = pytest.mark.parametrize("heads", HEADS, ids=str)
# (positions cached before, tokens of this step): single tokens, chunks and prompts, across the tile of 256
PIECES = [(0, 1), (31, 1), (32, 1), (255, 1), (256, 1), (500, 1), (0, 7), (15, 17), (250, 13), (0, 40), (511, 2)]


def attended(case: Case, block_size: int = 32, seed: int = 0) -> list[torch.Tensor]:
    return attend(CpuKernels(), case, block_size, seed)


# ---------------------------------------------------------------- the two products


@simd.jit
def _scores(state: int, rows: int, count: int, q: int, width: int, keys: int, lanes: int, out: int) -> None:
    tiled, scores = simd.pointer(q, TILED), simd.pointer(out, F32)
    memory = simd.pointer(state, BYTES)
    matrix_attention.begin(tiled, memory, rows)
    matrix_attention.score(memory, rows, count, tiled, width, simd.pointer(keys, BF16), 0, 2, lanes, scores, 0)
    matrix_attention.end(tiled)


@simd.jit
def _sums(state: int, copies: int, rows: int, weights: int, values: int, some: Any, width: int, out: int) -> None:
    tiled, memory = simd.pointer(weights, TILED), simd.pointer(state, BYTES)
    matrix_attention.begin(tiled, memory, rows)
    a = simd.pointer(values, BF16)
    b, c, d = simd.shifted(a, 32 * width), simd.shifted(a, 64 * width), simd.shifted(a, 96 * width)
    chunks, sums = ((a, 0), (b, 0), (c, 0), (d, 0)), simd.pointer(out, F32)
    matrix_attention.accumulate(memory, simd.pointer(copies, BF16), rows, tiled, 0, chunks, some, width, sums)
    matrix_attention.end(tiled)


def address(x: Array) -> int:
    assert x.flags.c_contiguous
    return int(x.ctypes.data)


def state() -> Array:
    return np.zeros(layout.TILE_STATE, np.float32)


def same(a: Array, b: Array) -> bool:
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


needs_memory = pytest.mark.skipif(not tiles.IN_MEMORY, reason="tiles are registers here")


@needs_memory
def test_scores_have_the_bits_of_the_model_for_hostile_numbers() -> None:
    random = np.random.default_rng(0)
    for rows, width, count in ((1, 32, 32), (3, 64, 96), (16, 128, 64), (8, 96, 40), (2, 64, 16)):
        lanes = -(-count // 16) * 16
        q, keys = tile_model.hostile_bits(random, (rows, width)), tile_model.hostile_bits(random, (lanes, width))
        beyond = np.zeros(64, np.uint16)  # which the last vectors of a block read
        packed = np.concatenate((keys.reshape(lanes, -1, 2).transpose(1, 0, 2).ravel(), beyond))
        out, memory = np.zeros((rows, layout.SCORE_STRIDE), np.float32), state()
        _scores(address(memory), rows, count, address(q), width, address(packed), lanes, address(out))
        with np.errstate(all="ignore"):
            expected = tile_model.product(q, keys) * np.float32(1.4426950408889634)
        assert same(np.ascontiguousarray(out[:, :count]), np.ascontiguousarray(expected[:, :count]))


@needs_memory
def test_sums_of_values_have_the_bits_of_the_model_for_hostile_numbers() -> None:
    random = np.random.default_rng(1)
    for rows, width, (first, last) in ((1, 32, (0, 3)), (3, 64, (1, 2)), (16, 128, (0, 0)), (5, 96, (3, 7))):
        weights = tile_model.hostile_bits(random, (rows, layout.SCORE_STRIDE))
        values = tile_model.hostile_bits(random, (4 * layout.CHUNK, width))
        sums = random.standard_normal((rows, width)).astype(np.float32)
        expected, copies = sums.copy(), np.zeros((2, 4 * layout.CHUNK, width), np.uint16)
        memory = state()
        places = address(weights), address(values)
        _sums(address(memory), address(copies), rows, *places, (first, last), width, address(sums))
        with np.errstate(all="ignore"):
            for chunk in range(first, min(last + 1, 4)):  # later ones are not of these four
                some = slice(chunk * layout.CHUNK, (chunk + 1) * layout.CHUNK)
                expected = tile_model.add_products(expected, weights[:, some], np.ascontiguousarray(values[some].T))
        assert same(sums, expected)


def test_kernels_choose_tiles_by_the_type_of_the_queries() -> None:
    assert simd.is_tiled(types.CPointer(types.int16))
    assert not any(simd.is_tiled(types.CPointer(kind)) for kind in (types.uint16, types.float32))


# ---------------------------------------------------------------- the whole


@every_shape
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (24, 0), (32, 40), (64, 256)])
def test_attention_by_tiles_equals_dense_attention(heads: Shape, block_size: int, window: int) -> None:
    case = make_case(PIECES, heads, BFLOAT16, 1, window=window, is_gated=window > 0)
    for got, expected in zip(attended(case, block_size), dense(case), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=2**-6)


@every_shape
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.usefixtures("threads_as_before")
def test_bits_depend_on_no_block_size_no_other_sequence_and_no_thread(heads: Shape, window: int) -> None:
    case = make_case(PIECES, heads, BFLOAT16, 2, window=window)
    torch.set_num_threads(1)
    expected = attended(case)
    for block_size, seed in ((1, 0), (24, 1), (64, 0), (96, 1)):
        assert all(map(torch.equal, attended(case, block_size, seed), expected))
    for row in range(len(PIECES)):
        assert torch.equal(attended(case.only(row))[0], expected[row])
    torch.set_num_threads(2)
    assert all(map(torch.equal, attended(case), expected))


@every_shape
@pytest.mark.parametrize("window", [0, 40])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(heads: Shape, window: int) -> None:
    whole = make_case([(0, 300)], heads, BFLOAT16, 3, window=window)
    expected = attended(whole)[0]
    for starts in (range(0, 301, 4), [0, 1, 8, 17, 33, 34, 100, 255, 256, 257, 300]):
        cuts = [whole.chunk(start, end - start) for start, end in pairwise(starts)]
        assert torch.equal(torch.cat([attended(cut)[0] for cut in cuts]), expected)
    for position in (0, 1, 31, 32, 63, 64, 254, 255, 256, 299):
        assert torch.equal(attended(whole.chunk(position, 1))[0], expected[position : position + 1])


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-126, 2.0**-131], ids=["small", "least", "denormal"])
def test_bits_of_the_smallest_values_do_not_depend_on_the_rows_beside_them(size: float) -> None:
    whole = make_case([(0, 270)], (4, 2, 64), BFLOAT16, 5)
    whole = replace(whole, values=[whole.values[0] * size])
    expected = attended(whole)[0]
    assert size < 2.0**-130 or expected.any()
    for position in (0, 3, 31, 32, 100, 254, 255, 256, 269):
        alone = attended(whole.chunk(position, 1))[0]
        assert torch.equal(alone.view(torch.int16), expected[position : position + 1].view(torch.int16))


@pytest.mark.parametrize("heads", [(8, 8, 64), (24, 12, 32), (32, 8, 32)], ids=str)
@pytest.mark.usefixtures("threads_as_before")
def test_bits_do_not_depend_on_how_many_heads_an_item_walks(heads: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    case = make_case(PIECES, heads, BFLOAT16, 4)
    found = []
    for most in (1, 2, 4, 8):
        monkeypatch.setattr(backend, "MAX_HEADS", most)
        found.append(attended(case))
    assert all(all(map(torch.equal, one, found[0])) for one in found)


def test_a_sequence_of_nan_spoils_no_other() -> None:
    case = make_case([(20, 3), (0, 9), (40, 1)], (4, 2, 64), BFLOAT16, 5)
    clean = attended(case, 16)
    case.keys[1][4], case.values[1][4] = torch.nan, torch.inf
    dirty = attended(case, 16)
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[2], clean[2])
    assert dirty[1][4:].isnan().all()


MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "llama": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma3_text": {"head_dim": 32},
}


@pytest.mark.parametrize("model_type", ["lfm2", slow("llama"), slow("gemma3_text")])
def test_a_model_gives_a_row_the_same_tokens_in_any_company(model_type: str) -> None:
    """Short of memory and in chunks, or alone."""
    model = tiny_model(BFLOAT16, CpuKernels(BFLOAT16), model_type=model_type, **MODELS[model_type])
    assert model.config.head_dim % layout.TILE_STEP == 0
    requests = random_requests(9, seed=1)
    engine = engine_for(model, num_blocks=60, block_size=5, max_num_batched_tokens=40, max_num_seqs=8)
    assert tokens_of(engine.run(requests)) == solo(model, requests)

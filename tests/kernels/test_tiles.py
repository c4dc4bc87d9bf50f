"""Tiles in memory: the operations of AMX to the bit, and the linears that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tile_model
import torch
from kernel_cases import normal
from numba import types
from numpy.typing import NDArray
from reference_kernels import ReferenceKernels
from tiny_model import engine_for, random_requests, solo, tiny_model, tokens_of
from torch import Tensor

from batchgen.kernels.cpu import linear as linears
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.compiled import emit, simd, tiles
from batchgen.kernels.cpu.compiled.simd import ANY, BYTES, I64, emitted
from batchgen.kernels.cpu.layout import TILE_ROW_BYTES, TILE_STATE
from batchgen.kernels.cpu.linear import PackedLinear
from batchgen.kernels.quantize import stored

needs_memory = pytest.mark.skipif(not tiles.IN_MEMORY, reason="tiles are registers here")
Words = NDArray[Any]


def multiplying(emit_dot: Any) -> Any:
    """Function of the addresses of a state, a total, two factors, all tiles of whole rows, and a number of rows."""

    @emitted(types.void, ANY, ANY, ANY, ANY, I64)
    def multiply(builder: Any, state: Any, total: Any, a: Any, b: Any, rows: Any) -> None:
        full, line = emit.number(16), emit.number(TILE_ROW_BYTES)
        tiles.emit_configure(builder, state, [rows, rows, *[full] * 6])
        for tile, at in enumerate((total, a, b)):
            tiles.emit_load(builder, state, tile, at, line)
        emit_dot(builder, state, 0, 1, 2)
        tiles.emit_store(builder, state, 0, total, line)
        tiles.emit_release(builder)

    @simd.jit
    def of_addresses(state: int, total: int, a: int, b: int, rows: int) -> None:
        places = simd.pointer(state, BYTES), simd.pointer(total, BYTES), simd.pointer(a, BYTES), simd.pointer(b, BYTES)
        multiply(*places, rows)

    return of_addresses


def run(function: Any, total: Words, a: Words, b: Words) -> Words:
    """The total after a product of tiles, each an array of rows of 64 bytes."""
    assert all(x.flags.c_contiguous for x in (total, a, b))
    state, after = np.zeros(TILE_STATE, np.float32), total.copy()
    function(state.ctypes.data, after.ctypes.data, a.ctypes.data, b.ctypes.data, len(total))
    return after


def as_tile(weight: Words, together: int) -> Words:
    """A weight [16 outputs, inputs] with so many inputs side by side, [inputs / together, 16, together]."""
    return np.ascontiguousarray(weight.reshape(16, -1, together).transpose(1, 0, 2))


def same(a: Words, b: Words) -> bool:
    """Whether float32 arrays have the same bits, and NaN in the same places."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@needs_memory
def test_a_product_of_tiles_has_the_bits_of_the_model_for_hostile_numbers() -> None:
    random, multiply = np.random.default_rng(0), multiplying(tiles.emit_dot_bf16)
    for turn in range(300):
        rows = int(random.integers(1, 17))
        x, weight = (tile_model.hostile_bits(random, (n, 32)) for n in (rows, 16))
        total = tile_model.widened(tile_model.hostile_bits(random, (rows, 16)))
        total = (total.view(np.uint32) ^ random.integers(0, 1 << 16, total.shape).astype(np.uint32)).view(np.float32)
        with np.errstate(all="ignore"):
            expected = tile_model.add_products(total, x, weight)
        assert same(run(multiply, total, x, as_tile(weight, 2)), expected), f"turn {turn}, {rows} rows"


@needs_memory
def test_a_product_of_byte_tiles_is_exact() -> None:
    random, multiply = np.random.default_rng(0), multiplying(tiles.emit_dot_int8)
    for rows in (1, 7, 16):
        x, weight = random.integers(-128, 128, (rows, 64)), random.integers(0, 256, (16, 64))
        x[0], weight[:2] = -128, 255
        total = random.integers(-(2**20), 2**20, (rows, 16)).astype(np.int32)
        found = run(multiply, total, x.astype(np.int8), as_tile(weight.astype(np.uint8), 4))
        assert np.array_equal(found, total + x @ weight.T)


def by_tiles(weight: Tensor, bias: Tensor | None = None, **forms: str) -> PackedLinear:
    """A linear whose products are made of tiles on any processor."""
    linear = PackedLinear(weight, bias, **forms)
    linear.by_tiles = True
    return linear


@pytest.mark.parametrize("inputs", [2, 30, 32, 66, 352, 700])
def test_a_linear_by_tiles_has_the_bits_of_the_model(inputs: int) -> None:
    random = np.random.default_rng(inputs)
    for rows in (1, 16, 21, 131):
        x, weight = (random.standard_normal((n, inputs)).astype(np.float32) for n in (rows, 70))
        bits = [(part.view(np.uint32) >> 16).astype(np.uint16) for part in (x, weight)]
        of_torch = [torch.from_numpy(part.view(np.int16)).view(torch.bfloat16) for part in bits]
        found = by_tiles(of_torch[1])(of_torch[0]).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(found, tile_model.rounded_bits(tile_model.product(*bits)))


def test_integers_that_are_unpacked_are_multiplied_as_the_numbers_that_they_are_for() -> None:
    weight, x = normal(70, 416, seed=1).bfloat16(), normal(37, 416, seed=2).bfloat16()
    packed, plain = by_tiles(weight, weights="int8"), by_tiles(stored(weight, "int8", torch.bfloat16))
    for rows in (1, 2, 16, 37):
        assert torch.equal(packed(x[:rows]), plain(x[:rows]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [32, 40, 100])
@pytest.mark.usefixtures("threads_as_before")
def test_a_gated_linear_by_tiles_is_right_and_a_rows_bits_are_its_own(width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    gate, up, x = (normal(n, 70, seed=n).bfloat16() for n in (width, width + 1, 300))
    up = up[1:].contiguous()
    linear = linears.PackedGatedLinear(gate / 8, up / 8)
    linear.product.by_tiles = True
    whole = linear(x)
    torch.testing.assert_close(whole, ReferenceKernels().gated_linear(gate / 8, up / 8)(x), rtol=2**-6, atol=2**-5)
    for rows in (0, 1, 15, 16, 17, 33, 130, 257):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[rows:]), whole[rows:])


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_a_model_by_tiles_gives_a_row_the_same_tokens_in_any_company(
    model_type: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "has_matrix_unit", lambda unit: unit == "bf16")
    model = tiny_model(torch.bfloat16, CpuKernels(torch.bfloat16, weights=quantization), model_type=model_type)
    assert model.lm_head.by_tiles
    requests = random_requests(9, seed=1)
    engine = engine_for(model, num_blocks=60, block_size=5, max_num_batched_tokens=40, max_num_seqs=8)
    assert tokens_of(engine.run(requests)) == solo(model, requests)

"""Matrix products with a fixed weight: by kernels that sum in the same order for any number of rows, or by cuBLAS.

cuBLAS picks its kernel by shape and may split the inner dimension: a row's last bits depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cuda import tuning
from batchgen.kernels.cuda.tiles import SplitCounters
from batchgen.kernels.cuda.tuning import GROUP_M


class FixedOrderLinear:
    """``Linear`` whose order of sums depends only on the weight; the bias is added before rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, counters: SplitCounters) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.num_parts = parts_of(*weight.shape)
        self._counters = counters

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        if self.num_parts > 1 and len(x) <= tuning.MAX_ROWS_IN_PARTS:
            self._launch_parts(x, out)
        else:
            options = tiles_of(x)
            tile_m, tile_n = options["TILE"]
            grid = (triton.cdiv(len(x), tile_m) * triton.cdiv(len(self.weight), tile_n),)
            sizes = (*out.shape, x.shape[1])
            matmul[grid](x, self.weight, self.bias, out, *sizes, NUM_PARTS=self.num_parts, **options)
        return out if residual is None else out + residual

    def _launch_parts(self, x: Tensor, out: Tensor) -> None:
        """Launch for rows whose tiles would leave most of a GPU idle: each part of a sum has its own program."""
        (rows, width), out_features = x.shape, len(self.weight)
        options = tiles_of(x, tuning.PART_TILE)
        tile_m, tile_n = options["TILE"]
        grid = (triton.cdiv(out_features, tile_n), self.num_parts, triton.cdiv(rows, tile_m))
        parts = x.new_empty(self.num_parts, rows, out_features, dtype=torch.float32)
        arrived = self._counters.at_least(grid[0] * grid[2], x.device)
        tensors = (x, self.weight, self.bias, parts, arrived, out)
        matmul_in_parts[grid](tensors, rows, out_features, width, NUM_PARTS=self.num_parts, **options)


class CublasLinear:
    """``Linear`` by cuBLAS; torch's setting decides whether float32 may use TF32, by default not."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y if residual is None else y + residual


def parts_of(out_features: int, width: int) -> int:
    """The number of parts of a product's sums; each is summed separately, then added to the earlier parts.

    A weight with few rows, as at the end of a mixer or feed-forward, has several parts: one program per tile would
    leave most of a GPU idle. Width and dtype decide where parts begin, so that both kernels give the same bits.
    """
    return tuning.NUM_PARTS if out_features <= width else 1


def tiles_of(x: Tensor, few: tuple[int, int] = tuning.FEW_TILE) -> dict[str, Any]:
    """Launch options of a product of x: the tile ``few`` for few rows, a larger one for many, with the same K steps."""
    if len(x) <= tuning.FEW_ROWS or x.element_size() == 4:  # without matrix instructions, tall tiles spill registers
        return {"TILE": few, **block_sizes(x)}
    return {"TILE": tuning.TALL_TILE, **block_sizes(x), **tuning.TALL_OPTIONS}


def block_sizes(x: Tensor) -> dict[str, Any]:
    """Launch options of a product of x in small tiles."""
    if x.element_size() == 4:
        return {"BLOCK_K": tuning.BLOCK_K_FLOAT32, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS_FLOAT32}
    return {"BLOCK_K": tuning.BLOCK_K, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS}


@triton.jit
def product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of rows m of x with rows n of ``weight``, added up over one part of ``width``, in steps of ``BLOCK_K``.

    Float32 [len(m), len(n)]. The sum of all parts, in order, is the product: the bits of each element only depend on
    ``NUM_PARTS`` and ``BLOCK_K``.
    """
    extent = tl.cdiv(width, NUM_PARTS * BLOCK_K) * BLOCK_K
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    total = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    for start in range(part * extent, tl.minimum((part + 1) * extent, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * width + k[None, :], mask=(row < rows) & (k < width)[None, :], other=0.0)
        at = weight + column * width + k[:, None]
        b = tl.load(at, mask=(column < out_features) & (k < width)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def matmul(
    x,
    weight,
    bias,
    out,
    rows,
    out_features,
    width,
    TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out = x @ weight.T (+ bias)``: one program per tile of ``out``, which adds up the parts of a sum in order."""
    tiles_n = tl.cdiv(out_features, TILE[1])
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    tiles_m = tl.minimum(tl.cdiv(rows, TILE[0]) - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m = (group * GROUP_M + within % tiles_m) * TILE[0] + tl.arange(0, TILE[0])
    n = within // tiles_m * TILE[1] + tl.arange(0, TILE[1])
    total = product(x, weight, m, n, rows, out_features, width, 0, NUM_PARTS, BLOCK_K)
    for part in range(1, NUM_PARTS):
        total += product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS, BLOCK_K)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    inside = (row < rows) & (column < out_features)
    if bias is not None:
        total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def matmul_in_parts(
    tensors,
    rows,
    out_features,
    width,
    TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``matmul`` with one program per tile of ``out`` and part of ``width``; the bits are the same.

    The last program to arrive adds up the parts, in order, and resets the counter in ``counters`` to zero.
    """
    x, weight, bias, parts, counters, out = tensors
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * TILE[1] + tl.arange(0, TILE[1])
    m = tl.program_id(2) * TILE[0] + tl.arange(0, TILE[0])
    total = product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS, BLOCK_K)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    inside = (row < rows) & (column < out_features)
    at = row * out_features + column
    size = rows.to(tl.int64) * out_features
    tl.store(parts + part * size + at, total, mask=inside)
    arrived = counters + tl.program_id(2) * tl.num_programs(0) + tile
    tl.debug_barrier()  # every thread has written before one of them counts
    if tl.atomic_add(arrived, 1, sem="acq_rel") == NUM_PARTS - 1:
        tl.store(arrived, 0)
        total = tl.zeros_like(total)
        for i in tl.static_range(NUM_PARTS):
            total += tl.load(parts + i * size + at, mask=inside, other=0.0)
        if bias is not None:
            total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)

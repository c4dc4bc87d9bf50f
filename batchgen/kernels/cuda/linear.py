"""Matrix products with a fixed weight: cuBLAS, or a kernel that sums in one order whatever the number of rows.

cuBLAS picks its kernel by shape and may split the inner dimension when rows are few, so a row's last bits can
differ with how many rows share the product. ``FixedOrderLinear`` computes every element from tiles of one size,
adding along the inner dimension from its start to its end: a row's bits are its own, at the cost of tiles that are
too tall for a few rows and too small for thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cuda import tuning
from batchgen.kernels.cuda.rows import gated
from batchgen.kernels.cuda.tuning import BLOCK_M, BLOCK_N, GATED_N, GROUP_M, NUM_PARTS, PART_N
from batchgen.kernels.interface import Linear


class CublasLinear:
    """``Linear`` by cuBLAS, in float32 as exact as torch's setting says; its default allows no TF32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y if residual is None else y + residual

    def parts(self, x: Tensor) -> Tensor:
        """What add up to the product of few rows without its bias, float32 [NUM_PARTS, rows, out_features]."""
        (rows, width), out_features = x.shape, len(self.weight)
        out = torch.empty(NUM_PARTS.value, rows, out_features, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(out_features, PART_N.value), NUM_PARTS.value, triton.cdiv(rows, BLOCK_M.value))
        matmul_parts[grid](x, self.weight, out, rows, out_features, width, **block_sizes(x))
        return out


class FixedOrderLinear:
    """``Linear`` that adds every product in the same order, and the bias before it rounds."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        out_features = len(self.weight)
        out = x.new_empty(rows, out_features)
        grid = (triton.cdiv(rows, BLOCK_M.value) * triton.cdiv(out_features, BLOCK_N.value),)
        matmul[grid](x, self.weight, self.bias, out, rows, out_features, width, **block_sizes(x))
        return out if residual is None else out + residual


class FusedGatedLinear:
    """``GatedLinear`` of one weight, gates before ups, that is one kernel for few rows, and two steps for many.

    For few rows a row's bits are its own: those of ``FixedOrderLinear`` and SwiGLU, up to what the width of a tile may
    change in a matrix instruction.
    """

    def __init__(self, weight: Tensor, swiglu: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight
        self.linear: Linear = CublasLinear(weight, None)
        self._swiglu = swiglu

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if rows > tuning.FEW_ROWS:
            return self._swiglu(self.linear(x))
        inner = len(self.weight) // 2
        out = x.new_empty(rows, inner)
        grid = (triton.cdiv(inner, GATED_N.value), triton.cdiv(rows, BLOCK_M.value))
        gated_matmul[grid](x, self.weight, out, rows, inner, width, **block_sizes(x))
        return out


def block_sizes(x: Tensor) -> dict[str, Any]:
    """How a product of x in tiles of ``BLOCK_M`` by ``BLOCK_N`` is launched."""
    if x.element_size() == 4:
        return {"BLOCK_K": tuning.BLOCK_K_FLOAT32, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS_FLOAT32}
    return {"BLOCK_K": tuning.BLOCK_K, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS}


@triton.jit(do_not_specialize=["rows"])
def matmul(x, weight, bias, out, rows, out_features, width, BLOCK_K: tl.constexpr):
    """``out = x @ weight.T (+ bias)``: one program per tile of ``out``."""
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    tiles_m = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m = (group * GROUP_M + within % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * width + k[None, :], mask=(row < rows) & (k < width)[None, :], other=0.0)
        at = weight + column * width + k[:, None]
        b = tl.load(at, mask=(column < out_features) & (k < width)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    inside = (row < rows) & (column < out_features)
    if bias is not None:
        total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_matmul(x, weight, out, rows, inner, width, BLOCK_K: tl.constexpr):
    """``out = silu(gates) * ups`` of ``x @ weight.T``, the gates before the ups: one program per tile of ``out``.

    Products are added up as in ``matmul`` and rounded as if they were stored.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * GATED_N + tl.arange(0, GATED_N)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    gate = tl.zeros([BLOCK_M, GATED_N], tl.float32)
    up = tl.zeros([BLOCK_M, GATED_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * width + k[None, :], mask=(row < rows) & (k < width)[None, :], other=0.0)
        at = weight + column * width + k[:, None]
        inside = (column < inner) & (k < width)[:, None]
        gate = tl.dot(a, tl.load(at, mask=inside, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(at + inner * width, mask=inside, other=0.0), up, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    y = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))
    tl.store(out + row * inner + column, y.to(dtype), mask=(row < rows) & (column < inner))


@triton.jit(do_not_specialize=["rows"])
def matmul_parts(x, weight, out, rows, out_features, width, BLOCK_K: tl.constexpr):
    """``out[i] = x @ weight.T`` over the i-th part of ``width``: one program per tile and part.

    The weight alone says where parts begin, so that a row's sum does not depend on how many rows there are.
    """
    n = tl.program_id(0) * PART_N + tl.arange(0, PART_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    part = tl.program_id(1)
    extent = tl.cdiv(width, NUM_PARTS * BLOCK_K) * BLOCK_K
    total = tl.zeros([BLOCK_M, PART_N], tl.float32)
    for start in range(part * extent, tl.minimum((part + 1) * extent, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * width + k[None, :], mask=(row < rows) & (k < width)[None, :], other=0.0)
        at = weight + column * width + k[:, None]
        b = tl.load(at, mask=(column < out_features) & (k < width)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    to = out + (part.to(tl.int64) * rows + row) * out_features + column
    tl.store(to, total, mask=(row < rows) & (column < out_features))

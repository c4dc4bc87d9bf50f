"""Matrix products with a fixed weight: cuBLAS, or a kernel that sums in one order whatever the number of rows.

cuBLAS picks its kernel by shape and may split the inner dimension when rows are few, so a row's last bits can
differ with how many rows share the product. ``FixedOrderLinear`` computes every element from tiles of one size,
adding along the inner dimension from its start to its end: a row's bits are its own, at the cost of tiles that are
too tall for a few rows and too small for thousands.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

BLOCK_M = tl.constexpr(64)  # the least that a Hopper matrix instruction takes
BLOCK_N = tl.constexpr(64)
GROUP_M = tl.constexpr(8)  # row tiles that go over the weight together, so that it is read from the L2 cache


class CublasLinear:
    """``Linear`` by cuBLAS, in float32 as exact as torch's setting says; its default allows no TF32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return functional.linear(x, self.weight, self.bias)
        y = torch.addmm(residual, x, self.weight.T)  # added before the product is rounded
        return y if self.bias is None else y + self.bias


class FixedOrderLinear:
    """``Linear`` that adds bias and residual before it rounds, and every product in the same order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        out_features = len(self.weight)
        out = x.new_empty(rows, out_features)
        grid = (triton.cdiv(rows, BLOCK_M.value) * triton.cdiv(out_features, BLOCK_N.value),)
        matmul[grid](x, self.weight, self.bias, residual, out, rows, out_features, width, **block_sizes(x))
        return out


def block_sizes(x: Tensor) -> dict[str, Any]:
    """How a product of x in tiles of ``BLOCK_M`` by ``BLOCK_N`` is launched."""
    is_wide = x.element_size() == 4
    stages = {"num_warps": 8, "num_stages": 3} if is_wide else {"num_warps": 4, "num_stages": 4}
    return {"BLOCK_K": 32 if is_wide else 64, "enable_fp_fusion": True, **stages}


@triton.jit(do_not_specialize=["rows"])
def matmul(x, weight, bias, residual, out, rows, out_features, width, BLOCK_K: tl.constexpr):
    """``out = x @ weight.T (+ bias) (+ residual)``: one program per tile of ``out``."""
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
    if residual is not None:
        total += tl.load(residual + row * out_features + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)

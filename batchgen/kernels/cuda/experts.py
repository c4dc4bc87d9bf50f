"""Experts on a GPU: rows are sorted by expert, and one kernel multiplies every tile of them.

A tile never spans two experts, and finds its expert on the device: the host only knows the largest number of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.cuda.linear import CublasLinear, block_sizes, product
from batchgen.kernels.cuda.tiles import num_tiles, tile_of
from batchgen.kernels.cuda.tuning import BLOCK_M, BLOCK_N
from batchgen.kernels.interface import Linear
from batchgen.kernels.quantize import stored
from batchgen.kernels.torch_kernels import TorchKernels, add_up


class StackedExperts:
    """``SparseFeedForward`` with the weights of all experts in one tensor each."""

    def __init__(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]], kernels: TorchKernels) -> None:
        def laid_out(gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
            gate, up, down = (stored(weight, kernels.weights, weight.dtype) for weight in (gate, up, down))
            return torch.cat((gate, up)), down

        self.gate_up, self.down = (torch.stack(parts) for parts in zip(*starmap(laid_out, weights), strict=True))
        self._swiglu = kernels.swiglu
        self._ids = torch.arange(len(self.down) + 1, dtype=torch.int32, device=self.down.device)

    @property
    def linears(self) -> list[tuple[Linear, Linear]]:
        pairs = zip(self.gate_up, self.down, strict=True)
        return [(CublasLinear(gate_up, None), CublasLinear(down, None)) for gate_up, down in pairs]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        if not len(x):
            return torch.empty_like(x)
        order = ids.flatten().argsort(stable=True)
        starts = torch.searchsorted(ids.flatten()[order], self._ids, out_int32=True)
        gate_up = grouped_product(x.index_select(0, order // ids.shape[1]), self.gate_up, starts)
        parts = grouped_product(self._swiglu(gate_up), self.down, starts)
        return add_up(parts.index_select(0, order.argsort()).view(*ids.shape, -1), weights, residual)


def grouped_product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Each row of x [rows, width] times its expert's weight, from weight [num_experts, out_features, width].

    Expert i has the rows from ``starts[i]`` to ``starts[i + 1]``, int32 [num_experts + 1].
    """
    (rows, width), (num_experts, out_features, _) = x.shape, weight.shape
    out = x.new_empty(rows, out_features)
    grid = (num_tiles(rows, num_experts, BLOCK_M.value), triton.cdiv(out_features, BLOCK_N.value))
    grouped_matmul[grid](x, weight, starts, out, num_experts, out_features, width, **block_sizes(x))
    return out


@triton.jit
def grouped_matmul(x, weight, starts, out, num_experts, out_features, width, BLOCK_K: tl.constexpr):
    """One program per tile of ``out``, added up in a fixed order as in ``linear.matmul``."""
    expert, first, end = tile_of(tl.program_id(0), starts, num_experts, BLOCK_M, False)
    if first < end:
        m = first + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        of_expert = weight + expert.to(tl.int64) * out_features * width
        total = product(x, of_expert, m, n, end, out_features, width, 0, 1, BLOCK_K)
        row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
        inside = (row < end) & (column < out_features)
        tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)

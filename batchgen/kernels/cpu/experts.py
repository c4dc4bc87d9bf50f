"""Experts on the CPU: one launch multiplies all experts' panels; it reads from memory which rows use which expert.

The rows of an expert are copied next to each other, so that tiles of rows are multiplied by panels as in other linears.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.kernels.cpu import kernel_specs
from batchgen.kernels.cpu.layout import MAX_ROWS, ROWS_PER_ITEM, SEGMENT_WORDS, routing_scratch_floats
from batchgen.kernels.cpu.linear import Experts, PackedGatedLinear, PackedLinear, pack_plain
from batchgen.kernels.cpu.parallel import Kernel, address, empty, scratch
from batchgen.kernels.interface import Linear, Routing

_ROUTE, _SORT, _ADD_UP = Kernel(kernel_specs.ROUTE), Kernel(kernel_specs.SORT), Kernel(kernel_specs.ADD_UP)
_TAKE_ROWS = Kernel(kernel_specs.TAKE_ROWS)


class PackedRouter:
    """``Router`` with a compiled kernel, which multiplies in float32 for x of any type."""

    def __init__(self, routing: Routing) -> None:
        self._packed, self._bias, self._active = pack_plain(routing.weight), routing.bias, routing.num_active
        self._num_experts, self._inputs = routing.weight.shape
        eps, scale = (int(np.float32(value).view(np.int32)) for value in (routing.normalizer_eps, routing.scale))
        self._numbers = int(routing.is_softmax), int(routing.is_normalized), eps, scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        assert width == self._inputs, f"x is {tuple(x.shape)}, the router takes {self._inputs} inputs"
        ids, weights = empty((rows, self._active), torch.int32), empty((rows, self._active), torch.float32)
        bias = 0 if self._bias is None else address(self._bias)
        packed = address(self._packed.strips), self._packed.strip_size
        addresses = (address(x), *packed, bias, ids.data_ptr(), weights.data_ptr())
        sizes = (*scratch(routing_scratch_floats(self._num_experts)), rows, width, self._num_experts, self._active)
        _ROUTE.launch(x.dtype, -(-rows // MAX_ROWS), *addresses, *sizes, *self._numbers)
        return ids, weights


class PackedExperts:
    """``SparseFeedForward`` of experts that are stored in one type. Raises ModelError if their types differ."""

    def __init__(self, experts: list[tuple[PackedGatedLinear, PackedLinear]]) -> None:
        gated, down = [gated for gated, _ in experts], [down for _, down in experts]
        if len({(part.product.packed.kind, last.packed.kind) for part, last in experts}) > 1:
            raise ModelError("experts of one layer are stored in different types; save the model in one of them")
        self._gated, self._down = gated, down
        self._weights = [_joined([part.product for part in gated]), _joined(down)]

    @property
    def linears(self) -> list[tuple[Linear, Linear]]:
        return [(gated.linear, down) for gated, down in zip(self._gated, self._down, strict=True)]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        (rows, width), (_, active), num_experts = x.shape, ids.shape, len(self._down)
        assert residual.shape == x.shape, "a residual has the shape of the result"
        out, pairs = empty(x.shape, x.dtype), rows * active
        if not rows:
            return out
        segments = empty((1 + SEGMENT_WORDS * num_experts,), torch.int64)
        source, place = empty((pairs,), torch.int64), empty((pairs,), torch.int64)
        results = (segments.data_ptr(), source.data_ptr(), place.data_ptr(), scratch(2 * num_experts)[0])
        _SORT.launch("any", 1, address(ids), *results, rows, active, num_experts)
        taken = empty((pairs, width), x.dtype)
        _TAKE_ROWS.launch(x.dtype, pairs, address(x), source.data_ptr(), taken.data_ptr(), width)
        of_gated, of_down = (Experts(num_experts, segments, weights) for weights in self._weights)
        parts = self._down[0].multiply(self._gated[0](taken, of_gated), width, experts=of_down)
        addresses = (address(parts), place.data_ptr(), address(weights), address(residual), out.data_ptr())
        _ADD_UP.launch(x.dtype, -(-rows // ROWS_PER_ITEM), *addresses, rows, width, active)
        return out


def _joined(parts: list[PackedLinear]) -> Tensor:
    """Move panels into one tensor, as freed ones would leave holes in memory; returns their addresses [num_experts]."""
    for part, strips in zip(parts, torch.stack([part.packed.strips for part in parts]), strict=True):
        part.move_to(strips)
    return torch.tensor([part.weight_at for part in parts])

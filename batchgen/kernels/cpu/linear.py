"""Linears through oneDNN with the weight laid out once in the order its kernels read it.

The same pair of torch operators that ``torch.compile``'s freezing emits. A row's result must not depend on how
many rows share the product: oneDNN's blocked kernels gave bit-equal rows for every count from 2 up, while a
single row takes another path. So no fewer than ``MIN_PACKED_ROWS`` are computed: four take no longer than two,
the time goes into reading the weights. Where the operators are missing, a plain linear over at least
``MIN_PLAIN_ROWS`` rows stands in: smaller products take other code paths in the usual BLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_PACKED_ROWS = 4
MIN_PLAIN_ROWS = 16


def _at_least(x: Tensor, rows: int) -> Tensor:
    """X with rows of zeros added where it has fewer than ``rows``."""
    return x if len(x) >= rows else functional.pad(x, (0, 0, 0, rows - len(x)))


class PackedLinear:
    """See ``Linear``; ``packed`` is opaque to all but oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See ``Linear``."""
        rows = len(x)
        x = _at_least(x, MIN_PACKED_ROWS)
        y: Tensor
        if residual is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        else:
            residual = _at_least(residual.contiguous(), MIN_PACKED_ROWS)
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
        return y[:rows]


class PlainLinear:
    """See ``Linear``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.clone()  # the original may be a view of a mapped file, and would hold on to all of it
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See ``Linear``."""
        rows = len(x)
        y = functional.linear(_at_least(x, MIN_PLAIN_ROWS), self.weight, self.bias)[:rows]
        return y if residual is None else y + residual


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's prepacked linear for ``dtype`` on this machine."""
    try:
        probe = PackedLinear(torch.zeros(16, 16, dtype=dtype), None)
        probe(torch.zeros(2, 16, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True

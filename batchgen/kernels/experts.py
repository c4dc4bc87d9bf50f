"""Experts in plain torch: the choice among them, and a feed-forward of one expert after the other.

What the back ends' own kernels are tested against, and what runs where they have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.interface import GatedLinear, Linear, Routing


class TorchRouter:
    """``Router`` by torch; ``linear`` is the product with the router's weight, in float32."""

    def __init__(self, routing: Routing, linear: Linear) -> None:
        self.routing = routing
        self.linear = linear

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.linear(x.float()), self.routing)


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``Router`` for float32 logits [rows, num_experts]."""
    scores = logits.softmax(-1) if routing.is_softmax else logits.sigmoid()
    ranks = scores if routing.bias is None else scores + routing.bias
    # Sorted, not by ``topk``, which leaves the order of equals open.
    ranks = ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ranked = ranks.sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : routing.num_active].sort(-1).values
    weights = scores.gather(-1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.normalizer_eps)
    return ids.int(), weights * routing.scale


class ExpertLoop:
    """``SparseFeedForward`` by the linears of one expert after the other; the host looks up whose rows are whose."""

    def __init__(self, experts: list[tuple[GatedLinear, Linear]]) -> None:
        self._experts = experts

    @property
    def linears(self) -> list[tuple[Linear, Linear]]:
        return [(gated.linear, down) for gated, down in self._experts]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        parts = x.new_empty(*ids.shape, x.shape[1])
        for expert, (gated, down) in enumerate(self._experts):
            row, place = (ids == expert).nonzero(as_tuple=True)
            if len(row):
                parts[row, place] = down(gated(x[row]))
        return add_up(parts, weights, residual)


def add_up(parts: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    """``residual`` and the weighted parts [rows, num_active, width], added one after the other in float32."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for place in range(parts.shape[1]):
        total = total + weights[:, place, None] * parts[:, place].float()
    return (total + residual.float()).to(residual.dtype)

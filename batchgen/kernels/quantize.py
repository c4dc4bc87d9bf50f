"""Weights as 8-bit integers: one scale for each output and group of neighbouring inputs.

A back end may keep the integers, or the numbers that they stand for: a product with either has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32  # inputs that share a scale where activations are floating-point numbers
ACTIVATION_GROUP = (
    128  # where they are integers too: products within a group add up exactly, without scales between them
)
MOST = 127  # the largest integer; -128 is not used, so that a weight and its negative are treated alike


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features] of which each value is an integer times the scale of its group.

    Attributes:
        values: int8 [out_features, in_features], from -127 to 127.
        scales: bfloat16 [out_features, groups]; not finite where the group of the original was not.
        group: inputs that share a scale, ``in_features = groups * group`` but for the last group, which may be shorter.
    """

    values: Tensor
    scales: Tensor
    group: int

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight's numbers: integer times scale, rounded once to ``dtype``."""
        scales = self.scales.float().repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return (self.values * scales).to(dtype)


def quantize(weight: Tensor, group: int = GROUP, most: int = MOST) -> Int8Weight:
    """The nearest integers up to ``most`` to a weight over its scales, which are as small as bfloat16 allows.

    With them a value is off by at most half a scale: 0.4 % of the largest of its group.
    """
    out_features, in_features = weight.shape
    groups = functional.pad(weight.float(), (0, -in_features % group)).view(out_features, -1, group)
    scales = _round_up(groups.abs().amax(2) / most)
    values = (groups / scales.float()[:, :, None]).round().clamp(-most, most)
    integers = values.nan_to_num(1.0).to(torch.int8).flatten(1)[:, :in_features]  # zero or NaN, as the scale is
    return Int8Weight(integers.contiguous(), scales, group)


def _round_up(x: Tensor) -> Tensor:
    """The least bfloat16 that is no smaller than x, of non-negative numbers."""
    bits = x.contiguous().view(torch.int32)
    up = torch.where(x.isfinite(), (bits + 0xFFFF) & ~0xFFFF, bits)
    return up.view(torch.float32).to(torch.bfloat16)

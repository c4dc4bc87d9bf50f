"""Weights as 8-bit integers: one scale for each output and group of neighbouring inputs.

A back end may keep the integers, or the numbers that they stand for: a product with either has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cpu.layout import DOT_GROUP, GROUP, LEAST_QUANTIZED

MOST = 127  # the largest integer; -128 is not used, so that a weight and its negative are treated alike


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features] of which each value is an integer times the scale of its group.

    Attributes:
        values: int8 [out_features, in_features], from -most to most.
        scales: float16 [out_features, groups]; not finite where the group of the original was not.
        group: inputs that share a scale, ``in_features = groups * group`` but for the last group, which may be shorter.
    """

    values: Tensor
    scales: Tensor
    group: int
    most: int = MOST

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight's numbers: integer times scale, rounded once to ``dtype``."""
        scales = self.scales.float().repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return (self.values * scales).to(dtype)


def quantize_weight(weight: Tensor, group: int = GROUP, most: int = MOST) -> Int8Weight:
    """The nearest integers up to ``most`` to a weight over its scales, which are as small as float16 allows.

    With them a value is off by at most half a scale: 0.4 % of the largest of its group. Blocks of GGUF's Q8_0, whose
    scales are of float16 too, give their own integers and scales.
    """
    out_features, in_features = weight.shape
    groups = functional.pad(weight.float(), (0, -in_features % group)).view(out_features, -1, group)
    scales = _round_up(groups.abs().amax(2) / most)
    values = (groups / scales.float()[:, :, None]).round().clamp(-most, most)
    integers = values.nan_to_num(1.0).to(torch.int8).flatten(1)[:, :in_features]  # zero or NaN, as the scale is
    return Int8Weight(integers.contiguous(), scales, group, most)


def stored(weight: Tensor, weights: str, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``, for a back end that keeps no integers; ``weights`` is "auto" or "int8"."""
    return quantize_weight(weight).dequantize(dtype) if weights == "int8" else weight.to(dtype)


def quantize_rows(x: Tensor, group: int = DOT_GROUP, most: int = MOST) -> tuple[Tensor, Tensor]:
    """Integers as float32 [rows, groups, group], zeros at the end, and their float32 scales [rows, groups].

    The largest of a group becomes ``most``. Of a group with an input that is not finite, neither is the scale.
    """
    groups = functional.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -(-x.shape[1] // group), group)
    largest = groups.abs().amax(2)
    reciprocals = torch.full_like(largest, most) / largest  # rounded once, which torch's ``most / x`` is not
    reciprocals = torch.where(largest < LEAST_QUANTIZED, 0.0, reciprocals)
    return (groups * reciprocals[:, :, None]).round().clamp(-most, most), largest / most


def _round_up(x: Tensor) -> Tensor:
    """The least float16 that is no smaller than x, of non-negative numbers; beyond the largest, infinity."""
    nearest = x.half()
    return (nearest.view(torch.int16) + (nearest < x)).view(torch.float16)

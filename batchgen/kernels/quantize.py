"""Numbers as 8-bit integers: one scale for each row and group of neighbours, of weights alone or of inputs too.

Both may be rotated first by a Hadamard matrix, whose rows are orthogonal: it spreads a channel that outgrows its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cpu.layout import DOT_GROUP, GROUP, MIN_QUANTIZED, WEIGHT_DIVISOR, rotated_length

_ROWS_AT_ONCE = 1024  # few enough for float32 copies in reused memory instead of new pages
MAX = 127  # the largest integer; -128 is not used, so that a weight and its negative are treated alike


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features]; each value is an integer times the scale of its group.

    Attributes:
        values: int8 [out_features, in_features], from -127 to 127.
        scales: float16 [out_features, groups]; not finite if the original group was not.
        group: inputs that share a scale; the last group may be shorter.
    """

    values: Tensor
    scales: Tensor
    group: int

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight's numbers: integer times scale, rounded once to ``dtype``."""
        scales = self.scales.float().repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return (self.values * scales).to(dtype)


def quantize_weight(weight: Tensor, group: int = GROUP) -> Int8Weight:
    """The nearest integers to a weight divided by its scales, which are as small as float16 allows.

    The error of a value is at most half a scale: 0.4 % of the largest value of its group. Blocks of GGUF's Q8_0, which
    also have float16 scales, keep their integers and scales.
    """
    return _joined([_quantized(rows, group) for rows in torch.split(weight, _ROWS_AT_ONCE)])


def stored(weight: Tensor, weights: str, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``, for a back end that does not keep integers; ``weights`` is "auto" or "int8"."""
    return quantize_weight(weight).dequantize(dtype) if weights == "int8" else weight.to(dtype)


def hadamard(x: Tensor) -> Tensor:
    """The product of the last axis of x, float32, with a matrix of ones and minus ones, in a fixed order of additions.

    The matrix is Sylvester's: H(2n) = [[H(n), H(n)], [H(n), -H(n)]]. Its product with itself is 2n times the identity.
    """
    length = x.shape[-1]
    terms = x.reshape(-1, length).t().clone(memory_format=torch.contiguous_format)  # numbers to be added are adjacent
    sums, half = torch.empty_like(terms), length // 2
    while half:
        pairs, results = (numbers.view(length // (2 * half), 2, half, -1) for numbers in (terms, sums))
        torch.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=results[:, 1])
        terms, sums, half = sums, terms, half // 2
    return terms.t().reshape(x.shape)


def rotate(x: Tensor) -> Tensor:
    """``hadamard`` of each group of the inputs of x [rows, inputs]: float32 [rows, groups, DOT_GROUP].

    A last group of fewer inputs is filled with zeros to ``rotated_length`` and rotated; the rest of it stays zero.
    """
    rows, inputs = x.shape
    whole = inputs // DOT_GROUP * DOT_GROUP
    groups = hadamard(x[:, :whole].float().reshape(rows, whole // DOT_GROUP, DOT_GROUP))
    if whole == inputs:
        return groups
    length = rotated_length(inputs - whole)
    last = hadamard(functional.pad(x[:, whole:].float(), (0, length - (inputs - whole))))
    return torch.cat((groups, functional.pad(last, (0, DOT_GROUP - length))[:, None]), 1)


def quantize_rotated(weight: Tensor) -> Int8Weight:
    """``quantize_weight`` of a rotated weight divided by ``WEIGHT_DIVISOR``, [out_features, groups * DOT_GROUP]."""
    parts = torch.split(weight, _ROWS_AT_ONCE)
    return _joined([_quantized(rotate(rows).flatten(1) / WEIGHT_DIVISOR, DOT_GROUP) for rows in parts])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of rotated inputs as float32 [rows, groups, DOT_GROUP], and their float32 scales [rows, groups].

    The largest of a group becomes 127. With its scales, a row's product with ``quantize_rotated`` approximates the
    product of inputs and weight. If an input is not finite, the scale of its group is not finite either.
    """
    groups = rotate(x)
    largest = groups.abs().amax(2)
    reciprocals = torch.full_like(largest, MAX) / largest  # rounded once; torch rounds ``MAX / x`` twice
    reciprocals = torch.where(largest < MIN_QUANTIZED, 0.0, reciprocals)
    divisors = torch.full((groups.shape[1],), MAX * DOT_GROUP / WEIGHT_DIVISOR, device=x.device)
    if last := x.shape[1] % DOT_GROUP:
        divisors[-1] = MAX * rotated_length(last) / WEIGHT_DIVISOR
    return (groups * reciprocals[:, :, None]).round().clamp(-MAX, MAX), largest / divisors


def _quantized(rows: Tensor, group: int) -> Int8Weight:
    num_rows, inputs = rows.shape
    groups = functional.pad(rows.float(), (0, -inputs % group)).view(num_rows, -1, group)
    scales = _round_up(groups.abs().amax(2) / MAX)
    values = (groups / scales.float()[:, :, None]).round_().clamp_(-MAX, MAX).nan_to_num_(1.0)  # scale not finite
    return Int8Weight(values.to(torch.int8).flatten(1)[:, :inputs].contiguous(), scales, group)


def _joined(parts: list[Int8Weight]) -> Int8Weight:
    if len(parts) == 1:
        return parts[0]
    return Int8Weight(
        torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]), parts[0].group
    )


def _round_up(x: Tensor) -> Tensor:
    """The smallest float16 >= x, for non-negative x; infinity beyond the largest float16."""
    nearest = x.half()
    return (nearest.view(torch.int16) + (nearest < x)).view(torch.float16)

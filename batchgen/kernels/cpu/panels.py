"""Weights as the CPU's own linears read them: panels of 64 outputs, each of four strips of 16.

Within a strip, what a vector holds lies side by side and the inputs follow each other: [pairs, 16, 2] of bfloat16,
[inputs, 16] of float32, or groups of bytes as in ``compiled.int8``. Rows of zeros fill the last panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cpu.layout import DOT_GROUP, GROUP, LANES, STRIPS, TILE_COLUMNS
from batchgen.kernels.quantize import quantize

_ROWS_AT_ONCE = 32 * TILE_COLUMNS  # that are laid out, so that no second copy of a large weight is held


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight in panels: strips [strips, ...], contiguous.

    ``kind`` is "bf16", "f32", "int8" (bytes that are read as numbers) or "integers" (that are multiplied as such).
    """

    strips: Tensor
    kind: str

    @property
    def num_panels(self) -> int:
        return len(self.strips) // STRIPS

    @property
    def strip_size(self) -> int:
        """Elements of a strip."""
        return self.strips[0].numel()

    @property
    def panel_bytes(self) -> int:
        return self.strips[0].nbytes * STRIPS


def plain_panels(weight: Tensor) -> Panels:
    """A weight [outputs, inputs] of bfloat16 or float32."""

    def laid_out(rows: Tensor) -> Tensor:
        wide = rows.view(torch.int32)  # of bfloat16, two neighbouring inputs stay together
        strips = wide.view(-1, LANES, wide.shape[1]).transpose(1, 2).contiguous()
        return strips.view(rows.dtype)

    return Panels(_in_slices(weight, laid_out), "bf16" if weight.dtype == torch.bfloat16 else "f32")


def int8_panels(weight: Tensor) -> Panels:
    """A weight of a multiple of ``GROUP`` inputs, in 8 bits to be read as numbers."""

    def laid_out(rows: Tensor) -> Tensor:
        packed = quantize(rows, GROUP)
        pairs = packed.values.view(-1, LANES, rows.shape[1] // GROUP, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
        return _with_scales(packed.scales, pairs)

    return Panels(_in_slices(weight, laid_out), "int8")


def integer_panels(weight: Tensor, most: int, shift: int) -> Panels:
    """A weight in integers up to ``most``, to be multiplied as such once ``shift`` is added."""

    def laid_out(rows: Tensor) -> Tensor:
        packed = quantize(rows, DOT_GROUP, most)
        values = functional.pad(packed.values, (0, -rows.shape[1] % DOT_GROUP)) + shift  # wraps around as bytes do
        quads = values.view(-1, LANES, packed.scales.shape[1], DOT_GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        return _with_scales(packed.scales.float(), quads)

    return Panels(_in_slices(weight, laid_out), "integers")


def _with_scales(scales: Tensor, integers: Tensor) -> Tensor:
    """Bytes [strips, groups, those of a group] of scales [outputs, groups] and integers [strips, groups, ...]."""
    of_strip = scales.view(-1, LANES, scales.shape[1]).transpose(1, 2).contiguous()
    return torch.cat((of_strip.view(torch.uint8), integers.flatten(2).view(torch.uint8)), 2)


def _in_slices(weight: Tensor, laid_out: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``laid_out`` makes of all rows, in strips."""
    num_rows = -(-len(weight) // TILE_COLUMNS) * TILE_COLUMNS
    strips: Tensor | None = None
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE].detach()
        missing = min(num_rows - start, _ROWS_AT_ONCE) - len(rows)
        part = laid_out(functional.pad(rows, (0, 0, 0, missing)).contiguous())
        if strips is None:
            strips = torch.empty(num_rows // LANES, *part.shape[1:], dtype=part.dtype)
        strips[start // LANES :][: len(part)] = part
    assert strips is not None, "a weight has rows"
    return strips

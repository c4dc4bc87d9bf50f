"""Linears on the CPU: weights in their stored type, arranged in panels in the order in which kernels read them.

Kernels read four places at once: a single core needs this to use its share of the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cpu import kernel_specs
from batchgen.kernels.cpu.layout import (
    DOT_GROUP,
    GATED_BY_GELU,
    GATED_BY_SILU,
    GROUP,
    LANES,
    MAX_ROWS,
    ROWS_PER_ITEM,
    STEP_INPUTS,
    STRIPS,
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_SCRATCH,
    UNPACKED_BYTES,
    UNPACKED_TILE_FLOATS,
    UNPACKED_TILES,
    num_multiplied,
)
from batchgen.kernels.cpu.parallel import Kernel, Kind, address, empty, scratch
from batchgen.kernels.interface import Linear
from batchgen.kernels.processor import has_bfloat16_pairs, has_matrix_unit, integer_products
from batchgen.kernels.quantize import quantize_rotated, quantize_weight

_SUMS = MAX_ROWS * TILE_COLUMNS  # float32 words of scratch a worker needs
_HALF = TILE_COLUMNS // 2
_FEWEST_TILES = 8  # least tiles in each share of the rows, since every share reads all panels again
_MAX_SHARED_BYTES = 256 << 10  # of a panel that every share reads: two panels should fit the second-level cache
_TYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_KINDS: dict[tuple[str, str], Kind] = {  # by the types of inputs and of stored weights
    ("bf16", "bf16"): torch.bfloat16,
    ("f32", "f32"): torch.float32,
    ("f32", "bf16"): "f32_of_bf16",
    ("bf16", "int8"): "bf16_of_int8",
    ("f32", "int8"): "f32_of_int8",
}
_MATMUL, _UNPACKED = Kernel(kernel_specs.MATMUL), Kernel(kernel_specs.MATMUL_UNPACKED)
_INTEGERS, _QUANTIZE = Kernel(kernel_specs.MATMUL_INTEGERS), Kernel(kernel_specs.QUANTIZE)
_TILED = {  # by the kind of the stored weights
    "bf16": Kernel(kernel_specs.MATMUL_BF16),
    "int8": Kernel(kernel_specs.MATMUL_BF16_UNPACKED),
    "integers": Kernel(kernel_specs.MATMUL_INT8),
}
_UNPACKED_KINDS = {torch.bfloat16: kernel_specs.paired_kind("bfloat16"), torch.float32: "float32"}
_NUMBER_BYTES = {torch.bfloat16: 2 if has_bfloat16_pairs() else 4, torch.float32: 4}  # of unpacked numbers
_INTEGER_PRODUCTS = integer_products()
_ROWS_AT_ONCE = 32 * TILE_COLUMNS  # rows laid out at once, so that a large weight is never in memory twice


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels of 64 outputs, each of four strips of 16: strips [strips, ...], contiguous.

    A strip has one vector per input or pair of inputs: [pairs, 16, 2] of bfloat16, [inputs, 16] of float32, or bytes as
    in ``compiled.int8``. Rows of zeros fill the last panel. ``kind``: "bf16", "f32", "int8" (read as numbers) or
    "integers" (multiplied as integers).
    """

    strips: Tensor
    kind: str

    @property
    def num_panels(self) -> int:
        return len(self.strips) // STRIPS

    @property
    def strip_size(self) -> int:
        return self.strips[0].numel()

    @property
    def panel_bytes(self) -> int:
        return self.strips[0].nbytes * STRIPS


def pack_plain(weight: Tensor) -> PackedWeight:
    """A weight [outputs, inputs] of bfloat16 or float32; the number of inputs is even, which configs ensure."""
    assert weight.shape[1] % 2 == 0

    def laid_out(rows: Tensor) -> Tensor:
        wide = rows.view(torch.int32)  # of bfloat16, two neighbouring inputs stay together
        strips = wide.view(-1, LANES, wide.shape[1]).transpose(1, 2).contiguous()
        return strips.view(rows.dtype)

    return PackedWeight(_in_slices(weight, laid_out), "bf16" if weight.dtype == torch.bfloat16 else "f32")


def pack_int8(weight: Tensor) -> PackedWeight:
    """A weight in 8 bits with scales, to be read as numbers; its inputs are a multiple of ``GROUP``."""

    def laid_out(rows: Tensor) -> Tensor:
        packed = quantize_weight(rows, GROUP)
        pairs = packed.values.view(-1, LANES, rows.shape[1] // GROUP, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
        return _with_scales(packed.scales, pairs)

    return PackedWeight(_in_slices(weight, laid_out), "int8")


def pack_integers(weight: Tensor, together: int, shift: int) -> PackedWeight:
    """A weight to be multiplied as integers: ``shift`` is added to each, and a lane has ``together`` inputs."""

    def laid_out(rows: Tensor) -> Tensor:
        packed = quantize_rotated(rows)
        values = packed.values + shift  # wraps around as bytes do
        lanes = values.view(-1, LANES, packed.scales.shape[1], DOT_GROUP // together, together).permute(0, 2, 3, 1, 4)
        return _with_scales(packed.scales.float(), lanes)

    return PackedWeight(_in_slices(weight, laid_out), "integers")


def _with_scales(scales: Tensor, integers: Tensor) -> Tensor:
    """Bytes [strips, groups, bytes of a group] of scales [outputs, groups] and integers [strips, groups, ...]."""
    of_strip = scales.view(-1, LANES, scales.shape[1]).transpose(1, 2).contiguous()
    return torch.cat((of_strip.view(torch.uint8), integers.flatten(2).view(torch.uint8)), 2)


def _in_slices(weight: Tensor, laid_out: Callable[[Tensor], Tensor]) -> Tensor:
    """All rows of a weight in strips; ``laid_out`` is called for ``_ROWS_AT_ONCE`` rows at a time."""
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


def pack(weight: Tensor, weights: str, activations: str, dtype: torch.dtype) -> PackedWeight:
    """A weight in panels for products in ``dtype``, in 8 bits if ``weights`` or ``activations`` are "int8".

    If ``weights`` are "int8" and the last group of inputs is not complete, panels hold the dequantized numbers.
    """
    if activations == "int8":
        assert _INTEGER_PRODUCTS is not None, "``processor.cpu_obstacle`` names it"
        return pack_integers(weight, *_INTEGER_PRODUCTS)
    if weights == "int8" and weight.shape[1] % GROUP == 0:
        return pack_int8(weight)
    return pack_plain(quantize_weight(weight).dequantize(dtype) if weights == "int8" else weight)


class Experts(NamedTuple):
    """Assignment of a product's rows to several weights of one shape and kind.

    ``weights`` int64 [num_experts] are the addresses of the weights' strips. ``segments`` int64 has the number of
    experts that rows use, then for each its id, its first row and the end of its rows.
    """

    num_experts: int
    segments: Tensor
    weights: Tensor


class PackedLinear:
    """``Linear`` with its weight in panels; the number of inputs is even, their dtype ``dtype`` or the weight's."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weights: str = "auto",
        activations: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.inputs = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        dtype = dtype or weight.dtype
        self.packed = pack(weight, weights, activations, dtype)
        is_integer = self.packed.kind == "integers"
        unit = "int8" if is_integer else "bf16"
        self.by_tiles = (is_integer or dtype is torch.bfloat16) and has_matrix_unit(unit)
        # Kept here, since reading them from a tensor costs microseconds per launch.
        self._num_panels, self.weight_at = self.packed.num_panels, self.packed.strips.data_ptr()
        self._sizes = self.packed.strip_size, self.packed.panel_bytes
        self._max_shares = self._num_panels if self.packed.panel_bytes <= _MAX_SHARED_BYTES else 1

    def move_to(self, strips: Tensor) -> None:
        """Read the panels from ``strips``, to which they have been copied."""
        self.packed, self.weight_at = replace(self.packed, strips=strips), strips.data_ptr()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.multiply(x, self.out_features, residual)

    def multiply(
        self,
        x: Tensor,
        width: int,
        residual: Tensor | None = None,
        *,
        gated: int = 0,
        experts: Experts | None = None,
    ) -> Tensor:
        """The product [rows, width] of x [rows, inputs] with this weight or ``experts``; ``gated`` as in ``layout``."""
        assert x.shape[1:] == (self.inputs,), f"x is {tuple(x.shape)}, the weight takes {self.inputs} inputs"
        assert x.dtype in _TYPES, "kernels read bits"
        out, residual_at, bias_at = empty((len(x), width), x.dtype), 0, 0
        if residual is not None:
            assert residual.shape == out.shape, "a residual has the shape of the result"
            assert residual.dtype is x.dtype, "kernels read bits"
            residual_at = address(residual)
        if self.bias is not None:
            if self.bias.dtype is not x.dtype:
                self.bias = self.bias.to(x.dtype)
            bias_at = address(self.bias)
        self._launch(x, (bias_at, residual_at, out.data_ptr()), width, gated, experts)
        return out

    def _launch(
        self, x: Tensor, addresses: tuple[int, int, int], width: int, gated: int, experts: Experts | None
    ) -> None:
        rows, inputs, kind, x_type = len(x), self.inputs, self.packed.kind, x.dtype
        threads = torch.get_num_threads()
        tile_rows = TILE_ROWS if self.by_tiles else MAX_ROWS
        shares = max(1, min(-(-rows // tile_rows) // _FEWEST_TILES, threads, self._max_shares))
        unpacks = kind == "int8" and (self.by_tiles or rows > 2 or experts is not None)
        if unpacks or experts is not None:
            shares = 1
        groups, weights_at, segments_at = shares, self.weight_at, 0
        if experts is not None:
            groups, weights_at, segments_at = experts.num_experts, address(experts.weights), address(experts.segments)
        kernel, key, floats = _MATMUL, _KINDS.get((_TYPES[x.dtype], kind)), _SUMS
        steps, scales_at, shifts_at, number_bytes = inputs // 2, 0, 0, 0
        if kind == "integers":
            kernel, key, (x, scales, shifts) = _INTEGERS, x_type, quantize_inputs(x)
            steps, inputs = num_multiplied(inputs) // STEP_INPUTS, x.shape[1]
            scales_at, shifts_at = address(scales), address(shifts)
        elif unpacks:
            kernel, key, number_bytes = _UNPACKED, _UNPACKED_KINDS[x_type], _NUMBER_BYTES[x_type]
            floats = _SUMS * UNPACKED_TILES + UNPACKED_BYTES // 4
        if self.by_tiles:
            kernel, key, floats = _TILED[kind], x_type, TILE_SCRATCH + UNPACKED_TILE_FLOATS * unpacks
        assert key is not None, f"no kernel multiplies {x.dtype} by {kind}"
        sizes = (rows, inputs, width, gated, groups, self._num_panels, -(-threads // shares), *self._sizes)
        kernel.launch(
            key,
            self._num_panels * groups,
            *(address(x), *addresses, weights_at, *scratch(floats)),
            *(*sizes, steps, number_bytes, scales_at, shifts_at, segments_at),
            num_ranges=shares,
        )


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as integers [rows, groups * 128], with scales and corrections for the weights' shift [rows, groups].

    The integers are as from ``quantize.quantize_rows``, in the type that this machine multiplies.
    """
    rows, width = x.shape
    groups = -(-width // DOT_GROUP)
    assert _INTEGER_PRODUCTS is not None, "panels of integers are made where they can be multiplied"
    together, shift = _INTEGER_PRODUCTS
    values = empty((rows, groups * DOT_GROUP), torch.int8 if together == 4 else torch.int16)
    scales, shifts = empty((rows, groups), torch.float32), empty((rows, groups), torch.int32)
    results = (values.data_ptr(), scales.data_ptr(), shifts.data_ptr())
    items = -(-rows // ROWS_PER_ITEM)
    _QUANTIZE.launch(x.dtype, items, address(x), *results, rows, width, groups, shift)
    return values, scales, shifts


class PackedGatedLinear:
    """``GatedLinear`` in panels; each panel holds 32 gates and their 32 ups."""

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        weights: str = "auto",
        activations: str = "auto",
        dtype: torch.dtype | None = None,
        *,
        is_gelu: bool = False,
    ) -> None:
        self.out_features = len(gate)
        self._gated = GATED_BY_GELU if is_gelu else GATED_BY_SILU
        rows = (0, 0, 0, -len(gate) % _HALF)
        halves = [functional.pad(part.detach(), rows).view(-1, _HALF, part.shape[1]) for part in (gate, up)]
        self.product = PackedLinear(torch.cat(halves, 1).flatten(0, 1), None, weights, activations, dtype)
        self.linear: Linear = self.product

    def __call__(self, x: Tensor, experts: Experts | None = None) -> Tensor:
        return self.product.multiply(x, self.out_features, gated=self._gated, experts=experts)

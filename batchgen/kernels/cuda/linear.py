"""Matrix products with a fixed weight: kernels that sum in one order whatever the number of rows, or cuBLAS.

cuBLAS picks its kernel by shape and may split the inner dimension when rows are few, so a row's last bits can
differ with how many rows share the product. ``FixedOrderLinear`` adds along the inner dimension in steps and parts
that the weight alone fixes; only the height and width of tiles follow the number of rows, so a row's bits are its own.
That holds as long as a GPU's matrix instructions of one family round alike at every width.

The few rows of a decode step have products that also compute what stands beside them, each kernel less being
microseconds saved: the last product of half a layer adds the residual and leaves sums of squares, from which the next
one norms its rows on the way. They round wherever the steps that they join do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from batchgen.kernels.cuda import tuning
from batchgen.kernels.cuda.rows import WRITTEN_OUT, folded, gated, rms_norm, scaled, sums_of_squares
from batchgen.kernels.cuda.tiles import Arrivals, power_of_two
from batchgen.kernels.cuda.tuning import BLOCK_M, BLOCK_N, GATED_N, GROUP_M, PIECE
from batchgen.kernels.interface import Linear


class PendingNorm:
    """RMS norm of ``rows`` [rows, width] by ``weight``, which the kernel that multiplies them computes on the way.

    ``squares`` [rows, pieces], float32, add up to each row's sum of squares.
    """

    def __init__(self, rows: Tensor, squares: Tensor, weight: Tensor, eps: float) -> None:
        self.rows, self.squares, self.weight, self.eps = rows, squares, weight, eps

    @cached_property
    def computed(self) -> Tensor:
        """The norm for whatever does not compute it."""
        return norm_rows(self.rows, self.weight, self.eps)


def computed(x: Tensor | PendingNorm) -> Tensor:
    """X as a tensor."""
    return x.computed if isinstance(x, PendingNorm) else x


def operand(x: Tensor | PendingNorm) -> tuple[Tensor, dict[str, Any]]:
    """The rows of x, and how a kernel for few of them that norms them on the way is launched."""
    if not isinstance(x, PendingNorm):
        return x, {"norm": (None, None, 0.0), "PIECES": 1, **block_sizes(x)}
    norm, pieces = (x.weight, x.squares, x.eps), power_of_two(x.squares.shape[1])
    return x.rows, {"norm": norm, "PIECES": pieces, **block_sizes(x.rows)}


def norm_rows(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """``Kernels.rms_norm``."""
    out = torch.empty_like(x)
    num_rows, width = x.shape
    block = max(power_of_two(width), PIECE.value)
    rms_norm[(num_rows,)](x, weight, residual, out, width, eps, BLOCK=block, **WRITTEN_OUT)
    return out


class FixedOrderLinear:
    """``Linear`` that adds every product in the order that its weight fixes, and the bias before it rounds."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_parts: int | None = None) -> None:
        """``num_parts`` of the sum are added up by themselves; ``parts_of`` the weight's shape, if it is not given."""
        self.weight = weight.contiguous()
        self.bias = bias
        self.num_parts = num_parts or parts_of(*weight.shape)

    def __call__(self, x: Tensor | PendingNorm, residual: Tensor | None = None) -> Tensor:
        x = computed(x)
        rows, width = x.shape
        out_features = len(self.weight)
        out = x.new_empty(rows, out_features)
        options = tiles_of(x)
        tile_m, tile_n = options["TILE"]
        grid = (triton.cdiv(rows, tile_m) * triton.cdiv(out_features, tile_n),)
        sizes = (rows, out_features, width)
        matmul[grid](x, self.weight, self.bias, out, *sizes, NUM_PARTS=self.num_parts, **options)
        return out if residual is None else out + residual

    def few_rows(self, x: Tensor, residual: Tensor | None, arrivals: Arrivals) -> tuple[Tensor, Tensor]:
        """``linear(x) (+ residual)``, each rounded, and sums of its squares as ``PendingNorm`` has them.

        The parts of a sum have programs of their own.
        """
        (rows, width), out_features = x.shape, len(self.weight)
        grid = (triton.cdiv(out_features, PIECE.value), self.num_parts, triton.cdiv(rows, BLOCK_M.value))
        out, squares, parts = (
            torch.empty(shape, dtype=dtype, device=x.device)
            for *shape, dtype in (
                (rows, out_features, x.dtype),
                (rows, grid[0], torch.float32),
                (self.num_parts, rows, out_features, torch.float32),
            )
        )
        arrived = arrivals.at_least(grid[0] * grid[2], x.device)
        tensors = (x, self.weight, self.bias, residual, parts, arrived, out, squares)
        add_product[grid](tensors, rows, out_features, width, NUM_PARTS=self.num_parts, **block_sizes(x))
        return out, squares


class CublasLinear(FixedOrderLinear):
    """``Linear`` by cuBLAS, in float32 as exact as torch's setting says; its default allows no TF32."""

    def __call__(self, x: Tensor | PendingNorm, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(computed(x), self.weight, self.bias)
        return y if residual is None else y + residual


class FusedGatedLinear:
    """``GatedLinear`` that is one kernel for few rows, and for many a product and SwiGLU.

    ``linear`` has gates before ups, and adds up in one part, as the kernel does.
    """

    def __init__(self, linear: FixedOrderLinear, swiglu: Callable[[Tensor], Tensor]) -> None:
        self.linear: Linear = linear
        self._weight, self._swiglu = linear.weight, swiglu

    def __call__(self, x: Tensor | PendingNorm) -> Tensor:
        taken, options = operand(x)
        rows, width = taken.shape
        if rows > tuning.FEW_ROWS:
            return self._swiglu(self.linear(computed(x)))
        inner = len(self._weight) // 2
        out = taken.new_empty(rows, inner)
        grid = (triton.cdiv(inner, GATED_N.value), triton.cdiv(rows, BLOCK_M.value))
        gated_matmul[grid](taken, self._weight, out, rows, inner, width, **options)
        return out


def parts_of(out_features: int, width: int) -> int:
    """Into how many parts the sums of a product fall, each added up by itself and then to those before it.

    Several for a weight with few rows, such as those that end half a layer: one program per tile would leave most of a
    GPU idle. Where parts begin is up to width and dtype alone, so that kernels for few rows and for many give the same
    bits.
    """
    return tuning.NUM_PARTS if out_features <= width else 1


def tiles_of(x: Tensor) -> dict[str, Any]:
    """How a product of x is launched: many rows have tiles that read less, along the same steps of K."""
    if len(x) <= tuning.FEW_ROWS or x.element_size() == 4:  # no matrix instruction to feed: tall tiles spill registers
        return {"TILE": (BLOCK_M.value, BLOCK_N.value), **block_sizes(x)}
    return {"TILE": tuning.TALL_TILE, **block_sizes(x), **tuning.TALL_OPTIONS}


def block_sizes(x: Tensor) -> dict[str, Any]:
    """How a product of x in tiles of ``BLOCK_M`` by ``BLOCK_N`` is launched."""
    if x.element_size() == 4:
        return {"BLOCK_K": tuning.BLOCK_K_FLOAT32, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS_FLOAT32}
    return {"BLOCK_K": tuning.BLOCK_K, "enable_fp_fusion": True, **tuning.PRODUCT_OPTIONS}


@triton.jit
def product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of rows m of x with rows n of ``weight``, added up over one part of ``width``, in steps of ``BLOCK_K``.

    Float32 [len(m), len(n)]. The sum of all parts, in order, is the product: the bits of each element are up to
    ``NUM_PARTS`` and ``BLOCK_K`` alone.
    """
    extent = tl.cdiv(width, NUM_PARTS * BLOCK_K) * BLOCK_K
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    total = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    for start in range(part * extent, tl.minimum((part + 1) * extent, width), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row * width + k[None, :], mask=(row < rows) & (k < width)[None, :], other=0.0)
        at = weight + column * width + k[:, None]
        b = tl.load(at, mask=(column < out_features) & (k < width)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def matmul(
    x,
    weight,
    bias,
    out,
    rows,
    out_features,
    width,
    TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out = x @ weight.T (+ bias)``: one program per tile of ``out``, which adds up the parts of a sum in order."""
    tiles_n = tl.cdiv(out_features, TILE[1])
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    tiles_m = tl.minimum(tl.cdiv(rows, TILE[0]) - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    m = (group * GROUP_M + within % tiles_m) * TILE[0] + tl.arange(0, TILE[0])
    n = within // tiles_m * TILE[1] + tl.arange(0, TILE[1])
    total = product(x, weight, m, n, rows, out_features, width, 0, NUM_PARTS, BLOCK_K)
    for part in range(1, NUM_PARTS):
        total += product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS, BLOCK_K)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    inside = (row < rows) & (column < out_features)
    if bias is not None:
        total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_of(norm, m, rows, width, PIECES: tl.constexpr):
    """What ``normed`` takes for rows m: one over their root mean square. ``norm`` is that of ``operand``."""
    weight, squares, eps = norm
    if weight is None:
        return m
    else:
        piece, count = tl.arange(0, PIECES), tl.cdiv(width, PIECE)
        inside = (m < rows)[:, None] & (piece < count)[None, :]
        found = tl.load(squares + m.to(tl.int64)[:, None] * count + piece[None, :], mask=inside, other=0.0)
        return tl.rsqrt(folded(found) / width + eps)


@triton.jit
def normed(x, norm, scale, m, k, rows, width):
    """Columns k of rows m of x [rows, width], normed if ``norm`` says so; zero beyond its ends."""
    inside = (m < rows)[:, None] & (k < width)[None, :]
    a = tl.load(x + m.to(tl.int64)[:, None] * width + k[None, :], mask=inside, other=0.0)
    if norm[0] is not None:
        weight = tl.load(norm[0] + k, mask=k < width, other=0.0)[None, :]
        a = scaled(a.to(tl.float32), scale[:, None], weight, a.dtype).to(a.dtype)
    return a


@triton.jit
def two_products(x, weight, m, n, is_inside, distance, rows, width, norm, BLOCK_K: tl.constexpr, PIECES: tl.constexpr):
    """Products of rows m of x with rows n of ``weight``, where ``is_inside``, and with those ``distance`` below.

    Float32 [BLOCK_M, len(n)], added up in one order as in ``matmul`` and rounded as if they were stored.
    """
    scale = scale_of(norm, m, rows, width, PIECES)
    first = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    second = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = normed(x, norm, scale, m, k, rows, width)
        at = weight + n.to(tl.int64)[None, :] * width + k[:, None]
        inside = is_inside[None, :] & (k < width)[:, None]
        first = tl.dot(a, tl.load(at, mask=inside, other=0.0), first, input_precision="ieee")
        second = tl.dot(a, tl.load(at + distance * width, mask=inside, other=0.0), second, input_precision="ieee")
    dtype: tl.constexpr = x.dtype.element_ty
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def gated_matmul(x, weight, out, rows, inner, width, norm, BLOCK_K: tl.constexpr, PIECES: tl.constexpr):
    """``out = silu(gates) * ups`` of ``x @ weight.T``, the gates before the ups: one program per tile of ``out``."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * GATED_N + tl.arange(0, GATED_N)
    gate, up = two_products(x, weight, m, n, n < inner, inner, rows, width, norm, BLOCK_K, PIECES)
    inside = (m < rows)[:, None] & (n < inner)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * inner + n[None, :], gated(gate, up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_product(tensors, rows, out_features, width, NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """``out = x @ weight.T (+ bias) (+ residual)``, each rounded, and the sums of its squares over each tile's columns.

    One program per tile of ``out`` and part of ``width``; the last to arrive adds up the parts, in order, and sets the
    counter in ``arrivals`` back to zero. The bits are those of ``matmul``.
    """
    x, weight, bias, residual, parts, arrivals, out, squares = tensors
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * PIECE + tl.arange(0, PIECE)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = product(x, weight, m, n, rows, out_features, width, part, NUM_PARTS, BLOCK_K)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    inside = (row < rows) & (column < out_features)
    at = row * out_features + column
    size = rows.to(tl.int64) * out_features
    tl.store(parts + part * size + at, total, mask=inside)
    arrived = arrivals + tl.program_id(2) * tl.num_programs(0) + tile
    tl.debug_barrier()  # every thread has written before one of them counts
    if tl.atomic_add(arrived, 1, sem="acq_rel") == NUM_PARTS - 1:
        tl.store(arrived, 0)
        total = tl.zeros([BLOCK_M, PIECE], tl.float32)
        for i in tl.static_range(NUM_PARTS):
            total += tl.load(parts + i * size + at, mask=inside, other=0.0)
        if bias is not None:
            total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
        y = total.to(out.dtype.element_ty)
        if residual is not None:
            kept = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            y = (y.to(tl.float32) + kept).to(out.dtype.element_ty)
        tl.store(out + at, y, mask=inside)
        sums = sums_of_squares(y.to(tl.float32))
        tl.store(squares + m.to(tl.int64) * tl.num_programs(0) + tile, sums, mask=m < rows)

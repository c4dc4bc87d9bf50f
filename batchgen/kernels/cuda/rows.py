"""Kernels that treat each row by itself: RMS norm, alone and behind a sum; SwiGLU; argmax.

The width alone fixes the order in which a row is summed, so its bits never depend on the other rows. Products that norm
rows on the way, or leave their sums of squares, do so with the functions here: a compiler may pick another order for
``tl.sum`` in each kernel, and fuse a product and a sum in one and not in another, so both are written out; norms are
launched with ``WRITTEN_OUT``, as they would be fused with the residual that is added to them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.cuda.tuning import PIECE

SWIGLU_BLOCK = 1024
WRITTEN_OUT = {"enable_fp_fusion": False}  # nothing is fused but ``tl.fma``
ARGMAX_BLOCK = 8192  # logits of one program; a row's parts are then compared by another


@triton.jit
def folded(x):
    """Sums of float32 rows x [rows, n], n a power of two up to 4096: neighbours are added until one is left."""
    for _ in tl.static_range(12):
        if x.shape[1] > 1:
            a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = a + b
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def sums_of_squares(v):
    """Of float32 rows v [rows, n], n a power of two from 2 on; see ``folded``."""
    a, b = tl.split(tl.reshape(v, [v.shape[0], v.shape[1] // 2, 2]))
    return folded(tl.fma(a, a, b * b))


@triton.jit
def scaled(v, scale, weight, dtype: tl.constexpr):
    """Float32 rows times ``scale``, rounded to ``dtype`` before they meet the norm's weight, as models are trained.

    ``scale`` is one over their root mean square. The product is rounded too; the result is float32 again.
    """
    return ((v * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _normed(v, weight, width, eps, dtype: tl.constexpr):
    """RMS norm of a float32 row: squares are added up piece by piece, as those that ``linear.add_product`` leaves."""
    column = tl.arange(0, v.shape[0])
    squares = sums_of_squares(tl.reshape(v, [v.shape[0] // PIECE, PIECE]))
    scale = tl.rsqrt(folded(tl.reshape(squares, [1, v.shape[0] // PIECE])) / width + eps)
    return scaled(
        v, tl.broadcast_to(scale, [v.shape[0]]), tl.load(weight + column, mask=column < width, other=0.0), dtype
    )


@triton.jit
def rms_norm(x, weight, residual, out, width, eps, BLOCK: tl.constexpr):
    """One program per row; ``residual``, if there is one, is added to what is normed."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    v = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    v = _normed(v, weight, width, eps, out.dtype.element_ty)
    if residual is not None:
        v += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + column, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_and_norm(y, post, residual, weight, sums, out, width, eps, BLOCK: tl.constexpr):
    """One program per row: ``sums = y + residual``, y normed first by ``post`` if there is one; ``out`` their norm."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype: tl.constexpr = out.dtype.element_ty
    v = tl.load(y + start + column, mask=inside, other=0.0).to(tl.float32)
    if post is not None:
        v = _normed(v, post, width, eps, dtype)
    v = (v + tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(sums + start + column, v, mask=inside)
    tl.store(out + start + column, _normed(v.to(tl.float32), weight, width, eps, dtype).to(dtype), mask=inside)


@triton.jit
def gated(gate, up):
    """``silu(gate) * up`` of float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    """One program per row and ``BLOCK`` columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gated(gate, up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _first_largest(v, index):
    """(largest, the index of its first) of values in which NaN counts as -inf; NaN if there is nothing else."""
    is_nan = v != v
    ordered = tl.where(is_nan, float("-inf"), v)
    largest = tl.max(ordered)
    first = tl.min(tl.where(ordered == largest, index, 2147483647))
    return tl.where(tl.min(is_nan.to(tl.int32)) == 1, float("nan"), largest), first


@triton.jit
def argmax_parts(logits, largest, first, width, num_parts, BLOCK: tl.constexpr):
    """One program per row and part of ``BLOCK`` logits; ``largest`` and ``first`` are [rows, num_parts]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(logits + row * width + column, mask=column < width, other=float("nan")).to(tl.float32)
    value, index = _first_largest(v, column)
    tl.store(largest + row * num_parts + part, value)
    tl.store(first + row * num_parts + part, index)


@triton.jit
def argmax_of_parts(largest, first, out, num_parts, BLOCK: tl.constexpr):
    """One program per row; -1 for a row of NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    v = tl.load(largest + row * num_parts + part, mask=inside, other=float("nan"))
    index = tl.load(first + row * num_parts + part, mask=inside, other=2147483647)
    value, best = _first_largest(v, index)
    tl.store(out + row, tl.where(value != value, -1, best).to(tl.int64))

"""Kernels that compute each row separately: RMS norm, sum and RMS norm, SwiGLU. The width decides a sum's order.

Norms are launched with ``WRITTEN_OUT``, since otherwise the compiler would fuse them with the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

SWIGLU_BLOCK = 1024
WRITTEN_OUT = {"enable_fp_fusion": False}  # only ``tl.fma`` is fused


@triton.jit
def scaled(v, scale, weight, dtype: tl.constexpr):
    """Float32 rows times ``scale``, rounded to ``dtype`` before the norm's weight, as models are trained.

    ``scale`` is one over their root mean square. The product is rounded too; the result is float32 again.
    """
    return ((v * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _normed(v, weight, width, eps, dtype: tl.constexpr):
    column = tl.arange(0, v.shape[0])
    scale = tl.rsqrt(tl.sum(v * v) / width + eps)
    return scaled(v, scale, tl.load(weight + column, mask=column < width, other=0.0), dtype)


@triton.jit
def rms_norm(x, weight, residual, out, width, eps, BLOCK: tl.constexpr):
    """One program per row; ``residual``, if there is one, is added to the normed row."""
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
    """One program per row: ``sums`` is y (normed by ``post``, if there is one) + ``residual``; ``out`` is its norm."""
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

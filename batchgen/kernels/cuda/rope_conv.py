"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.cuda.rows import scaled
from batchgen.kernels.cuda.tiles import tile_of

CONV_TOKENS = 16  # tokens of a sequence that one program convolves, one after the other
CONV_CHANNELS = tl.constexpr(256)
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # float32 numbers of this size are integers, so adding it rounds, ties to even


@triton.jit
def _halves(x, head, num_heads, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Heads of x [num_heads, 2 * HALF] as float32 halves [heads, HALF_BLOCK], zero beyond their ends."""
    i = tl.arange(0, HALF_BLOCK)
    inside = (head[:, None] < num_heads) & (i < HALF)[None, :]
    at = x + head[:, None] * (2 * HALF) + i[None, :]
    a, b = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _normed_and_rotated(a, b, weight, eps, cosine, sine, HALF: tl.constexpr, dtype: tl.constexpr):
    """RMS norm, if there is a ``weight``, and half-split rotation of heads in halves a, b [rows, HALF_BLOCK].

    In float32, with norms rounded to ``dtype``; ``cosine`` and ``sine`` [1] point to the position's values.
    """
    i = tl.arange(0, a.shape[1])
    if weight is not None:
        scale = tl.rsqrt(tl.sum(tl.fma(a, a, b * b), 1) / (2 * HALF) + eps)[:, None]
        a = scaled(a, scale, tl.load(weight + i, mask=i < HALF, other=0.0)[None, :], dtype)
        b = scaled(b, scale, tl.load(weight + HALF + i, mask=i < HALF, other=0.0)[None, :], dtype)
    c = tl.load(cosine[:, None] + i[None, :], mask=(i < HALF)[None, :], other=0.0)
    s = tl.load(sine[:, None] + i[None, :], mask=(i < HALF)[None, :], other=0.0)
    return tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)


@triton.jit
def _store_halves(to, a, b, inside, HALF: tl.constexpr):
    """Write heads, given as halves a, b [rows, HALF_BLOCK], each to its place in ``to`` [rows]."""
    i = tl.arange(0, a.shape[1])
    at, inside = to[:, None] + i[None, :], inside[:, None] & (i < HALF)[None, :]
    tl.store(at, a.to(to.dtype.element_ty), mask=inside)
    tl.store(at + HALF, b.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _to_int8(a, b):
    """Float32 halves of heads [num_heads, HALF_BLOCK] as int8 and their scales [num_heads]: ``torch_kernels.to_int8``.

    Every quotient is rounded as in IEEE 754, so that the integers are the same.
    """
    largest = tl.maximum(tl.abs(a), tl.abs(b))
    is_finite = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))  # a maximum drops NaN
    largest = tl.max(tl.where(is_finite, largest, float("inf")), 1)
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))
    return _rounded(a, scale), _rounded(b, scale), scale


@triton.jit
def _rounded(x, scale):
    quotient = tl.div_rn(x, scale[:, None])
    quotient = tl.where(quotient == quotient, tl.clamp(quotient, -127.0, 127.0), 127.0)
    return ((quotient + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def _cache_halves(to, scales, at, a, b, inside, HALF: tl.constexpr):
    """``_store_halves`` of keys or values; if these are integers, their scales go to ``scales[at]`` [rows]."""
    if scales is not None:
        a, b, scale = _to_int8(a.to(tl.float32), b.to(tl.float32))
        tl.store(scales + at, scale, mask=inside)
    _store_halves(to, a, b, inside, HALF)


@triton.jit
def rope_and_cache(qkv, columns, tensors, sizes, LAYOUT: tl.constexpr, POWERS: tl.constexpr):
    """One program per token. POWERS: the powers of two that hold num_heads and num_kv_heads.

    LAYOUT: width, block_size and lanes of ``KVCache``, half of head_dim, and the next power of two.
    """
    WIDTH: tl.constexpr = LAYOUT[0]
    BLOCK_SIZE: tl.constexpr = LAYOUT[1]
    LANES: tl.constexpr = LAYOUT[2]
    HALF: tl.constexpr = LAYOUT[3]
    HALF_BLOCK: tl.constexpr = LAYOUT[4]
    q_weight, k_weight, cosine, sine, positions, slots, q_out, keys, values, scales = tensors
    eps, scale, num_heads, num_kv_heads = sizes
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token + tl.arange(0, 1)) * HALF
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = qkv + token * columns
    head = tl.arange(0, POWERS[0])
    a, b = _halves(row, head, num_heads, HALF, HALF_BLOCK)
    a, b = _normed_and_rotated(a, b, q_weight, eps, cosine + angle, sine + angle, HALF, dtype)
    _store_halves(q_out + (token * num_heads + head) * WIDTH, a * scale, b * scale, head < num_heads, HALF)

    slot = tl.load(slots + token)
    head = tl.arange(0, POWERS[1])
    place, offset = slot // BLOCK_SIZE * num_kv_heads + head, slot % BLOCK_SIZE
    at = place * (2 * LANES) + offset
    row += num_heads * (2 * HALF)
    c, d = _halves(row + num_kv_heads * (2 * HALF), head, num_kv_heads, HALF, HALF_BLOCK)
    is_finite = tl.min((c * 0.0 + d * 0.0 == 0.0).to(tl.int32), 1)[:, None] == 1  # else zero times it is NaN
    to = values + (place * BLOCK_SIZE + offset) * WIDTH
    c, d = tl.where(is_finite, c, 0.0), tl.where(is_finite, d, 0.0)
    _cache_halves(to, scales, at + LANES, c, d, head < num_kv_heads, HALF)
    a, b = _halves(row, head, num_kv_heads, HALF, HALF_BLOCK)
    a, b = _normed_and_rotated(a, b, k_weight, eps, cosine + angle, sine + angle, HALF, dtype)
    a, b = tl.where(is_finite, a, float("nan")), tl.where(is_finite, b, float("nan"))
    _cache_halves(keys + (place * LANES + offset) * WIDTH, scales, at, a, b, head < num_kv_heads, HALF)


@triton.jit
def _conv_input(bcx, past, token, first, is_started, width, channel, TAPS: tl.constexpr):
    """The convolution's input u = B * x of ``token``, rounded as the model stores it.

    Before the sequence's ``first`` token in this step it is read from the state ``past``; before position 0 it is zero.
    """
    num_new = tl.where(token >= first, width, 0)  # channels to read from this step; the next line's, from the state
    num_old = tl.where((token < first) & is_started, width, 0)
    at = bcx + tl.cast(token, tl.int64) * 3 * width + channel
    b = tl.load(at, mask=channel < num_new, other=0.0).to(tl.float32)
    x = tl.load(at + 2 * width, mask=channel < num_new, other=0.0).to(tl.float32)
    row = token - first + (TAPS - 1)
    old = tl.load(past + row * width + channel, mask=channel < num_old, other=0.0).to(tl.float32)
    return (b * x).to(bcx.dtype.element_ty).to(tl.float32) + old


@triton.jit
def _store_conv_state(to, bcx, past, token, first, is_started, width, channel, TAPS: tl.constexpr):
    """Write the inputs up to ``token`` as the state that follows it.

    ``to`` may be ``past`` itself: reads stay ahead of writes. A barrier is needed because a thread may write other
    channels than it has read.
    """
    for row in range(TAPS - 1):
        u = _conv_input(bcx, past, token - (TAPS - 2) + row, first, is_started, width, channel, TAPS)
        tl.debug_barrier()
        tl.store(to + row * width + channel, u.to(to.dtype.element_ty), mask=channel < width)


@triton.jit(do_not_specialize=["num_seqs"])
def short_conv(
    tensors,
    num_seqs,
    width,
    BLOCK_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_EACH: tl.constexpr,
):
    """One program per tile of ``TOKENS`` tokens of a sequence and ``CONV_CHANNELS`` channels.

    Only a sequence's first tile reads its state, so it also writes the next state: programs do not wait for each other.
    """
    bcx, weight, bias, slots, blocks, cu_seqlens, conv_slots, positions, slot_mapping, out = tensors
    sequence, token, end = tile_of(tl.program_id(0), cu_seqlens, num_seqs, TOKENS, ONE_EACH)
    if token >= end:
        return
    first = tl.load(cu_seqlens + sequence)
    is_started = tl.load(positions + first) > 0
    state_size = (TAPS - 1) * width
    past = slots + tl.load(conv_slots + sequence).to(tl.int64) * state_size
    channel = tl.program_id(1) * CONV_CHANNELS + tl.arange(0, CONV_CHANNELS)
    inside = channel < width
    offset = tl.load(bias + channel, mask=inside, other=0.0)
    for t in range(token, tl.minimum(end, token + TOKENS)):
        total = offset
        for tap in tl.static_range(TAPS):
            u = _conv_input(bcx, past, t - (TAPS - 1) + tap, first, is_started, width, channel, TAPS)
            total = tl.fma(u, tl.load(weight + tap * width + channel, mask=inside, other=0.0), total)
        at = tl.cast(t, tl.int64) * width + channel
        c = tl.load(bcx + tl.cast(t, tl.int64) * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        y = c * total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
        if (tl.load(positions + t) + 1) % BLOCK_SIZE == 0:
            block = tl.load(slot_mapping + t) // BLOCK_SIZE
            _store_conv_state(blocks + block * state_size, bcx, past, t, first, is_started, width, channel, TAPS)
    if token == first:
        _store_conv_state(past, bcx, past, end - 1, first, is_started, width, channel, TAPS)

"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution.

Each alone, and for few rows joined to the projection before it, with the roundings of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.cuda.linear import normed, scale_of, two_products
from batchgen.kernels.cuda.rows import folded, scaled
from batchgen.kernels.cuda.tiles import tile_of
from batchgen.kernels.cuda.tuning import BLOCK_M, CONV_N

CONV_TOKENS = 16  # tokens of a sequence that one program convolves, one after the other
CONV_CHANNELS = tl.constexpr(256)
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # a float32 of this size has no bit behind the point: ties go to even


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

    All in float32, norms rounded to ``dtype``; ``cosine`` and ``sine`` [rows or 1] are where a row's position has them.
    Fused by hand, so that all callers round alike.
    """
    i = tl.arange(0, a.shape[1])
    if weight is not None:
        scale = tl.rsqrt(folded(tl.fma(a, a, b * b)) / (2 * HALF) + eps)[:, None]
        a = scaled(a, scale, tl.load(weight + i, mask=i < HALF, other=0.0)[None, :], dtype)
        b = scaled(b, scale, tl.load(weight + HALF + i, mask=i < HALF, other=0.0)[None, :], dtype)
    c = tl.load(cosine[:, None] + i[None, :], mask=(i < HALF)[None, :], other=0.0)
    s = tl.load(sine[:, None] + i[None, :], mask=(i < HALF)[None, :], other=0.0)
    return tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)


@triton.jit
def _store_halves(to, a, b, inside, HALF: tl.constexpr):
    """Heads as they lie in memory, each at its ``to`` [rows], of halves a, b [rows, HALF_BLOCK]."""
    i = tl.arange(0, a.shape[1])
    at, inside = to[:, None] + i[None, :], inside[:, None] & (i < HALF)[None, :]
    tl.store(at, a.to(to.dtype.element_ty), mask=inside)
    tl.store(at + HALF, b.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _to_int8(a, b):
    """Float32 halves of heads [num_heads, HALF_BLOCK] as int8 and their scales [num_heads]: ``reference.to_int8``.

    Every quotient is rounded as IEEE 754 has it, so that the integers of the same numbers are the reference's.
    """
    largest = tl.maximum(tl.abs(a), tl.abs(b))
    is_finite = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))  # no maximum keeps a NaN
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
    """``_store_halves`` of keys or values; where these are integers, their scales go to ``scales[at]`` [rows]."""
    if scales is not None:
        a, b, scale = _to_int8(a.to(tl.float32), b.to(tl.float32))
        tl.store(scales + at, scale, mask=inside)
    _store_halves(to, a, b, inside, HALF)


@triton.jit
def rope_and_cache(qkv, columns, tensors, sizes, LAYOUT: tl.constexpr, POWERS: tl.constexpr):
    """One program per token. POWERS: of two, holding num_heads and num_kv_heads.

    LAYOUT: width, block_size and lanes of ``KVCache``, half of head_dim, and the power of two that holds that.
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
    a, b = _halves(row, head, num_kv_heads, HALF, HALF_BLOCK)
    a, b = _normed_and_rotated(a, b, k_weight, eps, cosine + angle, sine + angle, HALF, dtype)
    _cache_halves(keys + (place * LANES + offset) * WIDTH, scales, at, a, b, head < num_kv_heads, HALF)
    a, b = _halves(row + num_kv_heads * (2 * HALF), head, num_kv_heads, HALF, HALF_BLOCK)
    to = values + (place * BLOCK_SIZE + offset) * WIDTH
    _cache_halves(to, scales, at + LANES, a, b, head < num_kv_heads, HALF)


@triton.jit(do_not_specialize=["rows"])
def project_and_cache(
    x, weight, tensors, sizes, rows, width, norm, LAYOUT: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr
):
    """``rope_and_cache`` of ``x @ weight.T``: one program per head of queries, keys or values, and ``BLOCK_M`` tokens.

    Products are added up as in ``linear.matmul``; x is normed first as ``norm`` says.
    """
    WIDTH: tl.constexpr = LAYOUT[0]
    BLOCK_SIZE: tl.constexpr = LAYOUT[1]
    LANES: tl.constexpr = LAYOUT[2]
    HALF: tl.constexpr = LAYOUT[3]
    q_weight, k_weight, cosine, sine, positions, slots, q_out, keys, values, scales = tensors
    eps, q_scale, num_heads, num_kv_heads = sizes
    head = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, LAYOUT[4])
    a, b = two_products(x, weight, m, head * (2 * HALF) + i, i < HALF, HALF, rows, width, norm, BLOCK_K, PIECES)
    inside = m < rows
    dtype: tl.constexpr = x.dtype.element_ty
    angle = tl.load(positions + m, mask=inside, other=0) * HALF
    slot = tl.load(slots + m, mask=inside, other=0)
    place, offset = slot // BLOCK_SIZE * num_kv_heads, slot % BLOCK_SIZE
    if head < num_heads:
        a, b = _normed_and_rotated(a, b, q_weight, eps, cosine + angle, sine + angle, HALF, dtype)
        at = m.to(tl.int64) * num_heads + head
        _store_halves(q_out + at * WIDTH, a * q_scale, b * q_scale, inside, HALF)
    elif head < num_heads + num_kv_heads:
        a, b = _normed_and_rotated(a, b, k_weight, eps, cosine + angle, sine + angle, HALF, dtype)
        place += head - num_heads
        to = keys + (place * LANES + offset) * WIDTH
        _cache_halves(to, scales, place * (2 * LANES) + offset, a, b, inside, HALF)
    else:
        place += head - num_heads - num_kv_heads
        to = values + (place * BLOCK_SIZE + offset) * WIDTH
        _cache_halves(to, scales, place * (2 * LANES) + LANES + offset, a.to(dtype), b.to(dtype), inside, HALF)


@triton.jit
def _conv_input(bcx, past, token, first, is_started, width, channel, TAPS: tl.constexpr):
    """The convolution's input u = B * x of ``token``, rounded as the model stores it.

    Before the step's ``first`` token of the sequence, from its state ``past``; zero before its start.
    """
    num_new = tl.where(token >= first, width, 0)  # channels to take from this step, else from the state
    num_old = tl.where((token < first) & is_started, width, 0)
    at = bcx + tl.cast(token, tl.int64) * 3 * width + channel
    b = tl.load(at, mask=channel < num_new, other=0.0).to(tl.float32)
    x = tl.load(at + 2 * width, mask=channel < num_new, other=0.0).to(tl.float32)
    row = token - first + (TAPS - 1)
    old = tl.load(past + row * width + channel, mask=channel < num_old, other=0.0).to(tl.float32)
    return (b * x).to(bcx.dtype.element_ty).to(tl.float32) + old


@triton.jit
def _remember(to, bcx, past, token, first, is_started, width, channel, num_back, is_backwards, TAPS: tl.constexpr):
    """Write the inputs up to ``token`` as a state that follows it, ``num_back`` more before ``to``.

    ``past`` may be in the memory that is written. Then reads stay ahead of writes: a state that moves towards its
    start is written from there on, one that moves towards its end backwards. The barrier is there because threads may
    hold other channels when they write than when they read.
    """
    for i in range(TAPS - 1 + num_back):
        row = tl.where(is_backwards, TAPS - 2 - i, i - num_back)
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
    NUM_SPARE: tl.constexpr,
    TOKENS: tl.constexpr,
    ONE_EACH: tl.constexpr,
):
    """One program per tile of ``TOKENS`` tokens of a sequence and ``CONV_CHANNELS`` channels.

    Only a sequence's first tile reads its state, so it is also the one that writes the next: no program waits.
    """
    bcx, weight, bias, slots, blocks, cu_seqlens, conv_slots, rejected, positions, slot_mapping, out = tensors
    sequence, token, end = tile_of(tl.program_id(0), cu_seqlens, num_seqs, TOKENS, ONE_EACH)
    if token >= end:
        return
    first = tl.load(cu_seqlens + sequence)
    is_started = tl.load(positions + first) > 0
    state_size = (TAPS - 1) * width
    num_rejected = tl.load(rejected + sequence)
    state = slots + (tl.load(conv_slots + sequence).to(tl.int64) * (TAPS - 1 + NUM_SPARE) + NUM_SPARE) * width
    past = state - num_rejected * width
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
            _remember(blocks + block * state_size, bcx, past, t, first, is_started, width, channel, 0, False, TAPS)
    if token == first:
        num_back = tl.minimum(end - first - 1, NUM_SPARE)
        is_backwards = num_rejected > end - first
        _remember(state, bcx, past, end - 1, first, is_started, width, channel, num_back, is_backwards, TAPS)


@triton.jit(do_not_specialize=["rows"])
def project_and_convolve(
    x, projection, tensors, rows, width, norm, STATE: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr
):
    """``short_conv`` of ``x @ projection.T`` for sequences with one token each.

    One program per ``BLOCK_M`` of them and ``CONV_N`` channels, which owns their state: it reads all of it that it
    needs before it writes. Products are added up as in ``linear.matmul``; x is normed first as ``norm`` says. STATE:
    block_size, num_spare, taps, and the power of two that holds what stays of them.
    """
    BLOCK_SIZE: tl.constexpr = STATE[0]
    NUM_SPARE: tl.constexpr = STATE[1]
    TAPS: tl.constexpr = STATE[2]
    weight, bias, slots, blocks, conv_slots, rejected, positions, slot_mapping, out = tensors
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * CONV_N + tl.arange(0, CONV_N)
    scale = scale_of(norm, m, rows, width, PIECES)
    b = tl.zeros([BLOCK_M, CONV_N], tl.float32)
    c = tl.zeros([BLOCK_M, CONV_N], tl.float32)
    u = tl.zeros([BLOCK_M, CONV_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = normed(x, norm, scale, m, k, rows, width)
        at = projection + n.to(tl.int64)[None, :] * width + k[:, None]
        inside = (n < width)[None, :] & (k < width)[:, None]
        b = tl.dot(a, tl.load(at, mask=inside, other=0.0), b, input_precision="ieee")
        c = tl.dot(a, tl.load(at + width * width, mask=inside, other=0.0), c, input_precision="ieee")
        u = tl.dot(a, tl.load(at + 2 * width * width, mask=inside, other=0.0), u, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    u = (b.to(dtype).to(tl.float32) * u.to(dtype).to(tl.float32)).to(dtype)

    is_row = m < rows
    inside = is_row[:, None] & (n < width)[None, :]
    slot = tl.load(conv_slots + m, mask=is_row, other=0).to(tl.int64)
    state = slots + (slot * (TAPS - 1 + NUM_SPARE) + NUM_SPARE) * width
    past = (state - tl.load(rejected + m, mask=is_row, other=0) * width)[:, None] + n[None, :]
    position = tl.load(positions + m, mask=is_row, other=0)
    is_old = inside & (position > 0)[:, None]
    total = tl.zeros([BLOCK_M, CONV_N], tl.float32) + tl.load(bias + n, mask=n < width, other=0.0)[None, :]
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(past + tap * width, mask=is_old, other=0.0).to(tl.float32)
        total = tl.fma(old, tl.load(weight + tap * width + n, mask=n < width, other=0.0)[None, :], total)
    last = tl.load(weight + (TAPS - 1) * width + n, mask=n < width, other=0.0)[None, :]
    total = tl.fma(u.to(tl.float32), last, total)  # as ``short_conv`` fuses
    y = c.to(dtype).to(tl.float32) * total.to(dtype).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * width + n[None, :], y.to(dtype), mask=inside)

    block = tl.load(slot_mapping + m, mask=is_row, other=0) // BLOCK_SIZE
    ends = inside & ((position + 1) % BLOCK_SIZE == 0)[:, None]
    state = state[:, None] + n[None, :]
    block = (blocks + block * (TAPS - 1) * width)[:, None] + n[None, :]
    tap = tl.arange(0, STATE[3])[:, None, None]
    kept = tl.load(past[None, :, :] + (tap + 1) * width, mask=is_old[None, :, :] & (tap < TAPS - 2), other=0.0)
    tl.debug_barrier()  # threads may hold other channels when they write than when they read
    tl.store(state[None, :, :] + tap * width, kept, mask=inside[None, :, :] & (tap < TAPS - 2))
    tl.store(block[None, :, :] + tap * width, kept, mask=ends[None, :, :] & (tap < TAPS - 2))
    tl.store(state + (TAPS - 2) * width, u, mask=inside)
    tl.store(block + (TAPS - 2) * width, u, mask=ends)

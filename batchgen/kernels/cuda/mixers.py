"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.cuda.tiles import tile_of

CONV_TOKENS = 16  # tokens of a sequence that one program convolves, one after the other
CONV_CHANNELS = tl.constexpr(256)


@triton.jit
def _normed_and_rotated(x, weight, eps, cosine, sine, head, num_heads, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """RMS norm, if there is a ``weight``, and half-split rotation of heads x [num_heads, 2 * HALF].

    Returns float32 halves [heads, HALF_BLOCK].
    """
    dtype = x.dtype.element_ty
    i = tl.arange(0, HALF_BLOCK)
    inside = (head[:, None] < num_heads) & (i < HALF)[None, :]
    at = x + head[:, None] * (2 * HALF) + i[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
        a = ((a * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    c = tl.load(cosine + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sine + i, mask=i < HALF, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def rope_and_cache(
    tensors, eps, scale, num_heads, num_kv_heads, columns, HALF: tl.constexpr, CACHE: tl.constexpr, POWERS: tl.constexpr
):
    """One program per token. CACHE: width, block_size, lanes. POWERS: of two, holding num_heads, num_kv_heads, HALF."""
    WIDTH: tl.constexpr = CACHE[0]
    BLOCK_SIZE: tl.constexpr = CACHE[1]
    LANES: tl.constexpr = CACHE[2]
    HALF_BLOCK: tl.constexpr = POWERS[2]
    qkv, q_weight, k_weight, cosine, sine, positions, slots, q_out, keys, values = tensors
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token) * HALF
    row = qkv + token * columns
    i = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, POWERS[0])
    a, b = _normed_and_rotated(row, q_weight, eps, cosine + angle, sine + angle, head, num_heads, HALF, HALF_BLOCK)
    inside = (head[:, None] < num_heads) & (i < HALF)[None, :]
    to = q_out + (token * num_heads + head)[:, None] * WIDTH + i[None, :]
    tl.store(to, a * scale, mask=inside)
    tl.store(to + HALF, b * scale, mask=inside)

    slot = tl.load(slots + token)
    head = tl.arange(0, POWERS[1])
    inside = (head[:, None] < num_kv_heads) & (i < HALF)[None, :]
    row += num_heads * (2 * HALF)
    a, b = _normed_and_rotated(row, k_weight, eps, cosine + angle, sine + angle, head, num_kv_heads, HALF, HALF_BLOCK)
    place = (slot // BLOCK_SIZE * num_kv_heads + head)[:, None]  # block and head
    to = keys + (place * LANES + slot % BLOCK_SIZE) * WIDTH + i[None, :]
    tl.store(to, a.to(keys.dtype.element_ty), mask=inside)
    tl.store(to + HALF, b.to(keys.dtype.element_ty), mask=inside)

    at = row + (num_kv_heads + head)[:, None] * (2 * HALF) + i[None, :]
    to = values + (place * BLOCK_SIZE + slot % BLOCK_SIZE) * WIDTH + i[None, :]
    tl.store(to, tl.load(at, mask=inside), mask=inside)
    tl.store(to + HALF, tl.load(at + HALF, mask=inside), mask=inside)


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
            total += u * tl.load(weight + tap * width + channel, mask=inside, other=0.0)
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

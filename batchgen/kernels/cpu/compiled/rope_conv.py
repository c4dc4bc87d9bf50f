"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution.

Each writes only what belongs to its own sequence, so sequences of a ragged batch run side by side.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.rows import mean_square
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, LANES, NUM_ITEMS, NUM_WORKERS, SEGMENT

conv_scratch_floats = simd.jit(layout.conv_scratch_floats)


@simd.inline
def _norm_and_rotate(x, start, weight, is_normed, eps, cosine, sine, angle, head_dim, head):
    """RMS norm of one head, if ``is_normed``, then half-split rotation, into float32 ``head`` [head_dim]."""
    scale = simd.splat(F32(1.0) / F32(math.sqrt(mean_square(x, start, head_dim) + eps)))
    for i in range(0, head_dim, LANES):
        count = head_dim - i
        v = simd.load_some(x, start + i, count)
        if is_normed:
            v = simd.round_like(x, simd.mul(v, scale))
            v = simd.round_like(x, simd.mul(v, simd.load_some(weight, i, count)))
        simd.store_some(head, i, v, count)
    half = head_dim // 2
    for i in range(half):
        c, s = cosine[angle + i], sine[angle + i]
        a, b = head[i], head[half + i]
        head[i] = a * c - b * s
        head[half + i] = b * c + a * s


@simd.inline
def _scale_of(x, count):
    """A 127th of the largest magnitude in ``x[:count]``; NaN if one is not finite."""
    zero = simd.splat(F32(0.0))
    largest, spoilt = zero, zero
    for i in range(0, count, LANES):
        v = simd.load_some(x, i, count - i)
        largest = simd.maximum(largest, simd.absolute(v))
        spoilt = simd.fma(v, zero, spoilt)
    return simd.max_lanes(largest) / F32(127.0) + simd.sum_lanes(spoilt)


@simd.inline
def _keep(head, head_dim, out, start, scales, place):
    """Round one head's float32 values to the element type of ``out``, over a scale where ``scales`` has an address.

    Returns whether what is kept is finite.
    """
    by, zero = simd.splat(F32(1.0)), simd.splat(F32(0.0))
    odd = zero
    if scales:
        scale = _scale_of(head, head_dim)
        simd.pointer(scales, F32)[place] = scale
        by = odd = simd.splat(scale)
    for i in range(0, head_dim, LANES):
        v = simd.load_some(head, i, head_dim - i)
        if scales:
            v = simd.div(v, by)
        else:
            odd = simd.fma(simd.round_like(out, v), zero, odd)
        simd.store_some(out, start + i, v, head_dim - i)
    return simd.all_equal(odd, odd)


@simd.inline
def _fill(head, head_dim, value):
    for i in range(0, head_dim, LANES):
        simd.store_some(head, i, simd.splat(value), head_dim - i)


@simd.jit
def rope_and_cache(args, dtype, cached, unit):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is one token.

    ``cached`` is the element type of keys and values; a key's dimensions are stored side by side in ``unit``s.
    """
    qkv = simd.pointer(args[ARGS], dtype)
    q_weight, k_weight = simd.pointer(args[ARGS + 1], dtype), simd.pointer(args[ARGS + 2], dtype)
    cosine, sine = simd.pointer(args[ARGS + 3], F32), simd.pointer(args[ARGS + 4], F32)
    positions, slots = simd.pointer(args[ARGS + 5], np.int32), simd.pointer(args[ARGS + 6], np.int64)
    q_out = simd.pointer(args[ARGS + 7], F32)
    keys, values = simd.pointer(args[ARGS + 8], unit), simd.pointer(args[ARGS + 9], cached)
    num_heads, num_kv_heads, head_dim, width = args[ARGS + 11], args[ARGS + 12], args[ARGS + 13], args[ARGS + 14]
    block_size, lanes = args[ARGS + 15], args[ARGS + 16]
    eps, scale = simd.float_of_bits(args[ARGS + 17]), simd.float_of_bits(args[ARGS + 18])
    is_normed, columns = args[ARGS + 1] != 0, args[ARGS + 21]
    worker = worker_number(args)
    mine = args[ARGS + 10] + worker * 8 * width
    head, rounded = simd.pointer(mine, F32), simd.pointer(mine + 4 * width, cached)
    rounded_units, pack, scales = simd.pointer(mine + 4 * width, unit), args[ARGS + 19], args[ARGS + 20]
    token = next_item(args, worker)
    while token < args[NUM_ITEMS]:
        angle = positions[token] * (head_dim // 2)
        block, offset = slots[token] // block_size, slots[token] % block_size
        row = token * columns
        for h in range(num_heads):
            _norm_and_rotate(qkv, row + h * head_dim, q_weight, is_normed, eps, cosine, sine, angle, head_dim, head)
            to = (token * num_heads + h) * width
            for i in range(head_dim):
                q_out[to + i] = head[i] * scale
            for i in range(head_dim, width):
                q_out[to + i] = F32(0.0)
        for h in range(num_kv_heads):
            start, place = row + (num_heads + num_kv_heads + h) * head_dim, block * num_kv_heads + h
            scale_at, value_at = 2 * place * lanes + offset, (place * block_size + offset) * width
            for i in range(0, head_dim, LANES):
                simd.store_some(head, i, simd.load_some(qkv, start + i, head_dim - i), head_dim - i)
            is_finite = _keep(head, head_dim, values, value_at, scales, scale_at + lanes)
            start -= num_kv_heads * head_dim
            _norm_and_rotate(qkv, start, k_weight, is_normed, eps, cosine, sine, angle, head_dim, head)
            if not is_finite:
                _fill(head, head_dim, F32(0.0))
                _keep(head, head_dim, values, value_at, scales, scale_at + lanes)
                _fill(head, head_dim, F32(np.nan))
            _keep(head, head_dim, rounded, 0, scales, scale_at)
            to = place * (width // pack) * lanes + offset
            for i in range(head_dim // pack):
                keys[to + i * lanes] = rounded_units[i]
        token = next_item(args, worker)


@simd.inline
def _load_conv_state(state, position, width, taps, past):
    """The inputs of the ``taps - 1`` positions before ``position`` into float32 ``past``; zero before the start."""
    for i in range(taps - 1):
        known = position - (taps - 1) + i >= 0
        for channel in range(0, width, LANES):
            u = simd.load_some(state, i * width + channel, width - channel) if known else simd.splat(F32(0.0))
            simd.store_some(past, i * width + channel, u, width - channel)


@simd.inline
def _convolve(bcx, weight, bias, out, token, count, width, taps, past):
    """``count`` tokens from ``token`` on; ``past`` holds earlier inputs first, then receives these tokens' own.

    An input is u = B * x, rounded as the model's dtype stores it.
    """
    for t in range(count):
        row = (token + t) * 3 * width
        for channel in range(0, width, LANES):
            left = width - channel
            b, x = simd.load_some(bcx, row + channel, left), simd.load_some(bcx, row + 2 * width + channel, left)
            at = t * width + channel
            simd.store_some(past, at + (taps - 1) * width, simd.round_like(bcx, simd.mul(b, x)), left)
            total = simd.load_some(bias, channel, left)
            for tap in range(taps):
                u = simd.load_some(past, at + tap * width, left)
                total = simd.fma(u, simd.load_some(weight, tap * width + channel, left), total)
            y = simd.mul(simd.load_some(bcx, row + width + channel, left), simd.round_like(bcx, total))
            simd.store_some(out, (token + t) * width + channel, y, left)


@simd.inline
def _store_conv_state(past, first, num_rows, width, state):
    """``num_rows`` inputs from row ``first`` of ``past`` on, into the state."""
    for i in range(0, num_rows * width, LANES):
        left = num_rows * width - i
        simd.store_some(state, i, simd.load_some(past, first * width + i, left), left)


@simd.jit
def short_conv(args, dtype):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is a sequence.

    A row is processed from end to end, not in strips of channels: memory is read in its order, twice as fast.
    """
    bcx = simd.pointer(args[ARGS], dtype)
    weight, bias = simd.pointer(args[ARGS + 1], F32), simd.pointer(args[ARGS + 2], F32)
    cu_seqlens, conv_slots = simd.pointer(args[ARGS + 4], np.int32), simd.pointer(args[ARGS + 5], np.int32)
    positions = simd.pointer(args[ARGS + 6], np.int32)
    out = simd.pointer(args[ARGS + 7], dtype)
    width, taps = args[ARGS + 8], args[ARGS + 9]
    worker = worker_number(args)
    past = simd.pointer(args[ARGS + 11] + worker * 4 * conv_scratch_floats(taps, width), F32)
    slots, block_size = simd.pointer(args[ARGS + 13], np.int64), args[ARGS + 14]
    row_bytes = width * args[ARGS + 10]
    # Prompts stand last in a step, and long items come first for the threads' balance: all is counted from the end.
    mirrored = args[NUM_WORKERS] - 1 - worker
    item = next_item(args, mirrored)
    while item < args[NUM_ITEMS]:
        sequence = args[NUM_ITEMS] - 1 - item
        first, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        state = simd.pointer(args[ARGS + 3] + conv_slots[sequence] * (taps - 1) * row_bytes, dtype)
        _load_conv_state(state, positions[first], width, taps, past)
        for token in range(first, end, SEGMENT):
            count = min(SEGMENT, end - token)
            _convolve(bcx, weight, bias, out, token, count, width, taps, past)
            for t in range(count):
                if (positions[token + t] + 1) % block_size == 0:  # the end of a KV block
                    block = args[ARGS + 12] + slots[token + t] // block_size * (taps - 1) * row_bytes
                    _store_conv_state(past, t + 1, taps - 1, width, simd.pointer(block, dtype))
            _store_conv_state(past, count, taps - 1, width, past)  # the newest inputs are the past of what follows
        _store_conv_state(past, 0, taps - 1, width, state)
        item = next_item(args, mirrored)

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
from batchgen.kernels.cpu.compiled.work import next_item, worker_number
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
    """Round one head's float32 values to the element type of ``out``, over a scale where ``scales`` has an address."""
    by = simd.splat(F32(1.0))
    if scales:
        scale = _scale_of(head, head_dim)
        simd.pointer(scales, F32)[place] = scale
        by = simd.splat(scale)
    for i in range(0, head_dim, LANES):
        v = simd.load_some(head, i, head_dim - i)
        if scales:
            v = simd.div(v, by)
        simd.store_some(out, start + i, v, head_dim - i)


@simd.jit
def rope_and_cache(words, dtype, cached, unit):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is one token.

    ``cached`` is the element type of keys and values; a key's dimensions are stored side by side in ``unit``s.
    """
    qkv = simd.pointer(words[ARGS], dtype)
    q_weight, k_weight = simd.pointer(words[ARGS + 1], dtype), simd.pointer(words[ARGS + 2], dtype)
    cosine, sine = simd.pointer(words[ARGS + 3], F32), simd.pointer(words[ARGS + 4], F32)
    positions, slots = simd.pointer(words[ARGS + 5], np.int32), simd.pointer(words[ARGS + 6], np.int64)
    q_out = simd.pointer(words[ARGS + 7], F32)
    keys, values = simd.pointer(words[ARGS + 8], unit), simd.pointer(words[ARGS + 9], cached)
    num_heads, num_kv_heads, head_dim, width = words[ARGS + 11], words[ARGS + 12], words[ARGS + 13], words[ARGS + 14]
    block_size, lanes = words[ARGS + 15], words[ARGS + 16]
    eps, scale = simd.float_of_bits(words[ARGS + 17]), simd.float_of_bits(words[ARGS + 18])
    is_normed, columns = words[ARGS + 1] != 0, words[ARGS + 21]
    worker = worker_number(words)
    mine = words[ARGS + 10] + worker * 8 * width
    head, rounded = simd.pointer(mine, F32), simd.pointer(mine + 4 * width, cached)
    rounded_units, pack, scales = simd.pointer(mine + 4 * width, unit), words[ARGS + 19], words[ARGS + 20]
    token = next_item(words, worker)
    while token < words[NUM_ITEMS]:
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
            start = row + (num_heads + h) * head_dim
            _norm_and_rotate(qkv, start, k_weight, is_normed, eps, cosine, sine, angle, head_dim, head)
            place = block * num_kv_heads + h
            scale_at = 2 * place * lanes + offset
            _keep(head, head_dim, rounded, 0, scales, scale_at)
            to = place * (width // pack) * lanes + offset
            for i in range(head_dim // pack):
                keys[to + i * lanes] = rounded_units[i]
            start += num_kv_heads * head_dim
            for i in range(0, head_dim, LANES):
                simd.store_some(head, i, simd.load_some(qkv, start + i, head_dim - i), head_dim - i)
            _keep(head, head_dim, values, (place * block_size + offset) * width, scales, scale_at + lanes)
        token = next_item(words, worker)


@simd.inline
def _recall(state, position, width, taps, past):
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
def _remember(past, first, num_rows, width, state, row):
    """``num_rows`` inputs from row ``first`` of ``past`` on, into the state from its ``row`` on."""
    for i in range(0, num_rows * width, LANES):
        left = num_rows * width - i
        simd.store_some(state, row * width + i, simd.load_some(past, first * width + i, left), left)


@simd.jit
def short_conv(words, dtype):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is a sequence.

    A row is processed from end to end, not in strips of channels: memory is read in its order, twice as fast.
    """
    bcx = simd.pointer(words[ARGS], dtype)
    weight, bias = simd.pointer(words[ARGS + 1], F32), simd.pointer(words[ARGS + 2], F32)
    cu_seqlens, conv_slots = simd.pointer(words[ARGS + 4], np.int32), simd.pointer(words[ARGS + 5], np.int32)
    positions = simd.pointer(words[ARGS + 6], np.int32)
    out = simd.pointer(words[ARGS + 7], dtype)
    width, taps = words[ARGS + 8], words[ARGS + 9]
    worker = worker_number(words)
    past = simd.pointer(words[ARGS + 11] + worker * 4 * conv_scratch_floats(taps, width), F32)
    slots, block_size = simd.pointer(words[ARGS + 13], np.int64), words[ARGS + 14]
    rejected, num_spare = simd.pointer(words[ARGS + 15], np.int32), words[ARGS + 16]
    row_bytes = width * words[ARGS + 10]
    # Prompts stand last in a step, and long items come first for the threads' balance: all is counted from the end.
    mirrored = words[NUM_WORKERS] - 1 - worker
    item = next_item(words, mirrored)
    while item < words[NUM_ITEMS]:
        sequence = words[NUM_ITEMS] - 1 - item
        first, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        slot = words[ARGS + 3] + conv_slots[sequence] * (num_spare + taps - 1) * row_bytes
        state = simd.pointer(slot, dtype)
        window = simd.pointer(slot + (num_spare - rejected[sequence]) * row_bytes, dtype)
        _recall(window, positions[first], width, taps, past)
        for token in range(first, end, SEGMENT):
            count = min(SEGMENT, end - token)
            _convolve(bcx, weight, bias, out, token, count, width, taps, past)
            for t in range(count):
                if (positions[token + t] + 1) % block_size == 0:  # the end of a KV block
                    block = words[ARGS + 12] + slots[token + t] // block_size * (taps - 1) * row_bytes
                    _remember(past, t + 1, taps - 1, width, simd.pointer(block, dtype), 0)
            if token + count == end:
                num_back = min(count - 1, num_spare)
                _remember(past, count - num_back, num_back, width, state, num_spare - num_back)
            _remember(past, count, taps - 1, width, past, 0)  # the newest inputs are the past of what follows
        _remember(past, 0, taps - 1, width, state, num_spare)
        item = next_item(words, mirrored)

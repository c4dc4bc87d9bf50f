"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution.

Each writes only what belongs to its own sequence, so sequences of a ragged batch run side by side.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import CACHE_FIELDS, DTYPE, FLOAT, Group, OfKind, Own, kernel, last_first
from batchgen.kernels.cpu.compiled.rows import mean_square
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES, SEGMENT

# As in ``interface`` and ``inputs``. A key's dimensions that lie side by side are an element.
HEADS = Group("Heads", "num_heads head_dim q_norm k_norm eps", q_norm=DTYPE, k_norm=DTYPE, eps=FLOAT)
CACHE = Group("Cache", CACHE_FIELDS, keys=OfKind(2), values=OfKind(1), scales=F32)


@simd.inline
def _norm_and_rotate(x, start, weight, is_normed, eps, cosine, sine, angle, head_dim, head):
    """RMS norm of one head, if ``is_normed``, then half-split rotation, into float32 ``head`` [head_dim]."""
    scale = simd.splat(F32(1.0))
    if is_normed:
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
    """Round one head's float32 values to the element type of ``out``, over a scale where there are ``scales``.

    Returns whether what is kept is finite.
    """
    by, zero = simd.splat(F32(1.0)), simd.splat(F32(0.0))
    odd = zero
    if simd.address(scales):
        scale = _scale_of(head, head_dim)
        scales[place] = scale
        by = odd = simd.splat(scale)
    for i in range(0, head_dim, LANES):
        v = simd.load_some(head, i, head_dim - i)
        if simd.address(scales):
            v = simd.div(v, by)
        else:
            odd = simd.fma(simd.round_like(out, v), zero, odd)
        simd.store_some(out, start + i, v, head_dim - i)
    return simd.all_equal(odd, odd)


@simd.inline
def _fill(head, head_dim, value):
    for i in range(0, head_dim, LANES):
        simd.store_some(head, i, simd.splat(value), head_dim - i)


@kernel(
    **{"qkv": DTYPE, "heads": HEADS, "cosine": F32, "sine": F32, "positions": np.int32, "slots": np.int64},
    **{"q_out": F32, "head": Own(F32), "scale": FLOAT, "cache": CACHE},
)
def rope_and_cache(token, qkv, columns, heads, cosine, sine, positions, slots, q_out, head, scale, cache):
    """Queries, keys and values of a token, as in ``Kernels.rope_and_cache``; ``columns`` is how wide ``qkv`` is."""
    _, values, scales, num_kv_heads, width, block_size, lanes, pack = cache
    num_heads, head_dim, q_weight, k_weight, eps = heads
    is_normed, rounded_at = simd.address(q_weight) != 0, simd.address(head) + 4 * width
    rounded, rounded_units = simd.pointer(rounded_at, values), simd.pointer(rounded_at, cache.keys)
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
            cache.keys[to + i * lanes] = rounded_units[i]


@simd.inline
def _load_conv_state(state, position, width, taps, past):
    """The inputs of the ``taps - 1`` positions before ``position`` into float32 ``past``; zero before the start."""
    for i in range(taps - 1):
        known = position - (taps - 1) + i >= 0
        for channel in range(0, width, LANES):
            u = simd.load_some(state, i * width + channel, width - channel) if known else simd.splat(F32(0.0))
            simd.store_some(past, i * width + channel, u, width - channel)


@simd.inline
def _take_input(bcx, token, end, width, channel, past, to):
    """A vector of the input u = B * x of a token, rounded as the model's dtype stores it; zero from ``end`` on."""
    left, u = width - channel, simd.splat(F32(0.0))
    if token < end:
        row = token * 3 * width + channel
        b, x = simd.load_some(bcx, row, left), simd.load_some(bcx, row + 2 * width, left)
        u = simd.round_like(bcx, simd.mul(b, x))
    simd.store_some(past, to + channel, u, left)


@simd.inline
def _convolve(bcx, weight, bias, out, token, count, end, width, taps, ahead, past):
    """``count`` tokens from ``token`` on of a sequence up to ``end``, each with the inputs of ``ahead`` behind it.

    ``past`` holds earlier inputs first, then receives those of the last tokens.
    """
    for t in range(count):
        row = (token + t) * 3 * width
        for channel in range(0, width, LANES):
            left = width - channel
            at = t * width + channel
            _take_input(bcx, token + t + ahead, end, width, channel, past, (t + taps - 1) * width)
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


@last_first  # prompts stand last in a step, and long items come first for the threads' balance
@kernel(
    **{"bcx": DTYPE, "weight": F32, "bias": F32, "states": DTYPE, "cu_seqlens": np.int32, "conv_slots": np.int32},
    **{"positions": np.int32, "out": DTYPE, "past": Own(F32), "blocks": DTYPE, "slots": np.int64},
)
def short_conv(
    item,
    bcx,
    weight,
    bias,
    states,
    cu_seqlens,
    conv_slots,
    positions,
    out,
    width,
    taps,
    ahead,
    past,
    blocks,
    slots,
    block_size,
):
    """The convolution of a sequence, as in ``Kernels.short_conv``; ``states`` [slots] and ``blocks`` [KV blocks] hold
    ``taps - 1`` rows each.

    A row is processed from end to end, not in strips of channels: memory is read in its order, twice as fast. With
    ``ahead``, the taps reach so many tokens further, of a whole text, and blocks are left alone.
    """
    first, end = cu_seqlens[item], cu_seqlens[item + 1]
    state_size = (taps - 1) * width
    state = simd.shifted(states, conv_slots[item] * state_size)
    _load_conv_state(state, positions[first], width, taps, past)
    for t in range(ahead):
        for channel in range(0, width, LANES):
            _take_input(bcx, first + t, end, width, channel, past, (taps - 1 - ahead + t) * width)
    for token in range(first, end, SEGMENT):
        count = min(SEGMENT, end - token)
        _convolve(bcx, weight, bias, out, token, count, end, width, taps, ahead, past)
        for t in range(0 if ahead else count):
            if (positions[token + t] + 1) % block_size == 0:  # the end of a KV block
                block = simd.shifted(blocks, slots[token + t] // block_size * state_size)
                _store_conv_state(past, t + 1, taps - 1, width, block)
        _store_conv_state(past, count, taps - 1, width, past)  # the newest inputs are the past of what follows
    _store_conv_state(past, 0, taps - 1, width, state)

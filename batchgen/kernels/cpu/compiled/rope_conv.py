"""Kernels that touch a sequence's state: rotary embedding with the KV cache write, and the short convolution.

Each writes only what belongs to its own sequence, so sequences of a ragged batch run side by side.
"""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, Own, kernel, last_first
from batchgen.kernels.cpu.compiled.heads import CACHE, HEADS, ROTARY, rotate_query, scatter_keys, take_key_and_value
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES, ROPE_TOKENS, SEGMENT


@kernel(
    **{"qkv": DTYPE, "heads": HEADS, "rotary": ROTARY, "positions": np.int32, "slots": np.int64, "q_out": F32},
    **{"own": Own(F32), "cache": CACHE},
)
def rope_and_cache(item, qkv, columns, heads, rotary, positions, slots, q_out, own, first, num_tokens, cache):
    """``Kernels.rope_and_cache`` for the tokens from ``first`` to ``num_tokens``.

    One item is one KV head of ``ROPE_TOKENS`` tokens: neighbours write to the same cache lines, which would be fetched
    again for each single key. ``columns`` is the width of ``qkv``.
    """
    group, begin = heads.num_heads // cache.num_kv_heads, first + item // cache.num_kv_heads * ROPE_TOKENS
    head, count = item % cache.num_kv_heads, min(ROPE_TOKENS, num_tokens - begin)
    for i in range(count):
        token = begin + i
        row, angle = token * columns, positions[token] * (heads.head_dim // 2)
        for h in range(head * group, (head + 1) * group):
            rotate_query(qkv, row, h, heads, rotary, angle, own, q_out, (token * heads.num_heads + h) * cache.width)
        take_key_and_value(qkv, row, head, heads, rotary, angle, slots[token], own, i, cache)
    scatter_keys(own, 0, count, simd.shifted(slots, begin), head, heads.head_dim, cache)


@simd.inline
def _load_conv_state(state, position, width, taps, past):
    """Load the inputs of the ``taps - 1`` positions before ``position`` into ``past``; zero before position 0."""
    for i in range(taps - 1):
        is_inside = position - (taps - 1) + i >= 0
        for channel in range(0, width, LANES):
            u = simd.load_some(state, i * width + channel, width - channel) if is_inside else simd.splat(F32(0.0))
            simd.store_some(past, i * width + channel, u, width - channel)


@simd.inline
def _take_input(bcx, token, end, width, channel, past, to):
    """Write a vector of a token's input u = B * x, rounded to the model's dtype, to ``past``; zero from ``end``."""
    left, u = width - channel, simd.splat(F32(0.0))
    if token < end:
        row = token * 3 * width + channel
        b, x = simd.load_some(bcx, row, left), simd.load_some(bcx, row + 2 * width, left)
        u = simd.round_like(bcx, simd.mul(b, x))
    simd.store_some(past, to + channel, u, left)


@simd.inline
def _convolve(bcx, weight, bias, out, token, count, end, width, taps, ahead, past):
    """Convolve ``count`` tokens, starting at ``token``; taps reach ``ahead`` tokens further, with zeros from ``end``.

    ``past`` holds the earlier inputs that the first token needs; the next inputs are appended.
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
    """Store ``num_rows`` inputs, starting at row ``first`` of ``past``, in ``state``."""
    for i in range(0, num_rows * width, LANES):
        left = num_rows * width - i
        simd.store_some(state, i, simd.load_some(past, first * width + i, left), left)


@last_first  # prompts are last in a step; long items should come first, to balance the threads
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
    """``Kernels.short_conv`` for one sequence; each state in ``states`` and ``blocks`` has ``taps - 1`` rows.

    A row is processed from end to end: memory is read in order, twice as fast as in strips of channels. If ``ahead`` is
    not 0 (the model is not causal), taps reach ``ahead`` tokens further, and blocks stay unchanged.
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

"""Queries, keys and values of a token, head by head: normed, rotated, and written where attention reads them.

``rope_and_cache`` does this for prompts, ``attention`` for a sequence's only token, whose keys' lines it reads anyway.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import CACHE_FIELDS, DTYPE, FLOAT, STORED, Group
from batchgen.kernels.cpu.compiled.rows import mean_square
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES

# As in ``interface`` and ``inputs``.
CACHE = Group("Cache", CACHE_FIELDS, keys=STORED, values=STORED, scales=F32)
HEADS = Group("Heads", "num_heads head_dim q_norm k_norm eps scale", q_norm=DTYPE, k_norm=DTYPE, eps=FLOAT, scale=FLOAT)
ROTARY = Group("Rotary", "cosines sines", cosines=F32, sines=F32)


@simd.inline
def _normed(x, at, count, weight, i, scale):
    """The vector of a head at ``x[at]``: unchanged, or times ``scale`` and ``weight[i:]`` if there are weights."""
    v = simd.load_some(x, at, count)
    if simd.address(weight):
        v = simd.round_like(x, simd.mul(v, scale))
        v = simd.round_like(x, simd.mul(v, simd.load_some(weight, i, count)))
    return v


@simd.inline
def _norm_and_rotate(x, start, weight, eps, rotary, angle, head_dim, head):
    """RMS norm of one head, if there are weights, then half-split rotation, into float32 ``head`` [head_dim]."""
    scale, half = simd.splat(F32(1.0)), head_dim // 2
    if simd.address(weight):
        scale = simd.splat(F32(1.0) / F32(math.sqrt(mean_square(x, start, head_dim) + eps)))
    for i in range(0, half, LANES):
        left = half - i
        c, s = simd.load_some(rotary.cosines, angle + i, left), simd.load_some(rotary.sines, angle + i, left)
        a = _normed(x, start + i, left, weight, i, scale)
        b = _normed(x, start + half + i, left, weight, half + i, scale)
        simd.store_some(head, i, simd.sub(simd.mul(a, c), simd.mul(b, s)), left)
        simd.store_some(head, half + i, simd.add(simd.mul(b, c), simd.mul(a, s)), left)


@simd.inline
def rotate_query(qkv, row, number, heads, rotary, angle, own, out, to):
    """Write query head ``number`` of the token at ``qkv[row]``, scaled, to ``out[to]``; zero up to the width.

    ``angle`` is where the token's position begins in the tables; ``own`` is scratch memory.
    """
    head_dim, scale = heads.head_dim, simd.splat(heads.scale)
    _norm_and_rotate(qkv, row + number * head_dim, heads.q_norm, heads.eps, rotary, angle, head_dim, own)
    for i in range(0, head_dim, LANES):
        simd.store(out, to + i, simd.mul(simd.load_some(own, i, head_dim - i), scale))


@simd.inline
def _scale_of(x, count):
    """The largest magnitude in ``x[:count]``, divided by 127; NaN if an element is not finite."""
    zero = simd.splat(F32(0.0))
    largest, spoilt = zero, zero
    for i in range(0, count, LANES):
        v = simd.load_some(x, i, count - i)
        largest = simd.maximum(largest, simd.absolute(v))
        spoilt = simd.fma(v, zero, spoilt)
    return simd.max_lanes(largest) / F32(127.0) + simd.sum_lanes(spoilt)


@simd.inline
def _keep(head, head_dim, out, start, scales, place):
    """Round a head, divided by its scale if there are ``scales``, into ``out``; returns whether all are finite."""
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


@simd.inline
def _rounded_keys(own, cache):
    """Pointer to the keys in scratch memory ``own``, ``width`` elements each, in the cache's type."""
    return simd.pointer(simd.address(own) + 4 * cache.width, cache.keys)


@simd.inline
def take_key_and_value(qkv, row, number, heads, rotary, angle, slot, own, waiting, cache):
    """Cache the value of KV head ``number``; put its key in scratch memory as key ``waiting``. See ``rotate_query``."""
    head_dim, width, scales = heads.head_dim, cache.width, cache.scales
    place, offset = slot // cache.block_size * cache.num_kv_heads + number, slot % cache.block_size
    start = row + (heads.num_heads + cache.num_kv_heads + number) * head_dim
    scale_at, value_at = 2 * place * cache.lanes + offset, (place * cache.block_size + offset) * width
    for i in range(0, head_dim, LANES):
        simd.store_some(own, i, simd.load_some(qkv, start + i, head_dim - i), head_dim - i)
    is_finite = _keep(own, head_dim, cache.values, value_at, scales, scale_at + cache.lanes)
    start -= cache.num_kv_heads * head_dim
    _norm_and_rotate(qkv, start, heads.k_norm, heads.eps, rotary, angle, head_dim, own)
    if not is_finite:
        _fill(own, head_dim, F32(0.0))
        _keep(own, head_dim, cache.values, value_at, scales, scale_at + cache.lanes)
        _fill(own, head_dim, F32(np.nan))
    _keep(own, head_dim, _rounded_keys(own, cache), waiting * width, scales, scale_at)


@simd.inline
def scatter_keys(own, waiting, count, slots, number, head_dim, cache):
    """Copy ``count`` keys of KV head ``number``, from key ``waiting``, dimension by dimension to their ``slots``.

    Dimensions that are adjacent in the cache are copied as one unit.
    """
    units, targets = simd.units(_rounded_keys(own, cache)), simd.units(cache.keys)
    apart, first = cache.width // cache.pack, 0
    while first < count:
        slot = slots[first]
        offset, last = slot % cache.block_size, first + 1
        while last < count and slots[last] == slot + last - first and offset + last - first < cache.block_size:
            last += 1
        to = (slot // cache.block_size * cache.num_kv_heads + number) * apart * cache.lanes + offset
        for i in range(head_dim // cache.pack):
            for j in range(last - first):
                targets[to + i * cache.lanes + j] = units[(waiting + first + j) * apart + i]
        first = last


@simd.inline
def spread_key(own, waiting, head_dim, cache, out):
    """Write a key from scratch memory to the first of ``LANES`` positions of ``out``; the others stay unchanged."""
    units, targets, size = simd.units(_rounded_keys(own, cache)), simd.units(out), cache.width // cache.pack
    for i in range(head_dim // cache.pack):
        targets[i * LANES] = units[waiting * size + i]

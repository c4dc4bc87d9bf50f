"""Softmax of one row of attention's scores, tile by tile, with a running maximum."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES


@simd.inline
def _weigh(scores, weights, at, offset, hidden, visible):
    """Probabilities of one vector of scores, zero but for the lanes from ``hidden`` to ``visible``."""
    zero = simd.splat(F32(0.0))
    p = simd.exp2(weights, simd.sub(simd.load(scores, at), offset))
    p = simd.keep_lanes(zero, simd.keep_lanes(p, zero, visible), hidden)
    simd.store(weights, at, p)
    return p


@simd.inline
def _clear(weights, start, end):
    for j in range(start, end, LANES):
        simd.store(weights, j, simd.splat(F32(0.0)))


@simd.inline
def softmax_row(scores, weights, start, first, seen, visible, count, peak):
    """Turn the scores (base-2 logarithms) from ``seen`` to ``visible`` into unnormalized probabilities ``weights``.

    Those from ``first`` to ``seen`` and from ``visible`` to ``count`` are zero. Returns the new running maximum, the
    factor by which earlier sums shrink, and this tile's sum; a row that sees nothing of the tile keeps its own.
    """
    if seen >= visible:
        _clear(weights, start + first, start + count)
        return peak, F32(1.0), F32(0.0)
    lowest, zero = simd.splat(F32(-np.inf)), simd.splat(F32(0.0))
    best, total = lowest, zero
    low, whole = seen - seen % LANES, visible - visible % LANES
    if low < seen:
        simd.store(scores, start + low, simd.keep_lanes(lowest, simd.load(scores, start + low), seen - low))
    for j in range(low, whole, LANES):
        best = simd.maximum(best, simd.load(scores, start + j))
    if whole < visible:
        best = simd.maximum(best, simd.keep_lanes(simd.load(scores, start + whole), lowest, visible - whole))
    new_peak = max(peak, simd.max_lanes(best))
    shrink = simd.lane(simd.exp2(scores, simd.splat(peak - new_peak)), 0)
    offset = simd.splat(new_peak)
    _clear(weights, start + first, start + low)
    if low < seen:
        total = _weigh(scores, weights, start + low, offset, seen - low, visible - low)
        low += LANES
    for j in range(low, whole, LANES):
        p = simd.exp2(weights, simd.sub(simd.load(scores, start + j), offset))
        total = simd.add(total, p)
        simd.store(weights, start + j, p)
    if low <= whole < visible:
        total = simd.add(total, _weigh(scores, weights, start + whole, offset, 0, visible - whole))
    _clear(weights, start + -(-visible // LANES) * LANES, start + count)
    return new_peak, shrink, simd.sum_lanes(total)

"""Query rows of attention in the scratch memory of a worker: gathered, weighed and written.

Row r of a block is query head ``r % group`` of its token ``r // group``; the next block begins ``stride`` rows later.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.attention_tiles import MAX_TOGETHER
from batchgen.kernels.cpu.compiled.simd import BYTES, F32

GROUP = layout.NUM_STREAMS * layout.CHUNK  # positions whose values are added side by side
# Of one worker: queries and sums [rows, width], scores and weights [SCORE_ROWS, SCORE_STRIDE], copied values
# [NUM_STREAMS, CHUNK, width], scales [MAX_HEADS, 2, TILE], peak and total [rows], tiles in memory.
Scratch = namedtuple("Scratch", "rows_q sums scores weights copies scales peak total state")


@simd.jit
def padded(num_rows):
    """The height of the tile that computes ``num_rows`` rows, at most ``MAX_QUERIES``."""
    return num_rows if num_rows <= MAX_TOGETHER else layout.MAX_QUERIES


@simd.jit
def stride(num_rows):
    """The number of rows that tiles write for a block of ``num_rows``; the next block's rows begin after them."""
    rest = num_rows % layout.MAX_QUERIES
    return num_rows - rest + (padded(rest) if rest else 0)


@simd.inline
def from_row(scratch, row, width):
    """The scratch memory of a block whose rows begin at ``row``."""
    rows_q, sums = simd.shifted(scratch.rows_q, row * width), simd.shifted(scratch.sums, row * width)
    peak, total = simd.shifted(scratch.peak, row), simd.shifted(scratch.total, row)
    parts = scratch.scores, scratch.weights, scratch.copies, scratch.scales
    return Scratch(rows_q, sums, *parts, peak, total, scratch.state)


@simd.inline
def of_head(scratch, number, apart, tall, width):
    """The scratch memory of KV head ``number``; heads are ``apart`` rows from each other, scores ``tall`` rows."""
    mine, at = from_row(scratch, number * apart, width), number * tall * layout.SCORE_STRIDE
    scores, weights = simd.shifted(mine.scores, at), simd.shifted(mine.weights, at)
    scales = simd.shifted(mine.scales, number * 2 * layout.TILE)
    return Scratch(mine.rows_q, mine.sums, scores, weights, mine.copies, scales, mine.peak, mine.total, mine.state)


@simd.jit
def divide_scratch(rows_q, num_rows, width, values):
    """Divide a worker's memory at ``rows_q`` for ``num_rows`` rows; copies have the type of ``values``."""
    sums = simd.address(rows_q) + 4 * num_rows * width
    scores = sums + 4 * num_rows * width
    weights = scores + 4 * layout.SCORE_ROWS * layout.SCORE_STRIDE
    copies = weights + 4 * layout.SCORE_ROWS * layout.SCORE_STRIDE
    scales = copies + 4 * layout.NUM_STREAMS * layout.CHUNK * width
    peak = scales + 4 * layout.MAX_HEADS * 2 * layout.TILE
    return Scratch(
        rows_q,
        simd.pointer(sums, F32),
        simd.pointer(scores, F32),
        simd.pointer(weights, rows_q),
        simd.pointer(copies, values),
        simd.pointer(scales, F32),
        simd.pointer(peak, F32),
        simd.pointer(peak + 4 * num_rows, F32),
        simd.pointer(peak + 8 * num_rows, BYTES),
    )


@simd.inline
def clear(num_rows, width, scratch):
    """Clear sums, peaks and totals of a block's query rows, and the queries of the rows that pad its last tile."""
    zero = simd.splat(F32(0.0))
    for r in range(stride(num_rows)):
        for i in range(r * width, (r + 1) * width, layout.LANES):
            simd.store(scratch.sums, i, zero)
            if r >= num_rows:
                simd.store(scratch.rows_q, i, zero)
        scratch.peak[r], scratch.total[r] = F32(-np.inf), F32(0.0)


@simd.jit
def gather_queries(num_rows, group, q, source, num_heads, width, scratch):
    """Copy the query rows of one KV head together and clear their sums.

    Row r is query head ``r % group`` of the block's token ``r // group``; rows that pad the last tile are zero.
    """
    clear(num_rows, width, scratch)
    for r in range(num_rows):
        at = (source + (r // group) * num_heads + r % group) * width
        for i in range(0, width, layout.LANES):
            simd.store(scratch.rows_q, r * width + i, simd.load(q, at + i))


@simd.inline
def _weigh(scores, weights, at, offset, hidden, visible):
    """Probabilities of one vector of scores, zero except in the lanes from ``hidden`` to ``visible``."""
    zero = simd.splat(F32(0.0))
    p = simd.exp2(weights, simd.sub(simd.load(scores, at), offset))
    p = simd.keep_lanes(zero, simd.keep_lanes(p, zero, visible), hidden)
    simd.store(weights, at, p)
    return p


@simd.inline
def _clear(weights, start, end):
    for j in range(start, end, layout.LANES):
        simd.store(weights, j, simd.splat(F32(0.0)))


@simd.inline
def softmax_row(scores, weights, start, first, seen, visible, count, peak):
    """Turn the scores (base-2 logarithms) from ``seen`` to ``visible`` into unnormalized probabilities ``weights``.

    Those from ``first`` to ``seen`` and from ``visible`` to ``count`` are zero. Returns the new running maximum, the
    factor by which earlier sums shrink, and this tile's sum: ``peak``, 1 and 0 if the row sees nothing of the tile.
    """
    if seen >= visible:
        _clear(weights, start + first, start + count)
        return peak, F32(1.0), F32(0.0)
    lowest, zero = simd.splat(F32(-np.inf)), simd.splat(F32(0.0))
    best, total = lowest, zero
    low, whole = seen - seen % layout.LANES, visible - visible % layout.LANES
    if low < seen:
        simd.store(scores, start + low, simd.keep_lanes(lowest, simd.load(scores, start + low), seen - low))
    for j in range(low, whole, layout.LANES):
        best = simd.maximum(best, simd.load(scores, start + j))
    if whole < visible:
        best = simd.maximum(best, simd.keep_lanes(simd.load(scores, start + whole), lowest, visible - whole))
    new_peak = max(peak, simd.max_lanes(best))
    shrink = simd.lane(simd.exp2(scores, simd.splat(peak - new_peak)), 0)
    offset = simd.splat(new_peak)
    _clear(weights, start + first, start + low)
    if low < seen:
        total = _weigh(scores, weights, start + low, offset, seen - low, visible - low)
        low += layout.LANES
    for j in range(low, whole, layout.LANES):
        p = simd.exp2(weights, simd.sub(simd.load(scores, start + j), offset))
        total = simd.add(total, p)
        simd.store(weights, start + j, p)
    if low <= whole < visible:
        total = simd.add(total, _weigh(scores, weights, start + whole, offset, 0, visible - whole))
    _clear(weights, start + -(-visible // layout.LANES) * layout.LANES, start + count)
    return new_peak, shrink, simd.sum_lanes(total)


@simd.inline
def lowest(position, window):
    """The first position that the token at ``position`` attends to."""
    return max(position + 1 - window, 0) if window else 0


@simd.jit
def weigh_rows(first, rows, group, start, window, tile, begin, tile_end, width, scratch, has_scales):
    """Turn the scores of ``rows`` query rows, starting at ``first``, into probabilities, and rescale their sums."""
    sums, scores, weights, scales = scratch.sums, scratch.scores, scratch.weights, scratch.scales
    peak, total = scratch.peak, scratch.total
    weighted = -(-(tile_end - tile) // layout.CHUNK) * layout.CHUNK
    for r in range(first, first + rows):
        position = start + r // group
        visible = max(min(position + 1, tile_end) - tile, 0)
        seen = min(max(lowest(position, window) - tile, 0), visible)
        at, whole = (r - first) * layout.SCORE_STRIDE, seen - seen % layout.LANES
        if has_scales:
            simd.multiply_row(scores, at + whole, visible - whole, scales, whole)
        peak[r], shrink, added = softmax_row(scores, weights, at, begin - tile, seen, visible, weighted, peak[r])
        if has_scales:
            simd.multiply_row(weights, at + whole, visible - whole, scales, layout.TILE + whole)
        total[r] = total[r] * shrink + added
        if shrink != F32(1.0):
            by = simd.splat(shrink)
            for i in range(r * width, (r + 1) * width, layout.LANES):
                simd.store(sums, i, simd.mul(simd.load(sums, i), by))


@simd.inline
def _sigmoid(scratch, logit):
    x = simd.splat(-logit)
    return F32(1.0) / (F32(1.0) + simd.lane(simd.exp(scratch, x), 0))


@simd.jit
def write_rows(num_rows, group, target, num_heads, head_dim, width, least, scratch, gates, out):
    """Write sums / totals, gated and rounded (zero below ``least``), to ``out`` [tokens, num_heads, head_dim]."""
    for r in range(num_rows):
        place = target + (r // group) * num_heads + r % group
        scale = F32(1.0) / scratch.total[r]
        if simd.address(gates.logits):
            at = (place // num_heads + 1) * gates.columns - num_heads + place % num_heads
            scale *= _sigmoid(scratch.scores, simd.lane(simd.load_part(gates.logits, at, 1), 0))
        by = simd.splat(scale)
        for i in range(0, head_dim, layout.LANES):
            v = simd.drop_below(simd.mul(simd.load(scratch.sums, r * width + i), by), least)
            simd.store_some(out, place * head_dim + i, v, head_dim - i)

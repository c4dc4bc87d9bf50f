"""Experts: the routing of tokens, the sorting of rows by expert, and the weighted sum of outputs.

The number of rows per expert is only in memory: launches depend only on the number of rows, and can be replayed.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, FLOAT, Group, Own, kernel
from batchgen.kernels.cpu.compiled.matmul import SUMS
from batchgen.kernels.cpu.compiled.matmul_tiles import TO_SUMS, multiply
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES, MAX_ROWS, ROWS_PER_ITEM, SEGMENT_WORDS, TILE_COLUMNS

ROUTING = Group("Routing", "is_softmax is_normalized eps scale", eps=FLOAT, scale=FLOAT)


@kernel(x=DTYPE, bias=F32, ids=np.int32, weights=F32, sums=Own(F32), routing=ROUTING)
def route(item, x, packed, strip_size, bias, ids, weights, sums, rows, width, experts, active, routing):
    """Write experts' ids and weights [rows, active] for x [rows, width]; an item is up to ``MAX_ROWS`` rows.

    ``packed`` is the address of a float32 ``linear.PackedWeight``; ``bias`` [experts] may be 0; ``sums`` points to
    ``layout.routing_scratch_floats`` words. See ``interface.Routing``.
    """
    num_items, num_panels = -(-rows // MAX_ROWS), -(-experts // TILE_COLUMNS)
    scores = simd.shifted(sums, num_panels * SUMS)
    first, end = item * rows // num_items, (item + 1) * rows // num_items
    for panel in range(num_panels):
        here = packed + panel * 4 * TILE_COLUMNS * width
        how = (TO_SUMS, simd.shifted(sums, panel * SUMS), x)
        w, steps = simd.pointer(here, F32), width // 2
        multiply(end - first, x, first * width, width, w, strip_size, steps, x, 0, 0, how, here, 0)
    for row in range(first, end):
        _score(simd.shifted(sums, (row - first) * TILE_COLUMNS), experts, routing.is_softmax, scores)
        at = row * active
        total = _choose(scores, bias, experts, active, simd.shifted(ids, at), simd.shifted(weights, at))
        by = total + routing.eps if routing.is_normalized else F32(1.0)
        for place in range(at, at + active):
            weights[place] = weights[place] / by * routing.scale


@simd.inline
def _load_logits(logits, expert):
    return simd.load(logits, expert // TILE_COLUMNS * SUMS + expert % TILE_COLUMNS)


@simd.jit
def _score(logits, num_experts, is_softmax, scores):
    """Write the scores of one row (softmax or sigmoid) to ``scores``, from logits in tiles of sums."""
    zero, one, lowest = simd.splat(F32(0.0)), simd.splat(F32(1.0)), simd.splat(F32(-np.inf))
    best, total = lowest, zero
    if is_softmax:
        for i in range(0, num_experts, LANES):
            best = simd.maximum(best, simd.keep_lanes(_load_logits(logits, i), lowest, num_experts - i))
    largest = simd.splat(simd.max_lanes(best))
    for i in range(0, num_experts, LANES):
        v = _load_logits(logits, i)
        if is_softmax:
            v = simd.exp(scores, simd.sub(v, largest))
            total = simd.add(total, simd.keep_lanes(v, zero, num_experts - i))
        else:
            v = simd.div(one, simd.add(one, simd.exp(scores, simd.sub(zero, v))))
        simd.store(scores, i, v)
    if is_softmax:
        by = simd.splat(simd.sum_lanes(total))
        for i in range(0, num_experts, LANES):
            simd.store(scores, i, simd.div(simd.load(scores, i), by))


@simd.jit
def _choose(scores, bias, num_experts, num_active, ids, weights):
    """Write the ids of a row's experts, in ascending order, and their scores, whose sum is returned."""
    ranks = simd.shifted(scores, -(-num_experts // TILE_COLUMNS) * TILE_COLUMNS)
    for expert in range(num_experts):
        rank = scores[expert] + bias[expert] if simd.address(bias) else scores[expert]
        ranks[expert] = F32(-np.inf) if math.isnan(rank) else rank
    for _ in range(num_active):
        best, chosen = F32(-np.inf), -1
        for expert in range(num_experts):
            if ranks[expert] > best or (chosen < 0 and not math.isnan(ranks[expert])):
                best, chosen = ranks[expert], expert
        ranks[chosen] = F32(np.nan)  # NaN is never larger, so this expert is not chosen again
    total, at = F32(0.0), 0
    for expert in range(num_experts):
        if math.isnan(ranks[expert]):
            ids[at], weights[at] = expert, scores[expert]
            total += scores[expert]
            at += 1
    return total


@kernel(ids=np.int32, segments=np.int64, source=np.int64, place=np.int64, counts=np.int64)
def sort(_, ids, segments, source, place, counts, rows, num_active, num_experts):
    """Sort the (row, expert) pairs of ids [rows, active] by expert, as one item.

    ``source`` [pairs] gets the row of each sorted pair, ``place`` [rows, active] the sorted position of each pair.
    ``counts`` [experts] is scratch memory. ``segments`` is as in ``linear.Experts``.
    """
    for expert in range(num_experts):
        counts[expert] = 0
    for i in range(rows * num_active):
        counts[ids[i]] += 1
    num_segments, first = 0, 0
    for expert in range(num_experts):
        end = first + counts[expert]
        counts[expert] = first
        if end > first:
            at = 1 + SEGMENT_WORDS * num_segments
            segments[at], segments[at + 1], segments[at + 2] = expert, first, end
            num_segments += 1
        first = end
    segments[0] = num_segments
    for row in range(rows):
        for i in range(row * num_active, (row + 1) * num_active):
            at = counts[ids[i]]
            counts[ids[i]] = at + 1
            source[at] = row
            place[i] = at


@kernel(parts=DTYPE, place=np.int64, weights=F32, residual=DTYPE, out=DTYPE)
def add_up(item, parts, place, weights, residual, out, rows, width, num_active):
    """``out = residual + sum of weight * part``, summed in float32 in the order of a row's pairs, rounded once.

    Shapes: parts [pairs, width], place and weights [rows, active], residual and out [rows, width].
    """
    for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
        for i in range(0, width, LANES):
            total = simd.splat(F32(0.0))
            for pair in range(row * num_active, (row + 1) * num_active):
                part = simd.load_some(parts, place[pair] * width + i, width - i)
                total = simd.fma(part, simd.splat(weights[pair]), total)
            total = simd.add(total, simd.load_some(residual, row * width + i, width - i))
            simd.store_some(out, row * width + i, total, width - i)

"""Experts: which of them each token meets, whose rows each multiplies, and the weighted sum of what they give.

The number of rows that an expert multiplies is known only in memory, where ``matmul`` reads it: launches are the same
for every batch of as many rows, so that they can be repeated. A row's result depends on that row alone.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.matmul import SUMS
from batchgen.kernels.cpu.compiled.matmul_tiles import TO_SUMS, multiply
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, LANES, NUM_ITEMS, ROWS_PER_ITEM, SEGMENT_WORDS, TILE_COLUMNS


@simd.jit
def route(args, dtype):
    """Arguments: x [rows, width], panels of the float32 weight, float32 bias [experts] or 0, int32 ids and float32
    weights [rows, active], scratch (addresses), rows, width, experts, active, whether scores are softmax, whether
    weights are normalized, bits of eps and of the scale, elements of a strip; an item is as many rows as a tile has.

    See ``interface.Routing``.
    """
    x, panels, num_rows, width = simd.pointer(args[ARGS], dtype), args[ARGS + 1], args[ARGS + 6], args[ARGS + 7]
    num_experts, strip_size = args[ARGS + 8], args[ARGS + 14]
    num_panels = -(-num_experts // TILE_COLUMNS)
    worker = worker_number(args)
    mine = args[ARGS + 5] + 4 * worker * num_panels * (SUMS + 2 * TILE_COLUMNS)
    sums, scores = simd.pointer(mine, F32), simd.pointer(mine + 4 * num_panels * SUMS, F32)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        first, end = item * num_rows // args[NUM_ITEMS], (item + 1) * num_rows // args[NUM_ITEMS]
        for panel in range(num_panels):
            here = panels + panel * 4 * TILE_COLUMNS * width
            how = (TO_SUMS, simd.shifted(sums, panel * SUMS), x)
            w, steps = simd.pointer(here, F32), width // 2
            multiply(end - first, x, first * width, width, w, strip_size, steps, x, 0, 0, how, here, 0)
        for row in range(first, end):
            logits = simd.shifted(sums, (row - first) * TILE_COLUMNS)
            _score(logits, num_experts, args[ARGS + 10], scores)
            _choose(args, row, scores)
        item = next_item(args, worker)


@simd.inline
def _load_logits(logits, expert):
    return simd.load(logits, expert // TILE_COLUMNS * SUMS + expert % TILE_COLUMNS)


@simd.jit
def _score(logits, num_experts, is_softmax, scores):
    """Scores of one row, softmax or sigmoid, whose logits lie in tiles of sums."""
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
def _choose(args, row, scores):
    """Write the ids of a row's experts, in ascending order, and their weights."""
    bias, ids = simd.pointer(args[ARGS + 2], F32), simd.pointer(args[ARGS + 3], np.int32)
    weights, num_experts, num_active = simd.pointer(args[ARGS + 4], F32), args[ARGS + 8], args[ARGS + 9]
    ranks = simd.shifted(scores, -(-num_experts // TILE_COLUMNS) * TILE_COLUMNS)
    for expert in range(num_experts):
        rank = scores[expert] + bias[expert] if args[ARGS + 2] else scores[expert]
        ranks[expert] = F32(-np.inf) if math.isnan(rank) else rank
    for _ in range(num_active):
        best, chosen = F32(-np.inf), -1
        for expert in range(num_experts):
            if ranks[expert] > best or (chosen < 0 and not math.isnan(ranks[expert])):
                best, chosen = ranks[expert], expert
        ranks[chosen] = F32(np.nan)  # larger than nothing, so it is not chosen again
    total, at = F32(0.0), row * num_active
    for expert in range(num_experts):
        if math.isnan(ranks[expert]):
            ids[at], weights[at] = expert, scores[expert]
            total += scores[expert]
            at += 1
    by = total + simd.float_of_bits(args[ARGS + 12]) if args[ARGS + 11] else F32(1.0)
    for place in range(row * num_active, at):
        weights[place] = weights[place] / by * simd.float_of_bits(args[ARGS + 13])


@simd.jit
def sort(args):
    """Arguments: int32 ids [rows, active], int64 segments, source and place of each pair, scratch (addresses), rows,
    active, experts; one item.

    Pairs of a row and one of its experts are sorted by expert: ``source`` is the row of each, in that order, ``place``
    [rows, active] where a row's lie. For what ``segments`` are, see ``linear.Experts``.
    """
    ids, segments = simd.pointer(args[ARGS], np.int32), simd.pointer(args[ARGS + 1], np.int64)
    source, place = simd.pointer(args[ARGS + 2], np.int64), simd.pointer(args[ARGS + 3], np.int64)
    counts, num_rows, num_active = simd.pointer(args[ARGS + 4], np.int64), args[ARGS + 5], args[ARGS + 6]
    if next_item(args, worker_number(args)) == args[NUM_ITEMS]:
        return
    for expert in range(args[ARGS + 7]):
        counts[expert] = 0
    for i in range(num_rows * num_active):
        counts[ids[i]] += 1
    num_segments, first = 0, 0
    for expert in range(args[ARGS + 7]):
        end = first + counts[expert]
        counts[expert] = first
        if end > first:
            at = 1 + SEGMENT_WORDS * num_segments
            segments[at], segments[at + 1], segments[at + 2] = expert, first, end
            num_segments += 1
        first = end
    segments[0] = num_segments
    for row in range(num_rows):
        for i in range(row * num_active, (row + 1) * num_active):
            at = counts[ids[i]]
            counts[ids[i]] = at + 1
            source[at] = row
            place[i] = at


@simd.jit
def add_up(args, dtype):
    """Arguments: parts [pairs, width], int64 place and float32 weights [rows, active], residual and out [rows, width]
    (addresses), rows, width, active.

    ``out = residual + sum of weight * part``, summed in float32 in the order of a row's pairs, rounded once.
    """
    parts, place = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], np.int64)
    weights, residual = simd.pointer(args[ARGS + 2], F32), simd.pointer(args[ARGS + 3], dtype)
    out, rows, width = simd.pointer(args[ARGS + 4], dtype), args[ARGS + 5], args[ARGS + 6]
    num_active = args[ARGS + 7]
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
            for i in range(0, width, LANES):
                total = simd.splat(F32(0.0))
                for pair in range(row * num_active, (row + 1) * num_active):
                    part = simd.load_some(parts, place[pair] * width + i, width - i)
                    total = simd.fma(part, simd.splat(weights[pair]), total)
                total = simd.add(total, simd.load_some(residual, row * width + i, width - i))
                simd.store_some(out, row * width + i, total, width - i)
        item = next_item(args, worker)

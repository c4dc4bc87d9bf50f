"""Kernels that treat each token by itself: RMS norm, SwiGLU, masks, greedy argmax.

A row's result depends on that row alone and on a fixed order of additions, so it does not change with the batch.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.simd import BYTES, F32
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, DOT_GROUP, LANES, LEAST_QUANTIZED, NUM_ITEMS, ROWS_PER_ITEM

ALL_LANES = (1 << LANES) - 1


@simd.inline
def mean_square(x, start, width):
    """Mean of squares of ``x[start : start + width]``."""
    total = simd.splat(F32(0.0))
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        v = simd.load(x, start + i)
        total = simd.fma(v, v, total)
    if whole < width:
        v = simd.load_part(x, start + whole, width - whole)
        total = simd.fma(v, v, total)
    return simd.sum_lanes(total) / F32(width)


@simd.jit
def rms_norm(args, dtype):
    """Arguments: x [rows, width], weight [width], out [rows, width] (addresses), rows, width, bits of eps, residual
    [rows, width] (address or 0).
    """
    x, weight = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], dtype)
    out, rows, width = simd.pointer(args[ARGS + 2], dtype), args[ARGS + 3], args[ARGS + 4]
    eps, added, residual = simd.float_of_bits(args[ARGS + 5]), args[ARGS + 6], simd.pointer(args[ARGS + 6], dtype)
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
            start = row * width
            scale = simd.splat(F32(1.0) / F32(math.sqrt(mean_square(x, start, width) + eps)))
            for i in range(0, width, LANES):
                rest = width - i
                v = simd.round_like(x, simd.mul(simd.load_some(x, start + i, rest), scale))
                v = simd.mul(v, simd.load_some(weight, i, rest))
                if added:
                    v = simd.add(simd.round_like(x, v), simd.load_some(residual, start + i, rest))
                simd.store_some(out, start + i, v, rest)
        item = next_item(args, worker)


@simd.jit
def take_rows(args, dtype, stored):
    """Arguments: x [rows, width], int64 rows to take, out [taken, width] (addresses), width; one item is a row."""
    x, out = simd.pointer(args[ARGS], stored), simd.pointer(args[ARGS + 2], dtype)
    taken, width = simd.pointer(args[ARGS + 1], np.int64), args[ARGS + 3]
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        source, target = taken[item] * width, item * width
        for i in range(width):
            simd.copy_element(out, target + i, x, source + i)
        item = next_item(args, worker)


@simd.jit
def embedding_lookup_packed(args, dtype, stored):
    """Arguments: panels, int64 rows to take, out [taken, width] (addresses), width, inputs that lie side by side.

    Where the number of a row and an input is: see ``panels``. One item is a row.
    """
    panels, out = simd.pointer(args[ARGS], stored), simd.pointer(args[ARGS + 2], dtype)
    taken, width, unit = simd.pointer(args[ARGS + 1], np.int64), args[ARGS + 3], args[ARGS + 4]
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        row, target = taken[item], item * width
        first = row // LANES * LANES * width + row % LANES * unit
        for i in range(0, width, unit):
            for j in range(unit):
                simd.copy_element(out, target + i + j, panels, first + i * LANES + j)
        item = next_item(args, worker)


@simd.jit
def quantize(args, dtype):
    """Arguments: x [rows, width], bytes out [rows, groups * DOT_GROUP], float32 scales and int32 shifts [rows, groups]
    (addresses), width, groups, the largest integer, what weights are shifted by; see ``quantize.quantize_rows``.
    """
    x, out = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], BYTES)
    scales, shifts = simd.pointer(args[ARGS + 2], F32), simd.pointer(args[ARGS + 3], np.int32)
    width, groups, most, shift = args[ARGS + 4], args[ARGS + 5], F32(args[ARGS + 6]), args[ARGS + 7]
    zero = simd.splat(F32(0.0))
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        row, group = item // groups, item % groups
        start, end = row * width, min(width, (group + 1) * DOT_GROUP)
        best, odd, total = zero, zero, zero
        for i in range(group * DOT_GROUP, end, LANES):
            v = simd.load_some(x, start + i, end - i)
            best = simd.maximum(best, simd.absolute(v))
            odd = simd.fma(v, zero, odd)  # NaN if any input is not finite
        largest = simd.max_lanes(best)
        by = simd.splat(F32(0.0) if largest < LEAST_QUANTIZED else most / largest)
        for i in range(group * DOT_GROUP, (group + 1) * DOT_GROUP, LANES):
            q = zero
            if i < end:
                q = simd.nearest(simd.mul(simd.load_some(x, start + i, end - i), by))
            total = simd.add(total, q)
            simd.store_bytes(out, row * groups * DOT_GROUP + i, q)
        scales[item] = largest / most + simd.sum_lanes(odd)
        shifts[item] = -shift * np.int64(simd.sum_lanes(total))
        item = next_item(args, worker)


@simd.jit
def swiglu(args, dtype):
    """Arguments: gate_up [rows, 2 * width], out [rows, width] (addresses), rows, width."""
    gate_up, out = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], dtype)
    rows, width = args[ARGS + 2], args[ARGS + 3]
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
            for i in range(0, width, LANES):
                at, rest = 2 * row * width + i, width - i
                gate, up = simd.load_some(gate_up, at, rest), simd.load_some(gate_up, at + width, rest)
                simd.store_some(out, row * width + i, simd.silu_mul(out, gate, up), rest)
        item = next_item(args, worker)


@simd.jit
def row_max(x, start, width):
    """Largest of ``x[start : start + width]``; NaN where one is NaN."""
    lowest = simd.splat(F32(-np.inf))
    best, odd = lowest, lowest
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        v = simd.load(x, start + i)
        best, odd = simd.maximum(best, v), simd.nan_or(v, odd)
    if whole < width:
        v = simd.keep_lanes(simd.load_part(x, start + whole, width - whole), lowest, width - whole)
        best, odd = simd.maximum(best, v), simd.nan_or(v, odd)
    return simd.max_lanes(best) if simd.all_equal(odd, odd) else F32(np.nan)


@simd.jit
def _first_equal(x, start, width, value):
    """Index of the first element equal to ``value``; -1 where there is none, as for NaN."""
    wanted, other = simd.splat(value), simd.splat(F32(np.nan))
    for i in range(0, width, LANES):
        count = min(LANES, width - i)
        if count == LANES:
            v = simd.load(x, start + i)
        else:
            v = simd.keep_lanes(simd.load_part(x, start + i, count), other, count)
        if simd.any_equal(v, wanted):
            j = 0
            while simd.lane(v, j) != value:
                j += 1
            return i + j
    return -1


@simd.jit
def argmax(args, dtype):
    """Arguments: x [rows, width], out int64 [rows] (addresses), width."""
    x, out = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], np.int64)
    width = args[ARGS + 2]
    worker = worker_number(args)
    row = next_item(args, worker)
    while row < args[NUM_ITEMS]:
        out[row] = _first_equal(x, row * width, width, row_max(x, row * width, width))
        row = next_item(args, worker)


@simd.jit
def mask(args, dtype):
    """Arguments: x [rows, width], int64 rows to mask, int32 bits [masked, words] (addresses), width, words of bits.

    One item is a row to mask; 16 tokens that are all allowed are not read.
    """
    x, masked = simd.pointer(args[ARGS], dtype), simd.pointer(args[ARGS + 1], np.int64)
    bits, width, halves = simd.pointer(args[ARGS + 2], np.uint16), args[ARGS + 3], 2 * args[ARGS + 4]
    worker = worker_number(args)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        start = masked[item] * width
        for i in range(0, width, LANES):
            allowed = np.int64(bits[item * halves + i // LANES])
            if allowed != ALL_LANES:
                simd.forbid(x, start + i, allowed, width - i)
        item = next_item(args, worker)

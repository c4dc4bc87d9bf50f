"""Kernels that compute each row separately: RMS norm, scaling, copies, masks, greedy argmax.

A row's result depends only on the row and on a fixed order of additions, so it does not change with the batch.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, FLOAT, STORED, kernel
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import LANES, ROWS_PER_ITEM

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


@kernel(x=DTYPE, weight=DTYPE, out=DTYPE, eps=FLOAT, residual=DTYPE)
def rms_norm(item, x, weight, out, rows, width, eps, residual):
    """RMS norm of x [rows, width] times weight [width], plus residual [rows, width] if given, to ``out``."""
    for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
        start = row * width
        scale = simd.splat(F32(1.0) / F32(math.sqrt(mean_square(x, start, width) + eps)))
        for i in range(0, width, LANES):
            rest = width - i
            v = simd.round_like(x, simd.mul(simd.load_some(x, start + i, rest), scale))
            v = simd.mul(v, simd.load_some(weight, i, rest))
            if simd.address(residual):
                v = simd.add(simd.round_like(x, v), simd.load_some(residual, start + i, rest))
            simd.store_some(out, start + i, v, rest)


@kernel(x=DTYPE, by=FLOAT)
def scale(item, x, rows, width, by):
    """Multiply x [rows, width] by ``by``, in place."""
    factor = simd.splat(by)
    for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
        for i in range(0, width, LANES):
            at, rest = row * width + i, width - i
            simd.store_some(x, at, simd.mul(simd.load_some(x, at, rest), factor), rest)


@kernel(x=STORED, taken=np.int64, out=DTYPE)
def take_rows(item, x, taken, out, width):
    """Copy the rows ``taken`` of x [rows, width] to ``out`` [taken, width]; an item is one row."""
    source, target = taken[item] * width, item * width
    for i in range(width):
        simd.copy_element(out, target + i, x, source + i)


@kernel(packed=STORED, taken=np.int64, out=DTYPE)
def embedding_lookup_packed(item, packed, taken, out, width, unit):
    """``take_rows`` from a ``PackedWeight``, in which ``unit`` inputs of a row are adjacent."""
    row, target = taken[item], item * width
    first = row // LANES * LANES * width + row % LANES * unit
    for i in range(0, width, unit):
        for j in range(unit):
            simd.copy_element(out, target + i + j, packed, first + i * LANES + j)


@simd.jit
def row_max(x, start, width):
    """Largest of ``x[start : start + width]``; NaN if one is NaN."""
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
    """Index of the first element equal to ``value``; -1 if none is, which is always so for NaN."""
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


@kernel(x=DTYPE, out=np.int64)
def argmax(row, x, out, width):
    """Index of the largest element of each row of x [rows, width] to ``out`` [rows]; -1 if an element is NaN."""
    out[row] = _first_equal(x, row * width, width, row_max(x, row * width, width))


@kernel(x=DTYPE, masked=np.int64, bits=np.uint16)
def mask(item, x, masked, bits, width, words):
    """Set elements of row ``masked[item]`` of x to -inf if their bit in row ``item`` of ``bits`` is 0."""
    start = masked[item] * width
    for i in range(0, width, LANES):
        allowed = np.int64(bits[item * 2 * words + i // LANES])
        if allowed != ALL_LANES:
            simd.forbid(x, start + i, allowed, width - i)

"""Kernels that treat each token by itself: RMS norm, SwiGLU, greedy argmax.

A row's result depends on that row alone and on a fixed order of additions, so it does not change with the batch.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.parallel import ARGS, NUM_ITEMS, Kernel, next_item, worker_number
from batchgen.kernels.cpu.simd import (
    BF16,
    F32,
    any_equal,
    float_of_bits,
    fma,
    inline,
    jit,
    keep_lanes,
    lane,
    load,
    load_part,
    max_lanes,
    maximum,
    mul,
    pointer,
    round_like,
    silu_mul,
    splat,
    store,
    store_part,
    sum_lanes,
)
from batchgen.kernels.cpu.vector_ir import LANES

ROWS_PER_ITEM = 8  # small enough to balance the threads, large enough to hide the atomic


@inline
def mean_square(x, start, width):
    """Mean of squares of ``x[start : start + width]``."""
    total = splat(F32(0.0))
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        v = load(x, start + i)
        total = fma(v, v, total)
    if whole < width:
        v = load_part(x, start + whole, width - whole)
        total = fma(v, v, total)
    return sum_lanes(total) / F32(width)


@jit
def _rms_norm(words, dtype):
    """Arguments: x [rows, width], weight [width], out [rows, width] (addresses), rows, width, bits of eps."""
    x, weight, out = (pointer(words[ARGS], dtype), pointer(words[ARGS + 1], dtype), pointer(words[ARGS + 2], dtype))
    rows, width = words[ARGS + 3], words[ARGS + 4]
    eps = float_of_bits(words[ARGS + 5])
    whole = width - width % LANES
    worker = worker_number(words)
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
            start = row * width
            scale = splat(F32(1.0) / F32(math.sqrt(mean_square(x, start, width) + eps)))
            for i in range(0, whole, LANES):
                store(out, start + i, mul(round_like(x, mul(load(x, start + i), scale)), load(weight, i)))
            if whole < width:
                rest = width - whole
                v = round_like(x, mul(load_part(x, start + whole, rest), scale))
                store_part(out, start + whole, mul(v, load_part(weight, whole, rest)), rest)
        item = next_item(words, worker)


@jit
def _take_rows(words, dtype):
    """Arguments: x [rows, width], int64 rows to take, out [taken, width] (addresses), width; one item is a row."""
    x, out = pointer(words[ARGS], dtype), pointer(words[ARGS + 2], dtype)
    taken, width = pointer(words[ARGS + 1], np.int64), words[ARGS + 3]
    worker = worker_number(words)
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        source, target = taken[item] * width, item * width
        for i in range(width):
            out[target + i] = x[source + i]
        item = next_item(words, worker)


@jit
def _swiglu(words, dtype):
    """Arguments: gate_up [rows, 2 * width], out [rows, width] (addresses), rows, width."""
    gate_up, out = pointer(words[ARGS], dtype), pointer(words[ARGS + 1], dtype)
    rows, width = words[ARGS + 2], words[ARGS + 3]
    whole = width - width % LANES
    worker = worker_number(words)
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
            gate, up, to = 2 * row * width, (2 * row + 1) * width, row * width
            for i in range(0, whole, LANES):
                store(out, to + i, silu_mul(out, load(gate_up, gate + i), load(gate_up, up + i)))
            if whole < width:
                rest = width - whole
                v = silu_mul(out, load_part(gate_up, gate + whole, rest), load_part(gate_up, up + whole, rest))
                store_part(out, to + whole, v, rest)
        item = next_item(words, worker)


@jit
def row_max(x, start, width):
    """Largest of ``x[start : start + width]``, NaN passed over; -inf where nothing is larger."""
    lowest = splat(F32(-np.inf))
    best = lowest
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        best = maximum(best, load(x, start + i))
    if whole < width:
        best = maximum(best, keep_lanes(load_part(x, start + whole, width - whole), lowest, width - whole))
    return max_lanes(best)


@jit
def _first_equal(x, start, width, value):
    """Index of the first element equal to ``value``; -1 where there is none (all NaN)."""
    wanted, other = splat(value), splat(F32(np.nan))
    for i in range(0, width, LANES):
        count = min(LANES, width - i)
        v = load(x, start + i) if count == LANES else keep_lanes(load_part(x, start + i, count), other, count)
        if any_equal(v, wanted):
            j = 0
            while lane(v, j) != value:
                j += 1
            return i + j
    return -1


@jit
def _argmax(words, dtype):
    """Arguments: x [rows, width], out int64 [rows] (addresses), width."""
    x, out = pointer(words[ARGS], dtype), pointer(words[ARGS + 1], np.int64)
    width = words[ARGS + 2]
    worker = worker_number(words)
    row = next_item(words, worker)
    while row < words[NUM_ITEMS]:
        out[row] = _first_equal(x, row * width, width, row_max(x, row * width, width))
        row = next_item(words, worker)


def _take_rows_bf16(words):
    _take_rows(words, BF16)


def _take_rows_f32(words):
    _take_rows(words, F32)


def _rms_norm_bf16(words):
    _rms_norm(words, BF16)


def _rms_norm_f32(words):
    _rms_norm(words, F32)


def _swiglu_bf16(words):
    _swiglu(words, BF16)


def _swiglu_f32(words):
    _swiglu(words, F32)


def _argmax_bf16(words):
    _argmax(words, BF16)


def _argmax_f32(words):
    _argmax(words, F32)


take_rows = Kernel(bf16=_take_rows_bf16, f32=_take_rows_f32)
rms_norm = Kernel(bf16=_rms_norm_bf16, f32=_rms_norm_f32)
swiglu = Kernel(bf16=_swiglu_bf16, f32=_swiglu_f32)
argmax = Kernel(bf16=_argmax_bf16, f32=_argmax_f32)

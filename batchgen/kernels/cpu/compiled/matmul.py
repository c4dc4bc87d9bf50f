"""Linears in panels of weights: tiles of rows by four strips of outputs, and what is done with their sums."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.matmul_tiles import (
    ADD,
    ALL_STRIPS,
    GATE,
    MORE_SUMS,
    STORE,
    TO_SUMS,
    multiply,
    unpack,
)
from batchgen.kernels.cpu.compiled.simd import BYTES, F32
from batchgen.kernels.cpu.compiled.work import next_item, worker_number
from batchgen.kernels.cpu.layout import (
    ARGS,
    GROUP,
    LANES,
    MAX_ROWS,
    NUM_ITEMS,
    SEGMENT_WORDS,
    STRIPS,
    TILE_COLUMNS,
    UNPACKED_BYTES,
    UNPACKED_TILES,
)

SUMS = MAX_ROWS * TILE_COLUMNS  # float32 words of scratch a worker needs
HALF = TILE_COLUMNS // 2


@simd.jit
def _finish(sums, rows, first, column, width, bias, has_bias, residual, has_residual, out):
    """Sums, plus bias and residual, rounded once, into ``out[first + r, column : column + 64]``."""
    for r in range(rows):
        at = (first + r) * width + column
        for i in range(0, min(TILE_COLUMNS, width - column), LANES):
            count = width - column - i
            total = simd.load(sums, r * TILE_COLUMNS + i)
            if has_bias:
                total = simd.add(total, simd.load_some(bias, column + i, count))
            if has_residual:
                total = simd.add(total, simd.load_some(residual, at + i, count))
            simd.store_some(out, at + i, total, count)


@simd.jit
def _finish_gated(sums, rows, first, column, width, out):
    """``silu(gate) * up`` of a panel of 32 gates and their 32 ups into ``out[first + r, column : column + 32]``."""
    for r in range(rows):
        at = (first + r) * width + column
        for i in range(0, min(HALF, width - column), LANES):
            gate = simd.load(sums, r * TILE_COLUMNS + i)
            up = simd.load(sums, r * TILE_COLUMNS + HALF + i)
            simd.store_some(out, at + i, simd.silu_mul(out, gate, up), width - column - i)


@simd.jit
def _fetching(turn, num_fetching, here, following, panel_bytes, steps):
    """Where a tile of ``steps`` steps prefetches from, and how many bytes further with each.

    What this thread most likely multiplies next comes into its cache meanwhile: late, so that it is still there, in the
    time of the last ``num_fetching`` tiles, of which this is number ``turn``. Before them (and where one tile alone
    waits for its own weights) it asks for what is there, which is free.
    """
    if turn < 0 or num_fetching == 0:
        return here, 0
    step = panel_bytes // steps // num_fetching
    return following + turn * step * steps, step


@simd.jit
def _num_groups(words):
    """How many groups of rows there are that read the same weights one after the other: see ``_group``."""
    return simd.pointer(words[ARGS + 17], np.int64)[0] if words[ARGS + 17] else words[ARGS + 10]


@simd.jit
def _group(words, number):
    """(first row, end, address of the weights) of a group: a share of all rows, or those that meet one expert."""
    num_rows, shares = words[ARGS + 6], words[ARGS + 10]
    if words[ARGS + 17]:
        segments, weights = simd.pointer(words[ARGS + 17], np.int64), simd.pointer(words[ARGS + 4], np.int64)
        at = 1 + SEGMENT_WORDS * number
        return segments[at + 1], segments[at + 2], weights[segments[at]]
    num_tiles = -(-num_rows // MAX_ROWS)
    first, end = number * num_tiles // shares, (number + 1) * num_tiles // shares
    return first * num_rows // num_tiles, end * num_rows // num_tiles, words[ARGS + 4]


@simd.jit
def _following(words, item, num_panels):
    """The address of the panel that this worker most likely multiplies next."""
    last = _num_groups(words) if words[ARGS + 17] else item // num_panels + 1  # shares have workers of their own
    item = min(item + words[ARGS + 11], last * num_panels - 1)
    _, _, weight = _group(words, item // num_panels)
    return weight + item % num_panels * words[ARGS + 13]


@simd.jit
def _multiply_panels(words, x, dtype, stored):
    """Arguments (addresses or 0, then sizes) as in ``PanelLinear``; an item is a group of rows by one panel.

    ``stored`` is the element type of the weights, ``dtype`` that of the result; x is what ``multiply`` takes.
    """
    out, residual_at, bias_at = simd.pointer(words[ARGS + 3], dtype), words[ARGS + 2], words[ARGS + 1]
    residual, x_stride = simd.pointer(residual_at, dtype), words[ARGS + 7]
    width, gated = words[ARGS + 8], words[ARGS + 9]
    strip_size, panel_bytes, steps = words[ARGS + 12], words[ARGS + 13], words[ARGS + 14]
    worker = worker_number(words)
    sums = simd.pointer(words[ARGS + 5] + worker * 4 * SUMS, F32)
    num_panels = words[NUM_ITEMS] // words[ARGS + 10]
    num_items, columns = _num_groups(words) * num_panels, HALF if gated else TILE_COLUMNS
    item = next_item(words, worker)
    while item < num_items:
        first_row, end_row, weight = _group(words, item // num_panels)
        panel, num_rows = item % num_panels, end_row - first_row
        here, column = weight + panel * panel_bytes, panel * columns
        following, num_tiles = _following(words, item, num_panels), -(-num_rows // MAX_ROWS)
        num_fetching = min(num_tiles, STRIPS) if num_tiles > 1 else 0
        finish = GATE if gated else (ADD if residual_at else STORE)
        if width - column < columns or bias_at or not ALL_STRIPS:
            finish = TO_SUMS
        for tile in range(num_tiles):
            first, end = first_row + tile * num_rows // num_tiles, first_row + (tile + 1) * num_rows // num_tiles
            ahead, step = _fetching(tile - num_tiles + num_fetching, num_fetching, here, following, panel_bytes, steps)
            w, at = simd.pointer(here, stored), first * width + column
            how = (finish, sums, residual)
            multiply(end - first, x, first * x_stride, x_stride, w, strip_size, steps, out, at, width, how, ahead, step)
            if finish == TO_SUMS:
                _finish_tile(words, sums, first, end, column, dtype)
        item = next_item(words, worker)


@simd.jit
def _finish_tile(words, sums, first, end, column, dtype):
    """What is left to do with the sums of rows ``first`` to ``end`` and the panel that begins at ``column``."""
    bias_at, residual_at, out = words[ARGS + 1], words[ARGS + 2], simd.pointer(words[ARGS + 3], dtype)
    width = words[ARGS + 8]
    if words[ARGS + 9]:
        _finish_gated(sums, end - first, first, column, width, out)
    else:
        bias, residual = simd.pointer(bias_at, dtype), simd.pointer(residual_at, dtype)
        _finish(sums, end - first, first, column, width, bias, bias_at != 0, residual, residual_at != 0, out)


@simd.jit
def matmul(words, dtype, stored):
    """The product with weights of type ``stored`` as the numbers that they are; of bytes, of one or two rows."""
    _multiply_panels(words, simd.pointer(words[ARGS], dtype), dtype, stored)


@simd.jit
def matmul_integers(words, dtype):
    """The product of integers; what x consists of is in ``emit_integer_sums``."""
    scales, shifts = simd.pointer(words[ARGS + 15], F32), simd.pointer(words[ARGS + 16], np.int32)
    _multiply_panels(words, (simd.pointer(words[ARGS], BYTES), scales, shifts), dtype, BYTES)


@simd.jit
def matmul_unpacked(words, dtype, number):
    """The product of more than two rows with weights of 8 bits, whose numbers (of type ``number``) are unpacked first.

    That costs as much as to multiply them with a few rows, so it is done once for many, part by part of a panel.
    """
    x, out = simd.pointer(words[ARGS], dtype), simd.pointer(words[ARGS + 3], dtype)
    residual, inputs = simd.pointer(words[ARGS + 2], dtype), words[ARGS + 7]
    width, gated = words[ARGS + 8], words[ARGS + 9]
    strip_size, panel_bytes, number_bytes = words[ARGS + 12], words[ARGS + 13], words[ARGS + 15]
    worker = worker_number(words)
    mine = words[ARGS + 5] + worker * (4 * SUMS * UNPACKED_TILES + UNPACKED_BYTES)
    sums, numbers = simd.pointer(mine, F32), simd.pointer(mine + 4 * SUMS * UNPACKED_TILES, number)
    groups, num_panels = inputs // GROUP, words[NUM_ITEMS] // words[ARGS + 10]
    most_groups = UNPACKED_BYTES // (TILE_COLUMNS * GROUP * number_bytes)
    num_items, columns = _num_groups(words) * num_panels, HALF if gated else TILE_COLUMNS
    item = next_item(words, worker)
    while item < num_items:
        first_row, end_row, weight = _group(words, item // num_panels)
        panel, num_rows = item % num_panels, end_row - first_row
        here, column, num_tiles = weight + panel * panel_bytes, panel * columns, -(-num_rows // MAX_ROWS)
        following = _following(words, item, num_panels)
        for first_tile in range(0, num_tiles, UNPACKED_TILES):
            end_tile = min(first_tile + UNPACKED_TILES, num_tiles)
            for group in range(0, groups, most_groups):
                count = min(most_groups, groups - group)
                unpack(numbers, simd.pointer(here, BYTES), strip_size, group, count, x)
                size, steps = count * GROUP * LANES, count * GROUP // 2
                is_last = end_tile == num_tiles and group + count == groups
                num_fetching = min(end_tile - first_tile, STRIPS) if is_last else 0
                for tile in range(first_tile, end_tile):
                    first = first_row + tile * num_rows // num_tiles
                    end = first_row + (tile + 1) * num_rows // num_tiles
                    at, of_tile = first * inputs + group * GROUP, simd.shifted(sums, (tile - first_tile) * SUMS)
                    how = (MORE_SUMS if group else TO_SUMS, of_tile, residual)
                    turn = tile - end_tile + num_fetching
                    ahead, step = _fetching(turn, num_fetching, mine, following, panel_bytes, steps)
                    multiply(end - first, x, at, inputs, numbers, size, steps, out, 0, width, how, ahead, step)
            for tile in range(first_tile, end_tile):
                first = first_row + tile * num_rows // num_tiles
                end = first_row + (tile + 1) * num_rows // num_tiles
                _finish_tile(words, simd.shifted(sums, (tile - first_tile) * SUMS), first, end, column, dtype)
        item = next_item(words, worker)

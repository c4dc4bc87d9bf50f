"""Linears in panels of weights: tiles of rows by four strips of outputs, and what is done with their sums."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import matmul_tiles as tiles
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.simd import BYTES, F32
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number

SUMS = layout.MAX_ROWS * layout.TILE_COLUMNS  # float32 words of scratch a worker needs
HALF = layout.TILE_COLUMNS // 2


@simd.jit
def _finish(sums, rows, first, column, width, bias, has_bias, residual, has_residual, out):
    """Sums, plus bias and residual, rounded once, into ``out[first + r, column : column + 64]``."""
    for r in range(rows):
        at = (first + r) * width + column
        for i in range(0, min(layout.TILE_COLUMNS, width - column), layout.LANES):
            count = width - column - i
            total = simd.load(sums, r * layout.TILE_COLUMNS + i)
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
        for i in range(0, min(HALF, width - column), layout.LANES):
            gate = simd.load(sums, r * layout.TILE_COLUMNS + i)
            up = simd.load(sums, r * layout.TILE_COLUMNS + HALF + i)
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
def _num_groups(args):
    """How many groups of rows there are that read the same weights one after the other: see ``_group``."""
    return simd.pointer(args[layout.ARGS + 17], np.int64)[0] if args[layout.ARGS + 17] else args[layout.ARGS + 10]


@simd.jit
def _group(args, number):
    """(first row, end, address of the weights) of a group: a share of all rows, or those that meet one expert."""
    num_rows, shares = args[layout.ARGS + 6], args[layout.ARGS + 10]
    if args[layout.ARGS + 17]:
        segments, weights = (
            simd.pointer(args[layout.ARGS + 17], np.int64),
            simd.pointer(args[layout.ARGS + 4], np.int64),
        )
        at = 1 + layout.SEGMENT_WORDS * number
        return segments[at + 1], segments[at + 2], weights[segments[at]]
    num_tiles = -(-num_rows // layout.MAX_ROWS)
    first, end = number * num_tiles // shares, (number + 1) * num_tiles // shares
    return first * num_rows // num_tiles, end * num_rows // num_tiles, args[layout.ARGS + 4]


@simd.jit
def _following(args, item, num_panels):
    """The address of the panel that this worker most likely multiplies next."""
    last = _num_groups(args) if args[layout.ARGS + 17] else item // num_panels + 1  # shares have workers of their own
    item = min(item + args[layout.ARGS + 11], last * num_panels - 1)
    _, _, weight = _group(args, item // num_panels)
    return weight + item % num_panels * args[layout.ARGS + 13]


@simd.jit
def _multiply_panels(args, x, dtype, stored):
    """Arguments (addresses or 0, then sizes) as in ``PanelLinear``; an item is a group of rows by one panel.

    ``stored`` is the element type of the weights, ``dtype`` that of the result; x is what ``multiply`` takes.
    """
    out, residual_at, bias_at = (
        simd.pointer(args[layout.ARGS + 3], dtype),
        args[layout.ARGS + 2],
        args[layout.ARGS + 1],
    )
    residual, x_stride = simd.pointer(residual_at, dtype), args[layout.ARGS + 7]
    width, gated = args[layout.ARGS + 8], args[layout.ARGS + 9]
    strip_size, panel_bytes, steps = args[layout.ARGS + 12], args[layout.ARGS + 13], args[layout.ARGS + 14]
    worker = worker_number(args)
    sums = simd.pointer(args[layout.ARGS + 5] + worker * 4 * SUMS, F32)
    num_panels = args[layout.NUM_ITEMS] // args[layout.ARGS + 10]
    num_items, columns = _num_groups(args) * num_panels, HALF if gated else layout.TILE_COLUMNS
    item = next_item(args, worker)
    while item < num_items:
        first_row, end_row, weight = _group(args, item // num_panels)
        panel, num_rows = item % num_panels, end_row - first_row
        here, column = weight + panel * panel_bytes, panel * columns
        following, num_tiles = _following(args, item, num_panels), -(-num_rows // layout.MAX_ROWS)
        num_fetching = min(num_tiles, layout.STRIPS) if num_tiles > 1 else 0
        finish = tiles.GATE if gated else (tiles.ADD if residual_at else tiles.STORE)
        if width - column < columns or bias_at or not tiles.ALL_STRIPS:
            finish = tiles.TO_SUMS
        for tile in range(num_tiles):
            first, end = first_row + tile * num_rows // num_tiles, first_row + (tile + 1) * num_rows // num_tiles
            ahead, step = _fetching(tile - num_tiles + num_fetching, num_fetching, here, following, panel_bytes, steps)
            w, at = simd.pointer(here, stored), first * width + column
            how = (finish, sums, residual)
            tiles.multiply(
                end - first, x, first * x_stride, x_stride, w, strip_size, steps, out, at, width, how, ahead, step
            )
            if finish == tiles.TO_SUMS:
                _finish_tile(args, sums, first, end, column, dtype)
        item = next_item(args, worker)


@simd.jit
def _finish_tile(args, sums, first, end, column, dtype):
    """What is left to do with the sums of rows ``first`` to ``end`` and the panel that begins at ``column``."""
    bias_at, residual_at, out = (
        args[layout.ARGS + 1],
        args[layout.ARGS + 2],
        simd.pointer(args[layout.ARGS + 3], dtype),
    )
    width = args[layout.ARGS + 8]
    if args[layout.ARGS + 9]:
        _finish_gated(sums, end - first, first, column, width, out)
    else:
        bias, residual = simd.pointer(bias_at, dtype), simd.pointer(residual_at, dtype)
        _finish(sums, end - first, first, column, width, bias, bias_at != 0, residual, residual_at != 0, out)


@simd.jit
def matmul(args, dtype, stored):
    """The product with weights of type ``stored`` as the numbers that they are; of bytes, of one or two rows."""
    _multiply_panels(args, simd.pointer(args[layout.ARGS], dtype), dtype, stored)


@simd.jit
def matmul_integers(args, dtype):
    """The product of integers; what x consists of is in ``emit_integer_sums``."""
    scales, shifts = simd.pointer(args[layout.ARGS + 15], F32), simd.pointer(args[layout.ARGS + 16], np.int32)
    _multiply_panels(args, (simd.pointer(args[layout.ARGS], BYTES), scales, shifts), dtype, BYTES)


@simd.jit
def matmul_unpacked(args, dtype, number):
    """The product of more than two rows with weights of 8 bits, whose numbers (of type ``number``) are unpacked first.

    That costs as much as to multiply them with a few rows, so it is done once for many, part by part of a panel.
    """
    x, out = simd.pointer(args[layout.ARGS], dtype), simd.pointer(args[layout.ARGS + 3], dtype)
    residual, inputs = simd.pointer(args[layout.ARGS + 2], dtype), args[layout.ARGS + 7]
    width, gated = args[layout.ARGS + 8], args[layout.ARGS + 9]
    strip_size, panel_bytes, number_bytes = args[layout.ARGS + 12], args[layout.ARGS + 13], args[layout.ARGS + 15]
    worker = worker_number(args)
    mine = args[layout.ARGS + 5] + worker * (4 * SUMS * layout.UNPACKED_TILES + layout.UNPACKED_BYTES)
    sums, numbers = simd.pointer(mine, F32), simd.pointer(mine + 4 * SUMS * layout.UNPACKED_TILES, number)
    groups, num_panels = inputs // layout.GROUP, args[layout.NUM_ITEMS] // args[layout.ARGS + 10]
    most_groups = layout.UNPACKED_BYTES // (layout.TILE_COLUMNS * layout.GROUP * number_bytes)
    num_items, columns = _num_groups(args) * num_panels, HALF if gated else layout.TILE_COLUMNS
    item = next_item(args, worker)
    while item < num_items:
        first_row, end_row, weight = _group(args, item // num_panels)
        panel, num_rows = item % num_panels, end_row - first_row
        here, column, num_tiles = weight + panel * panel_bytes, panel * columns, -(-num_rows // layout.MAX_ROWS)
        following = _following(args, item, num_panels)
        for first_tile in range(0, num_tiles, layout.UNPACKED_TILES):
            end_tile = min(first_tile + layout.UNPACKED_TILES, num_tiles)
            for group in range(0, groups, most_groups):
                count = min(most_groups, groups - group)
                tiles.unpack(numbers, simd.pointer(here, BYTES), strip_size, group, count, x)
                size, steps = count * layout.GROUP * layout.LANES, count * layout.GROUP // 2
                is_last = end_tile == num_tiles and group + count == groups
                num_fetching = min(end_tile - first_tile, layout.STRIPS) if is_last else 0
                for tile in range(first_tile, end_tile):
                    first = first_row + tile * num_rows // num_tiles
                    end = first_row + (tile + 1) * num_rows // num_tiles
                    at, of_tile = first * inputs + group * layout.GROUP, simd.shifted(sums, (tile - first_tile) * SUMS)
                    how = (tiles.MORE_SUMS if group else tiles.TO_SUMS, of_tile, residual)
                    turn = tile - end_tile + num_fetching
                    ahead, step = _fetching(turn, num_fetching, mine, following, panel_bytes, steps)
                    tiles.multiply(end - first, x, at, inputs, numbers, size, steps, out, 0, width, how, ahead, step)
            for tile in range(first_tile, end_tile):
                first = first_row + tile * num_rows // num_tiles
                end = first_row + (tile + 1) * num_rows // num_tiles
                _finish_tile(args, simd.shifted(sums, (tile - first_tile) * SUMS), first, end, column, dtype)
        item = next_item(args, worker)

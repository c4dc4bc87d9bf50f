"""Linears in panels of weights: tiles of rows by four strips of outputs, and what is done with their sums."""

from __future__ import annotations

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.matmul_tiles import ADD, ALL_STRIPS, GATE, STORE, TO_SUMS, multiply
from batchgen.kernels.cpu.compiled.simd import BF16, F32
from batchgen.kernels.cpu.compiled.work import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, LANES, MAX_ROWS, NUM_ITEMS, STRIPS, TILE_COLUMNS

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
def _matmul(words, dtype, stored):
    """Arguments (addresses or 0, then sizes) as in ``PanelLinear``; an item is a share of the rows by one panel.

    ``stored`` is the element type of the weights, ``dtype`` that of everything else.
    """
    x, out = simd.pointer(words[ARGS], dtype), simd.pointer(words[ARGS + 3], dtype)
    bias_at, residual_at, weight = words[ARGS + 1], words[ARGS + 2], words[ARGS + 4]
    bias, residual = simd.pointer(bias_at, dtype), simd.pointer(residual_at, dtype)
    num_rows, inputs, width = words[ARGS + 6], words[ARGS + 7], words[ARGS + 8]
    gated, shares, stride, itemsize = words[ARGS + 9], words[ARGS + 10], words[ARGS + 11], words[ARGS + 12]
    worker = worker_number(words)
    sums = simd.pointer(words[ARGS + 5] + worker * 4 * SUMS, F32)
    num_tiles, num_panels = -(-num_rows // MAX_ROWS), words[NUM_ITEMS] // shares
    pairs, strip_size = inputs // 2, inputs * LANES
    panel_bytes = itemsize * STRIPS * strip_size
    columns = HALF if gated else TILE_COLUMNS
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        share, panel = item // num_panels, item % num_panels
        here, column = weight + panel * panel_bytes, panel * columns
        first_tile, end_tile = share * num_tiles // shares, (share + 1) * num_tiles // shares
        count = end_tile - first_tile
        # What this thread most likely multiplies next comes into its cache meanwhile: late, so that it is still there,
        # in up to four tiles' time. One tile alone waits for its own weights; to ask for what is there is free.
        following = weight + min(panel + stride, num_panels - 1) * panel_bytes
        num_fetching = min(count, STRIPS) if count > 1 else 0
        finish = GATE if gated else (ADD if residual_at else STORE)
        if width - column < columns or bias_at or not ALL_STRIPS:
            finish = TO_SUMS
        for tile in range(first_tile, end_tile):
            first, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
            ahead, step = here, 0
            if tile >= end_tile - num_fetching:
                step = panel_bytes // pairs // num_fetching
                ahead = following + (tile - end_tile + num_fetching) * step * pairs
            w, at = simd.pointer(here, stored), first * width + column
            how = (finish, sums, residual)
            multiply(end - first, x, first * inputs, inputs, w, strip_size, pairs, out, at, width, how, ahead, step)
            if finish == TO_SUMS and gated:
                _finish_gated(sums, end - first, first, column, width, out)
            elif finish == TO_SUMS:
                _finish(sums, end - first, first, column, width, bias, bias_at != 0, residual, residual_at != 0, out)
        item = next_item(words, worker)


def _matmul_bf16(words):
    _matmul(words, BF16, BF16)


def _matmul_f32_of_bf16(words):
    _matmul(words, F32, BF16)


def _matmul_f32(words):
    _matmul(words, F32, F32)

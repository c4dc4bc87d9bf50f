"""Linears of bfloat16 on the tiles of a matrix unit: 16 rows by two strips of a panel at a time, or by four if few.

For any number of rows, a row's sums add 32 inputs at a time, in order: see ``tiles.emit_dot_bf16``.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from batchgen.kernels.cpu.compiled import emit, simd, tiles
from batchgen.kernels.cpu.compiled.entry import kernel
from batchgen.kernels.cpu.compiled.matmul import PRODUCT, finish_tile, following_panel, group_of
from batchgen.kernels.cpu.compiled.matmul_tiles import unpack
from batchgen.kernels.cpu.compiled.simd import ANY, BYTES, I64, emitted
from batchgen.kernels.cpu.layout import (
    BLOCK_ROWS,
    GROUP,
    LANES,
    STRIPS,
    TILE_COLUMNS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILE_SCRATCH,
    TILE_STATE,
    TILE_STEP,
    UNPACKED_STEPS,
)

# All rows of a block use a part of the inputs before the next part, so that its weights stay in the first-level cache.
_PART = 10  # steps in a part, at most: 20 KiB of weights in two strips
_STEP_NUMBERS = TILE_STEP * LANES  # weights of a step in one strip
_NUM_LINES, _MAX_LINES = 32, 4  # cache lines of a step in two strips; most lines that a step prefetches
_FEW = (tuple(range(STRIPS)), 4, 5)  # as ``tiles.WHOLE``, for up to 16 rows and all strips
# Words of scratch: sums, the ends of rows and of strips that do not fill a step, tiles in memory, unpacked numbers.
_ROW_ENDS = BLOCK_ROWS * TILE_COLUMNS
_STRIP_ENDS = _ROW_ENDS + BLOCK_ROWS * TILE_ROW_BYTES // 4
_STATE = TILE_SCRATCH - TILE_STATE
_NUMBERS = TILE_SCRATCH


@emitted(types.void, ANY, I64)
def _configure_few(builder: ir.IRBuilder, state: ir.Value, rows: ir.Value) -> None:
    full = emit.number(TILE_ROWS)
    tiles.emit_configure(builder, state, [rows, rows, rows, rows, rows, full, full, full])


_accumulate_few = tiles.accumulating(_FEW)


@simd.jit
def _add_part(product, x, stride, rows, is_few, weights, strip_size, goes_on, steps, ahead, lines):
    """Add a block's products over a part of the inputs to the sums; returns the next address to prefetch."""
    sums, state = product.sums, simd.shifted(product.sums, _STATE)
    apart = strip_size, _STEP_NUMBERS, TILE_STEP
    if is_few:
        _accumulate_few(state, x, stride, weights, apart, sums, TILE_COLUMNS, goes_on, steps, ahead, 0)
        return ahead
    for strip in range(0, STRIPS, 2):
        weights_at = simd.shifted(weights, strip * strip_size)
        for row in range(0, rows, TILE_ROWS):
            sums_at = simd.shifted(sums, row * TILE_COLUMNS + strip * LANES)
            where = simd.shifted(x, row * stride), stride, weights_at, apart, sums_at, TILE_COLUMNS
            if rows - row < TILE_ROWS:
                tiles.accumulate_rest(state, *where, goes_on, steps, ahead, lines)
            else:
                tiles.accumulate_whole(state, *where, goes_on, steps, ahead, lines)
            ahead += lines * steps * TILE_ROW_BYTES
    return ahead


@simd.inline
def _begin(product, rows):
    """Configure the tiles for ``rows`` rows; returns whether they are few: one tile of rows."""
    state = simd.shifted(product.sums, _STATE)
    if rows <= TILE_ROWS:
        _configure_few(state, rows)
        return True
    tiles.configure(state, rows - (rows - 1) // TILE_ROWS * TILE_ROWS)
    return False


@simd.jit
def _add_ends(product, x, rows, is_few, weights, count):
    """Add the products of the last ``count`` inputs, which do not fill a step, padded with zeros."""
    whole = product.inputs - count
    row_ends = simd.pointer(simd.address(product.sums) + 4 * _ROW_ENDS, product.x)
    strip_ends = simd.pointer(simd.address(product.sums) + 4 * _STRIP_ENDS, product.x)
    for row in range(rows):
        for i in range(TILE_STEP):
            row_ends[row * TILE_STEP + i] = x[row * product.inputs + whole + i] if i < count else 0
    for strip in range(STRIPS):
        for i in range(_STEP_NUMBERS):
            at = strip * product.strip_size + whole * LANES + i
            strip_ends[strip * _STEP_NUMBERS + i] = weights[at] if i < count * LANES else 0
    _add_part(product, row_ends, TILE_STEP, rows, is_few, strip_ends, _STEP_NUMBERS, whole, 1, 0, 0)


@kernel(product=PRODUCT)
def matmul_bf16(item, product):
    """The product of bfloat16 on tiles."""
    first_row, end_row, weight = group_of(product, item // product.num_panels)
    if first_row == end_row:
        return
    panel, inputs, columns = item % product.num_panels, product.inputs, TILE_COLUMNS
    if product.is_gated:
        columns //= 2
    here = weight + panel * product.panel_bytes
    weights, steps = simd.pointer(here, product.weights), inputs // TILE_STEP
    num_parts, is_few = -(-steps // _PART), _begin(product, end_row - first_row)
    for first in range(first_row, end_row, BLOCK_ROWS):
        rows, x = min(end_row - first, BLOCK_ROWS), simd.shifted(product.x, first * inputs)
        ahead, lines = here, 0
        if first + BLOCK_ROWS >= end_row:  # the last block prefetches the panel that most likely comes next
            ahead, lines = following_panel(product, item), min(-(-_NUM_LINES * TILE_ROWS // rows), _MAX_LINES)
        for part in range(num_parts):
            step = part * steps // num_parts
            count = (part + 1) * steps // num_parts - step
            x_at, weights_at = simd.shifted(x, step * TILE_STEP), simd.shifted(weights, step * _STEP_NUMBERS)
            where = x_at, inputs, rows, is_few, weights_at, product.strip_size
            ahead = _add_part(product, *where, part, count, ahead, lines)
        if inputs % TILE_STEP:
            _add_ends(product, x, rows, is_few, weights, inputs % TILE_STEP)
        finish_tile(product, product.sums, rows, first, panel * columns)
    tiles.release()


@kernel(product=PRODUCT)
def matmul_bf16_unpacked(item, product):
    """The product with 8-bit weights, which are unpacked to bfloat16 for each block of rows, a part at a time."""
    first_row, end_row, weight = group_of(product, item // product.num_panels)
    if first_row == end_row:
        return
    panel, inputs, columns = item % product.num_panels, product.inputs, TILE_COLUMNS
    if product.is_gated:
        columns //= 2
    here, groups = weight + panel * product.panel_bytes, inputs // GROUP
    packed = simd.pointer(here, BYTES)
    numbers = simd.pointer(simd.address(product.sums) + 4 * _NUMBERS, product.x)
    is_few = _begin(product, end_row - first_row)
    for first in range(first_row, end_row, BLOCK_ROWS):
        rows, x = min(end_row - first, BLOCK_ROWS), simd.shifted(product.x, first * inputs)
        for group in range(0, groups, UNPACKED_STEPS):
            count = min(UNPACKED_STEPS, groups - group)
            unpack(numbers, packed, product.strip_size, group, count, x)
            where = simd.shifted(x, group * GROUP), inputs, rows, is_few, numbers, count * _STEP_NUMBERS
            _add_part(product, *where, group, count, here, 0)
        finish_tile(product, product.sums, rows, first, panel * columns)
    tiles.release()

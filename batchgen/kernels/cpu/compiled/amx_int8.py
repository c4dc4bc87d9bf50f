"""Linears of integers on the tiles of a matrix unit, with the same panels and the same bits as on VNNI.

Products within a group of 128 inputs add up exactly; a group's sums are scaled while the next group is multiplied.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit, simd, tiles
from batchgen.kernels.cpu.compiled.entry import kernel
from batchgen.kernels.cpu.compiled.matmul import PRODUCT, finish_tile, following_panel, group_of, multiply_integers
from batchgen.kernels.cpu.compiled.simd import ANY, BYTES, I64, emitted
from batchgen.kernels.cpu.layout import (
    BLOCK_ROWS,
    DOT_GROUP,
    DOT_GROUP_BYTES,
    LANES,
    MAX_ROWS,
    STRIPS,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROW_BYTES,
    TILE_ROWS,
    TILE_SCRATCH,
    TILE_STATE,
)

_PART = 8  # groups multiplied at once, at most: 33 KiB of weights in two strips
_PAIR_BYTES = 2 * TILE_ROW_BYTES  # a row of a group's sums for two strips
_GROUP_SUMS_BYTES = TILE_ROWS * _PAIR_BYTES
_NUM_LINES = 66  # cache lines of a group in two strips
_GROUP_SUMS = BLOCK_ROWS * TILE_COLUMNS  # words of scratch before the sums of two groups, which take turns
_STATE = TILE_SCRATCH - TILE_STATE


def _emit_scaled(builder, x, sums, group_sums, strips, group, rows):
    """Add a group's sums, plus their shifts and times both scales, to ``sums``, which the first group overwrites.

    ``x`` is (pointer to the first row's scales, pointer to its shifts, groups per row).
    """
    scales, shifts, stride = x
    at = builder.mul(group, emit.number(DOT_GROUP_BYTES))
    kind = emit.VECTOR.as_pointer()
    of_weights = [builder.load(builder.bitcast(builder.gep(strip, [at]), kind), align=64) for strip in strips]
    is_first = builder.icmp_signed("==", group, emit.number(0))
    with cgutils.for_range(builder, rows) as row:
        place = builder.add(builder.mul(row.index, stride), group)
        scale, shift = (emit.splat(builder, builder.load(builder.gep(base, [place]))) for base in (scales, shifts))
        for v, of_weight in enumerate(of_weights):
            offset = builder.add(builder.mul(row.index, emit.number(_PAIR_BYTES)), emit.number(v * TILE_ROW_BYTES))
            group_sum = builder.bitcast(builder.gep(group_sums, [offset]), emit.INT_VECTOR.as_pointer())
            total = builder.add(builder.load(group_sum, align=64), shift)
            term = builder.fmul(builder.fmul(scale, of_weight), builder.sitofp(total, emit.VECTOR))
            index = builder.add(builder.mul(row.index, emit.number(TILE_COLUMNS)), emit.number(v * LANES))
            to = builder.bitcast(builder.gep(sums, [index]), kind)
            before = builder.select(is_first, ir.Constant(emit.VECTOR, None), builder.load(to, align=64))
            builder.store(builder.fadd(before, term), to, align=64)


def _accumulating(numbers):
    """A numba function that adds the products of a tile of rows with two strips, group by group, to sums in memory."""
    totals, of_rows, of_weights = numbers

    @emitted(types.void, ANY, ANY, ANY, ANY, I64, ANY, I64, ANY, I64, I64, I64, I64, I64)
    def accumulate(
        builder, memory, x, scales, shifts, stride, weights, strip_size, sums, first, count, rows, ahead, lines
    ):
        """``x`` are the rows' integers, ``stride`` groups per row; ``weights`` are the first strip's bytes."""
        state = builder.gep(memory, [emit.number(_STATE)])
        waiting = tiles.bytes_at(builder, memory, emit.number(4 * _GROUP_SUMS))
        row_bytes, line = builder.mul(stride, emit.number(DOT_GROUP)), emit.number(TILE_ROW_BYTES)
        strips = [tiles.bytes_at(builder, weights, builder.mul(strip_size, emit.number(v))) for v in (0, 1)]

        def group_sums(index):
            odd = builder.and_(index, emit.number(1))
            return builder.gep(waiting, [builder.mul(odd, emit.number(_GROUP_SUMS_BYTES))])

        def scale(index):
            group = builder.add(first, index)
            _emit_scaled(builder, (scales, shifts, stride), sums, group_sums(index), strips, group, rows)

        with cgutils.for_range(builder, count) as loop:
            group = builder.add(first, loop.index)
            x_at = builder.gep(x, [builder.mul(group, emit.number(DOT_GROUP))])
            weights_at = builder.add(builder.mul(group, emit.number(DOT_GROUP_BYTES)), line)
            for total in totals:
                tiles.emit_zero(builder, state, total)
            for step in range(DOT_GROUP // TILE_ROW_BYTES):
                bytes_at = builder.gep(x_at, [emit.number(step * TILE_ROW_BYTES)])
                tiles.emit_load(builder, state, of_rows, bytes_at, row_bytes)
                for total, strip in zip(totals, strips, strict=True):
                    tile_at = builder.gep(strip, [builder.add(weights_at, emit.number(step * TILE_BYTES))])
                    tiles.emit_load(builder, state, of_weights, tile_at, line)
                    tiles.emit_dot_int8(builder, state, total, of_rows, of_weights)
            tiles.emit_prefetch(builder, ahead, loop.index, lines)
            with builder.if_then(builder.icmp_signed(">", loop.index, emit.number(0))):
                scale(builder.sub(loop.index, emit.number(1)))
            for v, total in enumerate(totals):
                to = builder.gep(group_sums(loop.index), [emit.number(v * TILE_ROW_BYTES)])
                tiles.emit_store(builder, state, total, to, emit.number(_PAIR_BYTES))
        scale(builder.sub(count, emit.number(1)))
        for tile in (*totals, of_rows, of_weights):
            tiles.emit_zero(builder, state, tile)

    return accumulate


_accumulate_whole, _accumulate_rest = map(_accumulating, (tiles.WHOLE, tiles.REST))


@simd.jit
def _add_part(product, first_row, rows, weights, group, count, ahead, lines):
    """Add the products of a block of rows with ``count`` groups to the sums; returns the next address to prefetch."""
    values = simd.pointer(simd.address(product.x), BYTES)
    stride, memory = product.inputs // DOT_GROUP, product.sums
    for strip in range(0, STRIPS, 2):
        strips = simd.shifted(weights, strip * product.strip_size)
        for row in range(0, rows, TILE_ROWS):
            at, size = (first_row + row) * stride, product.strip_size
            x, scales = simd.shifted(values, at * DOT_GROUP), simd.shifted(product.scales, at)
            of_rows = x, scales, simd.shifted(product.shifts, at), stride
            sums, most = simd.shifted(product.sums, row * TILE_COLUMNS + strip * LANES), min(rows - row, TILE_ROWS)
            if most < TILE_ROWS:
                _accumulate_rest(memory, *of_rows, strips, size, sums, group, count, most, ahead, lines)
            else:
                _accumulate_whole(memory, *of_rows, strips, size, sums, group, count, most, ahead, lines)
            ahead += lines * count * TILE_ROW_BYTES
    return ahead


@kernel(product=PRODUCT)
def matmul_int8(item, product):
    """The product of integers on tiles; for few rows by vector instructions, which have less latency."""
    first_row, end_row, weight = group_of(product, item // product.num_panels)
    if end_row - first_row <= MAX_ROWS:
        multiply_integers(item, product)
        return
    panel, groups, columns = item % product.num_panels, product.inputs // DOT_GROUP, TILE_COLUMNS
    if product.is_gated:
        columns //= 2
    here, num_rows = weight + panel * product.panel_bytes, end_row - first_row
    weights = simd.pointer(here, BYTES)
    tiles.configure(simd.shifted(product.sums, _STATE), num_rows - (num_rows - 1) // TILE_ROWS * TILE_ROWS)
    for first in range(first_row, end_row, BLOCK_ROWS):
        rows, ahead, lines = min(end_row - first, BLOCK_ROWS), here, 0
        if first + BLOCK_ROWS >= end_row:
            ahead, lines = following_panel(product, item), -(-_NUM_LINES * TILE_ROWS // rows)
        for group in range(0, groups, _PART):
            count = min(_PART, groups - group)
            ahead = _add_part(product, first, rows, weights, group, count, ahead, lines)
        finish_tile(product, product.sums, rows, first, panel * columns)
    tiles.release()

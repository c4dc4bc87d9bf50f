"""Operations on the tile registers of a matrix unit (AMX), emitted as LLVM IR: eight of up to 16 rows of 64 bytes.

Without AMX, tiles in memory give the same bits (for denormal numbers only on x86), so that kernels can be tested.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.compiled.int8 import emit_byte_products
from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted
from batchgen.kernels.cpu.layout import LANES, TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from batchgen.kernels.processor import cpu_features

IN_MEMORY = "amx-tile" not in cpu_features()
_NUM_TILES = 8
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_FLUSHES_DENORMALS = 0x9FC0  # of MXCSR: denormal numbers are zeros, in and out; no operation traps
_SETS_MXCSR = platform.machine() in ("x86_64", "AMD64")
# Instructions name tiles by immediates, so ``emit_*`` take Python integers. Each kernel configures and releases tiles:
# other libraries cannot interfere, and thread switches need not save tiles. Kernels clear tiles after use: tiles that
# hold numbers leave too few registers for renaming if the core's other thread is busy, which doubles a loop's time.
# Tiles by number: (tiles of sums, tile of rows, tile of weights). ``REST`` is for fewer than 16 rows.
WHOLE, REST = ((0, 1), 2, 3), ((4, 5), 6, 7)


def _call(builder, name, *arguments):
    emit.call(builder, f"llvm.x86.{name}", arguments, ir.VoidType())


def _tile(number):
    return ir.Constant(_BYTE, number)


def bytes_at(builder, base, offset):
    """Pointer to the byte ``offset`` bytes after the pointer ``base``."""
    return builder.gep(builder.bitcast(base, _BYTE.as_pointer()), [offset])


def emit_prefetch(builder, ahead, turn, lines):
    """Prefetch ``lines`` cache lines, starting ``turn * lines`` lines after the address ``ahead``."""
    with cgutils.for_range(builder, lines) as loop:
        line = builder.add(builder.mul(turn, lines), loop.index)
        emit.prefetch(builder, builder.add(ahead, builder.mul(line, emit.number(emit.CACHE_LINE))), closeness=2)


def emit_configure(builder, state, rows):
    """Configure the eight tiles for ``rows`` rows (eight int64 from 1 to 16) of 64 bytes, and set them to zero."""
    if IN_MEMORY:
        for tile, count in enumerate(rows):
            builder.store(count, _rows_at(builder, state, tile))
            emit_zero(builder, state, tile)
        return
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(_WORD, _NUM_TILES), name="tiles")
        memory.align = 64
    counts = emit.number(0)
    for tile, count in enumerate(rows):
        counts = builder.or_(counts, builder.shl(count, emit.number(8 * tile)))
    # The palette; from byte 16, the bytes per row of each tile in 16 bits; from byte 48, the rows of each in 8 bits.
    widths = emit.number(0x0001_0001_0001_0001 * TILE_ROW_BYTES)
    words = [emit.number(1), emit.number(0), widths, widths, emit.number(0), emit.number(0), counts, emit.number(0)]
    for i, word in enumerate(words):
        builder.store(word, builder.gep(memory, [emit.number(0), emit.number(i)]))
    _call(builder, "ldtilecfg", builder.bitcast(memory, _BYTE.as_pointer()))


def emit_release(builder):
    """Release the tiles."""
    if not IN_MEMORY:
        _call(builder, "tilerelease")


def emit_zero(builder, state, tile):
    """Set a tile to zero."""
    if not IN_MEMORY:
        _call(builder, "tilezero", _tile(tile))
        return
    for row in range(TILE_ROWS):
        builder.store(ir.Constant(emit.INT_VECTOR, None), _row_at(builder, state, tile, emit.number(row)), align=4)


def emit_load(builder, state, tile, at, stride):
    """Load a tile whose rows are ``stride`` bytes apart and start at the pointer ``at``."""
    if not IN_MEMORY:
        _call(builder, "tileloadd64", _tile(tile), at, stride)
        return
    with _each_row(builder, state, tile) as row:
        held = builder.load(_vector_at(builder, at, builder.mul(row, stride)), align=1)
        builder.store(held, _row_at(builder, state, tile, row), align=4)


def emit_store(builder, state, tile, at, stride):
    """Store a tile as ``emit_load`` reads it."""
    if not IN_MEMORY:
        _call(builder, "tilestored64", _tile(tile), at, stride)
        return
    with _each_row(builder, state, tile) as row:
        held = builder.load(_row_at(builder, state, tile, row), align=4)
        builder.store(held, _vector_at(builder, at, builder.mul(row, stride)), align=1)


def emit_dot_bf16(builder, state, total, a, b):
    """``total += a @ b``: float32 ``total`` [rows, 16], bfloat16 ``a`` [rows, 32] and ``b`` [16 pairs, 16, 2].

    In each lane the products of even inputs are added up from zero by FMA, and so are the products of odd inputs; both
    sums are added, and the result is added to the total. Denormal numbers are zeros.
    """
    if IN_MEMORY:
        with _flushing_denormals(builder):
            _emit_dot_in_memory(builder, state, (total, a, b), _add_bf16)
    else:
        _call(builder, "tdpbf16ps", *map(_tile, (total, a, b)))


def emit_dot_int8(builder, state, total, a, b):
    """``total += a @ b``: int32 [rows, 16], signed bytes ``a`` [rows, 64], unsigned bytes ``b`` [16 quads, 16, 4]."""
    if IN_MEMORY:
        _emit_dot_in_memory(builder, state, (total, a, b), _add_int8)
    else:
        _call(builder, "tdpbsud", *map(_tile, (total, a, b)))


def _emit_dot_in_memory(builder, state, numbers, add):
    total, a, b = numbers
    with _each_row(builder, state, total) as row:
        to = _row_at(builder, state, total, row)
        inputs = builder.load(_row_at(builder, state, a, row), align=4)
        words = [builder.extract_element(inputs, ir.Constant(emit.INT, i)) for i in range(LANES)]
        weights = [builder.load(_row_at(builder, state, b, emit.number(i)), align=4) for i in range(TILE_ROWS)]
        builder.store(add(builder, builder.load(to, align=4), words, weights), to, align=4)


def _add_bf16(builder, held, words, weights):
    sums = [ir.Constant(emit.VECTOR, None)] * 2
    for word, pairs in zip(words, weights, strict=True):
        both = emit.widen_pairs(builder, emit.splat(builder, word)), emit.widen_pairs(builder, pairs)
        sums = [emit.fma(builder, x, w, total) for x, w, total in zip(*both, sums, strict=True)]
    total = builder.fadd(builder.bitcast(held, emit.VECTOR), builder.fadd(*sums))
    return builder.bitcast(total, emit.INT_VECTOR)


def _add_int8(builder, held, words, weights):
    for word, quads in zip(words, weights, strict=True):
        held = emit_byte_products(builder, quads, emit.splat(builder, word), held)
    return held


@contextmanager
def _flushing_denormals(builder) -> Iterator[None]:
    """Context in which operations treat denormal numbers as zeros, as AMX always does, regardless of MXCSR.

    LLVM cannot move loads and stores of tiles across its ends: empty assembly there claims to change all memory.
    """
    if not _SETS_MXCSR:
        yield
        return
    before, during = (cgutils.alloca_once(builder, emit.INT) for _ in range(2))

    def switch_to(settings):
        barrier = ir.FunctionType(ir.VoidType(), [])
        builder.asm(barrier, "", "~{memory}", [], side_effect=True)
        _call(builder, "sse.ldmxcsr", builder.bitcast(settings, _BYTE.as_pointer()))
        builder.asm(barrier, "", "~{memory}", [], side_effect=True)

    builder.store(ir.Constant(emit.INT, _FLUSHES_DENORMALS), during)
    _call(builder, "sse.stmxcsr", builder.bitcast(before, _BYTE.as_pointer()))
    switch_to(during)
    yield
    switch_to(before)


def _vector_at(builder, base, offset):
    return builder.bitcast(bytes_at(builder, base, offset), emit.INT_VECTOR.as_pointer())


def _row_at(builder, state, tile, row):
    offset = builder.add(emit.number(tile * TILE_BYTES), builder.mul(row, emit.number(TILE_ROW_BYTES)))
    return _vector_at(builder, state, offset)


def _rows_at(builder, state, tile):
    at = bytes_at(builder, state, emit.number(_NUM_TILES * TILE_BYTES + 8 * tile))
    return builder.bitcast(at, _WORD.as_pointer())


@contextmanager
def _each_row(builder, state, tile) -> Iterator[ir.Value]:
    with cgutils.for_range(builder, builder.load(_rows_at(builder, state, tile), align=4)) as loop:
        yield loop.index


@emitted(types.void, ANY, I64)
def configure(builder, state, rest):
    """Configure the tiles ``WHOLE`` for 16 rows, and ``REST`` for ``rest`` rows (its weights for 16)."""
    full = emit.number(TILE_ROWS)
    emit_configure(builder, state, [full, full, full, full, rest, rest, rest, full])


@emitted(types.void)
def release(builder):
    """Release the tiles."""
    emit_release(builder)


def accumulating(numbers):
    """A numba function that adds the products of a tile of rows with adjacent strips of weights to sums in memory."""
    totals, of_rows, of_weights = numbers

    @emitted(types.void, ANY, ANY, I64, ANY, ANY, ANY, I64, I64, I64, I64, I64)
    def accumulate(builder, state, x, stride, weights, apart, sums, sums_stride, goes_on, steps, ahead, lines):
        """``x`` are rows of bfloat16, ``stride`` elements apart; ``sums`` are rows, ``sums_stride`` elements apart.

        ``apart`` has three distances in elements: between strips of weights, between tiles, between rows of a tile. If
        ``goes_on`` is 0, sums start at zero. Each step prefetches ``lines`` cache lines, starting at ``ahead``.
        """
        two, four, line = emit.number(2), emit.number(4), emit.number(TILE_ROW_BYTES)
        strip, step, row = (builder.mul(number, two) for number in cgutils.unpack_tuple(builder, apart))
        x_at, x_stride = bytes_at(builder, x, emit.number(0)), builder.mul(stride, two)
        sums_bytes, places = builder.mul(sums_stride, four), range(len(totals))
        strips = [bytes_at(builder, weights, builder.mul(strip, emit.number(v))) for v in places]
        sums_at = [bytes_at(builder, sums, emit.number(v * TILE_ROW_BYTES)) for v in places]
        with builder.if_else(builder.icmp_signed("!=", goes_on, emit.number(0))) as (later, first):
            with later:
                for total, at in zip(totals, sums_at, strict=True):
                    emit_load(builder, state, total, at, sums_bytes)
            with first:
                for total in totals:
                    emit_zero(builder, state, total)
        with cgutils.for_range(builder, steps) as loop:
            emit_load(builder, state, of_rows, builder.gep(x_at, [builder.mul(loop.index, line)]), x_stride)
            weights_at = builder.mul(loop.index, step)
            for total, base in zip(totals, strips, strict=True):
                emit_load(builder, state, of_weights, builder.gep(base, [weights_at]), row)
                emit_dot_bf16(builder, state, total, of_rows, of_weights)
            emit_prefetch(builder, ahead, loop.index, lines)
        for total, at in zip(totals, sums_at, strict=True):
            emit_store(builder, state, total, at, sums_bytes)
        for tile in (*totals, of_rows, of_weights):
            emit_zero(builder, state, tile)

    return accumulate


accumulate_whole, accumulate_rest = map(accumulating, (WHOLE, REST))

"""The inner product of a linear: a tile of accumulators in vector registers, emitted as LLVM IR.

Sums are float32 and add inputs in order, for any number of rows, so a row has the same bits in every product.
"""

from __future__ import annotations

from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.compiled.int8 import emit_integer_sums, emit_numbers, emit_scales, emit_unpack
from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted, jit
from batchgen.kernels.cpu.layout import (
    DOT_GROUP,
    GROUP,
    GROUP_BYTES,
    LANES,
    MAX_ROWS,
    STEP_INPUTS,
    STRIPS,
    TILE_COLUMNS,
)
from batchgen.kernels.processor import has_wide_registers

_SEGMENT = 128  # pairs of inputs that are summed separately; it divides the pairs of weights unpacked at once
_LEAD = 1024  # bytes between the weights in use and those that tiles of one or two rows prefetch

# What becomes of a tile's sums: TO_SUMS stores them as float32 for the caller; STORE rounds them into ``out``; ADD adds
# ``residual`` first; GATE stores ``silu(gate) * up``, for two strips of gates and two of ups. MORE_SUMS is TO_SUMS that
# starts from the stored sums, to add later inputs.
TO_SUMS, STORE, ADD, GATE, MORE_SUMS = range(5)
# 32 registers of 16 numbers hold the sums of all strips. With fewer, strips take turns and only sums can be stored.
ALL_STRIPS = has_wide_registers()


def strips_at_once(rows):
    """The number of strips whose sums for ``rows`` rows fit the registers together with the factors."""
    if ALL_STRIPS or rows == 1:
        return STRIPS
    return 2 if rows <= 3 else 1


@contextmanager
def _each_pair(builder, weight, strip, first, pairs):
    """Loop over ``pairs`` pairs of inputs, starting at ``first``; yields a pair's number and (group, number in the
    group, scales) for 8-bit weights, else None."""
    if not _is_bytes(weight):
        with cgutils.for_range(builder, pairs) as loop:
            yield builder.add(first, loop.index), None
        return
    pairs_of_group = emit.number(GROUP // 2)
    with cgutils.for_range(builder, builder.udiv(pairs, pairs_of_group)) as outer:
        group = builder.add(builder.udiv(first, pairs_of_group), outer.index)
        scales = [emit_scales(builder, base, group) for base in strip]
        with cgutils.for_range(builder, pairs_of_group) as inner:
            pair = builder.add(builder.mul(group, pairs_of_group), inner.index)
            yield pair, (group, inner.index, scales)


def _is_bytes(weight):
    return weight.type.pointee == ir.IntType(8)


def _emit_factors(builder, x, weight, row, strip, pair, group):
    """Two functions, for a row and for a strip, that load the factors of a pair of inputs: one or two vectors."""
    at, first = builder.mul(pair, emit.number(2 * LANES)), builder.mul(pair, emit.number(2))
    second = builder.add(first, emit.number(1))
    paired = emit.is_bf16(x) and emit.HAS_BF16 and weight.type.pointee != emit.FLOAT

    def of_row(r):
        if paired:
            return [emit.splat_pair(builder, row[r], first)]
        return [emit.splat(builder, emit.scalar_as_float(builder, row[r], place)) for place in (first, second)]

    def of_strip(v):
        if _is_bytes(weight):
            outer, inner, scales = group
            return emit_numbers(builder, strip[v], outer, inner, scales[v], x)
        if not emit.is_bf16(weight):
            return [emit.load(builder, strip[v], builder.add(at, emit.number(part))) for part in (0, LANES)]
        pairs = emit.load_whole_pairs(builder, strip[v], at, align=64)
        return [pairs] if paired else emit.widen_pairs(builder, pairs)

    return of_row, of_strip


def _emit_ahead(builder, rows, strip, first_strip, step_bytes, index, ahead, step):
    """Prefetch weights into the second-level cache in step ``index`` of a tile; a step reads ``step_bytes`` per strip.

    A tile of one or two rows only waits for weights, so it prefetches each strip ``_LEAD`` bytes early. A taller tile
    prefetches from ``ahead``, ``step`` bytes per step: an address per strip takes too many registers. Lines may repeat.
    """
    if rows <= 2:
        lead = builder.add(builder.mul(index, emit.number(step_bytes)), emit.number(_LEAD))
        starts = [builder.add(builder.ptrtoint(base, index.type), lead) for base in strip]
        lines = [
            builder.add(start, emit.number(at)) for start in starts for at in range(0, step_bytes, emit.CACHE_LINE)
        ]
    else:
        place = builder.add(ahead, builder.mul(index, step))
        numbers = [builder.add(first_strip, emit.number(v)) for v in range(len(strip))]
        lines = [builder.add(place, builder.mul(v, emit.number(emit.CACHE_LINE))) for v in numbers]
    for line in lines:
        emit.prefetch(builder, line, closeness=2)


def _emit_sums(builder, totals, x, x_index, x_stride, weight, strip, pairs, prefetch):
    """Add the products of rows of x with the neighbouring strips ``strip`` to ``totals`` {(row, strip): vector}.

    A strip is [pairs, 16, 2] of bfloat16, [inputs, 16] of float32, or bytes as in ``int8``. For float32 x, every
    ``_SEGMENT`` pairs are summed separately, since the error of one long sum would grow with its roundings.
    """
    rows = 1 + max(r for r, _ in totals)
    row = [builder.gep(x, [builder.add(x_index, builder.mul(x_stride, emit.number(r)))]) for r in range(rows)]

    def add_products(sums, first, count):
        with _each_pair(builder, weight, strip, first, count) as (pair, group):
            prefetch(pair)
            of_row, of_strip = _emit_factors(builder, x, weight, row, strip, pair, group)
            factors = [of_strip(v) for v in range(len(strip))]
            multiply_add = emit.fma if len(factors[0]) == 2 else emit.dot
            for r in range(rows):
                for part, spread in enumerate(of_row(r)):
                    for v, factor in enumerate(factors):
                        total = sums[r, v]
                        builder.store(multiply_add(builder, factor[part], spread, builder.load(total)), total)

    if x.type.pointee != emit.FLOAT:
        add_products(totals, emit.number(0), pairs)
        return
    most, sums = emit.number(_SEGMENT), {place: cgutils.alloca_once(builder, emit.VECTOR) for place in totals}
    with cgutils.for_range(builder, builder.udiv(builder.add(pairs, emit.number(_SEGMENT - 1)), most)) as loop:
        for partial in sums.values():
            builder.store(ir.Constant(emit.VECTOR, None), partial)
        first = builder.mul(loop.index, most)
        left = builder.sub(pairs, first)
        add_products(sums, first, builder.select(builder.icmp_signed("<", left, most), left, most))
        for place, total in totals.items():
            builder.store(builder.fadd(builder.load(total), builder.load(sums[place])), total)


def _sums_at(builder, sums, first_strip, r, v):
    column = builder.mul(builder.add(first_strip, emit.number(v)), emit.number(LANES))
    at = builder.gep(sums, [builder.add(column, emit.number(r * TILE_COLUMNS))])
    return builder.bitcast(at, emit.VECTOR.as_pointer())


def _emit_end(builder, totals, first_strip, out, out_index, out_stride, how):
    """Write a tile's sums as ``how`` (finish, sums, residual) says."""
    finish, sums, residual = cgutils.unpack_tuple(builder, how)

    def target(r, v):
        return builder.add(out_index, builder.add(builder.mul(out_stride, emit.number(r)), emit.number(v * LANES)))

    def finishing(way):
        return builder.if_then(builder.icmp_signed("==", finish, emit.number(way)))

    with builder.if_then(
        builder.or_(*(builder.icmp_signed("==", finish, emit.number(w)) for w in (TO_SUMS, MORE_SUMS)))
    ):
        for (r, v), total in totals.items():
            builder.store(builder.load(total), _sums_at(builder, sums, first_strip, r, v), align=4)
    if not ALL_STRIPS:
        return
    with finishing(STORE):
        for (r, v), total in totals.items():
            emit.store(builder, out, target(r, v), builder.load(total))
    with finishing(ADD):
        for (r, v), total in totals.items():
            more = emit.load(builder, residual, target(r, v))
            emit.store(builder, out, target(r, v), builder.fadd(builder.load(total), more))
    with finishing(GATE):
        for r, v in [(r, v) for r, v in totals if v < STRIPS // 2]:
            gate, up = (builder.load(totals[r, strip]) for strip in (v, v + STRIPS // 2))
            emit.store(builder, out, target(r, v), emit.silu_mul(builder, out, gate, up))


@emitted(types.void, I64, ANY, I64, I64, ANY, I64, I64, ANY, I64, I64, ANY, I64, I64)
def _multiply(
    builder, rows, x, x_index, x_stride, weight, strip_size, steps, out, out_index, out_stride, how, ahead, step
):
    is_integer = isinstance(x.type, ir.LiteralStructType)
    if is_integer:
        step_bytes = STEP_INPUTS * LANES
    else:
        step_bytes = 2 * LANES * {ir.IntType(16): 2, emit.FLOAT: 4, ir.IntType(8): 1}[weight.type.pointee]

    def tile(rows):
        count = strips_at_once(rows)
        with cgutils.for_range(builder, emit.number(STRIPS // count)) as turn:
            first = builder.mul(turn.index, emit.number(count))
            numbers = [builder.add(first, emit.number(v)) for v in range(count)]
            strip = [builder.gep(weight, [builder.mul(strip_size, v)]) for v in numbers]

            def prefetch(index):
                _emit_ahead(builder, rows, strip, first, step_bytes, index, ahead, step)

            grid = [(r, v) for r in range(rows) for v in range(count)]
            totals = {place: cgutils.alloca_once_value(builder, ir.Constant(emit.VECTOR, None)) for place in grid}
            finish, sums, _ = cgutils.unpack_tuple(builder, how)
            with builder.if_then(builder.icmp_signed("==", finish, emit.number(MORE_SUMS))):
                for (r, v), total in totals.items():
                    builder.store(builder.load(_sums_at(builder, sums, first, r, v), align=4), total)
            if is_integer:
                groups, row = builder.udiv(x_stride, emit.number(DOT_GROUP)), builder.udiv(x_index, x_stride)
                parts = cgutils.unpack_tuple(builder, x)
                emit_integer_sums(builder, totals, parts, row, strip, groups, steps, prefetch)
            else:
                _emit_sums(builder, totals, x, x_index, x_stride, weight, strip, steps, prefetch)
            _emit_end(builder, totals, first, out, out_index, out_stride, how)

    most = 2 if _is_bytes(weight) and not is_integer else MAX_ROWS  # more rows are multiplied by unpacked numbers
    emit.switch(builder, rows, range(1, most + 1), tile)


@jit
def multiply(rows, x, x_index, x_stride, weight, strip_size, steps, out, out_index, out_stride, how, ahead, step):
    """Multiply up to ``MAX_ROWS`` rows by a panel; ``how`` is (finish, sums, residual).

    ``x`` points to rows, ``x_stride`` elements apart, of ``steps`` pairs of inputs, or is a tuple as in
    ``emit_integer_sums`` with steps of 8 inputs. Strips are ``strip_size`` apart. See ``_emit_ahead`` for the rest.
    """
    _multiply(rows, x, x_index, x_stride, weight, strip_size, steps, out, out_index, out_stride, how, ahead, step)


@emitted(types.void, ANY, ANY, I64, I64, I64, ANY)
def unpack(builder, out, weight, strip_size, first_group, groups, x):
    """Unpack a panel's ``groups`` groups, starting at ``first_group``, to ``out`` [strips, ...] for ``multiply``."""
    with cgutils.for_range(builder, emit.number(STRIPS)) as loop:
        start = builder.add(builder.mul(strip_size, loop.index), builder.mul(first_group, emit.number(GROUP_BYTES)))
        size = builder.mul(groups, emit.number(GROUP * LANES))
        target = builder.gep(out, [builder.mul(size, loop.index)])
        emit_unpack(builder, target, builder.gep(weight, [start]), groups, x)

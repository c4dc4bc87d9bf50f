"""The inner product of a linear: a tile of accumulators that stays in vector registers, emitted as LLVM IR.

It multiplies pairs of bfloat16 where the machine has an instruction for that, else float32, to which it widens both
factors as it loads them. It adds in float32, in order of the inputs, whatever the number of rows: so a row's sums have
the same bits in every product. It knows memory and strides, no layers. The element types of the pointers to inputs and
weights decide how they are read.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted, jit
from batchgen.kernels.cpu.compiled.vector_ir import (
    CACHE_LINE,
    HAS_BF16,
    VECTOR,
    emit_cases,
    emit_dot,
    emit_fma,
    emit_load,
    emit_load_whole_pairs,
    emit_prefetch,
    emit_scalar_as_float,
    emit_silu_mul,
    emit_splat,
    emit_splat_pair,
    emit_store,
    emit_widen_pairs,
    is_bf16,
    number,
)
from batchgen.kernels.cpu.layout import LANES, MAX_ROWS, STRIPS, TILE_COLUMNS
from batchgen.kernels.processor import has_wide_registers

_LEAD = 1024  # bytes: how far ahead one or two rows prefetch weights

# How a tile ends: float32 sums that the caller finishes; rounded into ``out``, with ``residual`` added or without; or,
# where the first two strips are gates and the others what they gate, ``silu(gate) * up``.
TO_SUMS, STORE, ADD, GATE = range(4)
# 32 registers of 16 numbers hold the sums of all strips. Elsewhere strips take turns, and tiles can only end in sums.
ALL_STRIPS = has_wide_registers()


def strips_at_once(rows):
    """Strips whose sums, for so many rows, fit the registers together with what is multiplied."""
    if ALL_STRIPS or rows == 1:
        return STRIPS
    return 2 if rows <= 3 else 1


def _emit_factors(builder, x, weight, row, strip, pair):
    """Two functions that load what a pair of inputs multiplies, as lists of one or two vectors, to be added in order.

    The first takes a row, the second a strip.
    """
    at, first = builder.mul(pair, number(2 * LANES)), builder.mul(pair, number(2))
    second = builder.add(first, number(1))

    def of_row(r):
        if is_bf16(x) and is_bf16(weight) and HAS_BF16:
            return [emit_splat_pair(builder, row[r], first)]
        return [emit_splat(builder, emit_scalar_as_float(builder, row[r], place)) for place in (first, second)]

    def of_strip(v):
        if not is_bf16(weight):
            return [emit_load(builder, strip[v], builder.add(at, number(part))) for part in (0, LANES)]
        pairs = emit_load_whole_pairs(builder, strip[v], at, align=64)
        return [pairs] if is_bf16(x) and HAS_BF16 else emit_widen_pairs(builder, pairs)

    return of_row, of_strip


def _emit_sums(builder, rows, x, x_index, x_stride, weight, strips, pairs, ahead, step):
    """Accumulators {(row, strip): vector} of the products of ``rows`` rows of x with neighbouring strips.

    A strip is [pairs, 16, 2] of bfloat16: for each pair of inputs, those of 16 outputs; or [inputs, 16] of float32.
    Meanwhile a cache line for each strip is prefetched with each pair, into the second cache. One or two rows, which
    never share a panel with another tile and wait for its weights alone, prefetch each strip's a little ahead. More
    rows prefetch neighbours from the address ``ahead`` on, ``step`` bytes further with each pair (one for each strip
    would take too many registers); with a step of less than that some are prefetched again, which is cheaper than
    choosing.
    """
    strip_size, first_strip, count = strips
    totals = {
        (r, v): cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for r in range(rows) for v in range(count)
    }
    row = [builder.gep(x, [builder.add(x_index, builder.mul(x_stride, number(r)))]) for r in range(rows)]
    strip = [builder.gep(weight, [builder.mul(strip_size, builder.add(first_strip, number(v)))]) for v in range(count)]
    pair_bytes = 2 * LANES * (2 if is_bf16(weight) else 4)
    with cgutils.for_range(builder, pairs) as loop:
        if rows <= 2:
            lead = builder.add(builder.mul(loop.index, number(pair_bytes)), number(_LEAD))
            starts = [builder.add(builder.ptrtoint(start, pairs.type), lead) for start in strip]
            lines = [builder.add(start, number(at)) for start in starts for at in range(0, pair_bytes, CACHE_LINE)]
        else:
            place = builder.add(ahead, builder.mul(loop.index, step))
            lines = [
                builder.add(place, builder.mul(builder.add(first_strip, number(v)), number(CACHE_LINE)))
                for v in range(count)
            ]
        for line in lines:
            emit_prefetch(builder, line, closeness=2)
        of_row, of_strip = _emit_factors(builder, x, weight, row, strip, loop.index)
        factors = [of_strip(v) for v in range(count)]
        multiply_add = emit_fma if len(factors[0]) == 2 else emit_dot
        for r in range(rows):
            for part, spread in enumerate(of_row(r)):
                for v in range(count):
                    total = totals[r, v]
                    builder.store(multiply_add(builder, factors[v][part], spread, builder.load(total)), total)
    return totals


def _emit_end(builder, totals, first_strip, out, out_index, out_stride, how):
    """Write a tile's sums as ``how`` (finish, sums, residual) says."""
    finish, sums, residual = cgutils.unpack_tuple(builder, how)

    def target(r, v):
        return builder.add(out_index, builder.add(builder.mul(out_stride, number(r)), number(v * LANES)))

    def finishing(way):
        return builder.if_then(builder.icmp_signed("==", finish, number(way)))

    with finishing(TO_SUMS):
        for (r, v), total in totals.items():
            column = builder.mul(builder.add(first_strip, number(v)), number(LANES))
            to = builder.gep(sums, [builder.add(column, number(r * TILE_COLUMNS))])
            builder.store(builder.load(total), builder.bitcast(to, VECTOR.as_pointer()), align=4)
    if not ALL_STRIPS:
        return
    with finishing(STORE):
        for (r, v), total in totals.items():
            emit_store(builder, out, target(r, v), builder.load(total))
    with finishing(ADD):
        for (r, v), total in totals.items():
            more = emit_load(builder, residual, target(r, v))
            emit_store(builder, out, target(r, v), builder.fadd(builder.load(total), more))
    with finishing(GATE):
        for r, v in [(r, v) for r, v in totals if v < STRIPS // 2]:
            gate, up = (builder.load(totals[r, strip]) for strip in (v, v + STRIPS // 2))
            emit_store(builder, out, target(r, v), emit_silu_mul(builder, out, gate, up))


@emitted(types.void, I64, ANY, I64, I64, ANY, I64, I64, ANY, I64, I64, ANY, I64, I64)
def _multiply(
    builder, rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step
):
    def tile(rows):
        count = strips_at_once(rows)
        with cgutils.for_range(builder, number(STRIPS // count)) as turn:
            first = builder.mul(turn.index, number(count))
            strips = strip_size, first, count
            totals = _emit_sums(builder, rows, x, x_index, x_stride, weight, strips, pairs, ahead, step)
            _emit_end(builder, totals, first, out, out_index, out_stride, how)

    emit_cases(builder, rows, range(1, MAX_ROWS + 1), tile)


@jit
def multiply(rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step):
    """The products of up to ``MAX_ROWS`` rows; see ``_emit_sums``. ``how`` is (finish, sums, residual)."""
    _multiply(rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)

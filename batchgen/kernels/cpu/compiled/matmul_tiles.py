"""The inner product of a linear: a tile of accumulators that stays in vector registers, emitted as LLVM IR.

It multiplies pairs of bfloat16 and adds in float32, in order of the inputs, whatever the number of rows: so a row's
sums have the same bits in every product. It knows memory and strides, no layers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted, jit
from batchgen.kernels.cpu.compiled.vector_ir import (
    CACHE_LINE,
    VECTOR,
    emit_cases,
    emit_dot,
    emit_load,
    emit_load_whole_pairs,
    emit_prefetch,
    emit_silu_mul,
    emit_splat_pair,
    emit_store,
    number,
)
from batchgen.kernels.cpu.layout import LANES, MAX_ROWS, STRIPS, TILE_COLUMNS

_LEAD = 1024  # bytes: how far ahead one or two rows prefetch weights

# How a tile ends: float32 sums that the caller finishes; rounded into ``out``, with ``residual`` added or without; or,
# where the first two strips are gates and the others what they gate, ``silu(gate) * up``.
TO_SUMS, STORE, ADD, GATE = range(4)


def _emit_sums(builder, rows, x, x_index, x_stride, weight, strip_size, pairs, ahead, step):
    """Accumulators {(row, strip): vector} of the products of ``rows`` rows of x with four neighbouring strips.

    A strip is [pairs, 16, 2]: for each pair of inputs, those of 16 outputs. Meanwhile four cache lines are prefetched
    with each pair, into the second cache. One or two rows, which never share a panel with another tile and wait for its
    weights alone, prefetch each strip's a little ahead. More rows prefetch four neighbours from the address ``ahead``
    on, ``step`` bytes further with each pair (one for each strip would take too many registers); with a step of less
    than four lines some are prefetched again, which is cheaper than choosing.
    """
    grid = [(r, v) for r in range(rows) for v in range(STRIPS)]
    totals = {place: cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for place in grid}
    row = [builder.gep(x, [builder.add(x_index, builder.mul(x_stride, number(r)))]) for r in range(rows)]
    strip = [builder.gep(weight, [builder.mul(strip_size, number(v))]) for v in range(STRIPS)]
    with cgutils.for_range(builder, pairs) as loop:
        if rows <= 2:
            lead = builder.add(builder.mul(loop.index, number(CACHE_LINE)), number(_LEAD))
            lines = [builder.add(builder.ptrtoint(start, pairs.type), lead) for start in strip]
        else:
            place = builder.add(ahead, builder.mul(loop.index, step))
            lines = [builder.add(place, number(line * CACHE_LINE)) for line in range(4)]
        for line in lines:
            emit_prefetch(builder, line, closeness=2)
        at = builder.mul(loop.index, number(2 * LANES))
        w = [emit_load_whole_pairs(builder, strip[v], at, align=64) for v in range(STRIPS)]
        for r in range(rows):
            spread = emit_splat_pair(builder, row[r], builder.mul(loop.index, number(2)))
            for v in range(STRIPS):
                total = totals[r, v]
                builder.store(emit_dot(builder, w[v], spread, builder.load(total)), total)
    return totals


def _emit_end(builder, totals, out, out_index, out_stride, how):
    """Write a tile's sums as ``how`` (finish, sums, residual) says."""
    finish, sums, residual = cgutils.unpack_tuple(builder, how)

    def target(r, v):
        return builder.add(out_index, builder.add(builder.mul(out_stride, number(r)), number(v * LANES)))

    def finishing(way):
        return builder.if_then(builder.icmp_signed("==", finish, number(way)))

    with finishing(TO_SUMS):
        for (r, v), total in totals.items():
            to = builder.gep(sums, [number(r * TILE_COLUMNS + v * LANES)])
            builder.store(builder.load(total), builder.bitcast(to, VECTOR.as_pointer()), align=4)
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
    def tile(count):
        totals = _emit_sums(builder, count, x, x_index, x_stride, weight, strip_size, pairs, ahead, step)
        _emit_end(builder, totals, out, out_index, out_stride, how)

    emit_cases(builder, rows, range(1, MAX_ROWS + 1), tile)


@jit
def multiply(rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step):
    """The products of up to ``MAX_ROWS`` rows; see ``_emit_sums``. ``how`` is (finish, sums, residual)."""
    _multiply(rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)

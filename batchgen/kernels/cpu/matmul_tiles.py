"""The inner product of a linear: a tile of accumulators that stays in vector registers, emitted as LLVM IR.

It multiplies pairs of bfloat16 and adds in float32, in order of the inputs, whatever the number of rows: so a row's
sums have the same bits in every product. It knows memory and strides, no layers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu import simd
from batchgen.kernels.cpu.rows import silu_mul
from batchgen.kernels.cpu.simd import intrinsic
from batchgen.kernels.cpu.vector_ir import (
    CACHE_LINE,
    LANES,
    VECTOR,
    emit_dot,
    emit_load,
    emit_load_whole_pairs,
    emit_prefetch,
    emit_splat_pair,
    emit_store,
)

STRIPS = 4  # vectors of outputs a tile is wide: as many streams of weights are read side by side
MAX_ROWS = 6  # 24 accumulators, 4 vectors of weights and one of inputs: 29 of 32 registers
TILE_COLUMNS = STRIPS * LANES
_LEAD = 1024  # bytes: so far ahead few rows ask for weights

# How a tile ends: float32 sums for others to finish; rounded into ``out``, as they are or after adding ``residual``;
# or, where the first two strips are gates and the others what they gate, ``silu(gate) * up``.
TO_SUMS, STORE, ADD, GATE = range(4)

_I = types.int64


def _tile_intrinsic(rows):
    """The products of ``rows`` rows of x with four neighbouring strips of weights, stored as ``how`` says.

    A strip is [pairs, 16, 2]: for each pair of inputs, those of 16 outputs. Meanwhile four cache lines are asked for
    with each pair, to come no closer than the second cache. One or two rows, which never share a panel with another
    tile and wait for its weights alone, ask for each strip's a little ahead. More rows ask for four neighbours from
    the address ``ahead`` on, ``step`` bytes further with each pair (one for each strip would take too many registers);
    with a step of less than four lines some are asked for again, which is cheaper than choosing.
    """

    @intrinsic
    def tile(_context, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step):
        out_type, how_types = out, how.types

        def generate(context, builder, _s, arguments):
            x_, x_index_, x_stride_, weight_, strip_size_, pairs_, out_, out_index_, out_stride_ = arguments[:9]
            how_, ahead_, step_ = arguments[9:]
            finish_, sums_, residual_ = cgutils.unpack_tuple(builder, how_)

            def number(value):
                return ir.Constant(pairs_.type, value)

            grid = [(r, v) for r in range(rows) for v in range(STRIPS)]
            totals = {place: cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for place in grid}
            row = [builder.gep(x_, [builder.add(x_index_, builder.mul(x_stride_, number(r)))]) for r in range(rows)]
            strip = [builder.gep(weight_, [builder.mul(strip_size_, number(v))]) for v in range(STRIPS)]
            with cgutils.for_range(builder, pairs_) as loop:
                if rows <= 2:
                    lead = builder.add(builder.mul(loop.index, number(CACHE_LINE)), number(_LEAD))
                    lines = [builder.add(builder.ptrtoint(start, pairs_.type), lead) for start in strip]
                else:
                    place = builder.add(ahead_, builder.mul(loop.index, step_))
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

            def target(r, v):
                return builder.add(out_index_, builder.add(builder.mul(out_stride_, number(r)), number(v * LANES)))

            def finishing(way):
                return builder.if_then(builder.icmp_signed("==", finish_, number(way)))

            with finishing(TO_SUMS):
                for r, v in grid:
                    to = builder.gep(sums_, [number(r * TILE_COLUMNS + v * LANES)])
                    builder.store(builder.load(totals[r, v]), builder.bitcast(to, VECTOR.as_pointer()), align=4)
            with finishing(STORE):
                for r, v in grid:
                    emit_store(builder, out_type, out_, target(r, v), builder.load(totals[r, v]))
            with finishing(ADD):
                for r, v in grid:
                    more = emit_load(builder, how_types[2], residual_, target(r, v))
                    total = builder.fadd(builder.load(totals[r, v]), more)
                    emit_store(builder, out_type, out_, target(r, v), total)
            with finishing(GATE):
                signature = simd.vec(out_type, simd.vec, simd.vec)
                for r, v in [(r, v) for r, v in grid if v < STRIPS // 2]:
                    parts = (out_, builder.load(totals[r, v]), builder.load(totals[r, v + STRIPS // 2]))
                    gated = context.compile_internal(builder, silu_mul.py_func, signature, parts)
                    emit_store(builder, out_type, out_, target(r, v), gated)
            return context.get_dummy_value()

        return types.void(x, _I, _I, weight, _I, _I, out, _I, _I, how, _I, _I), generate

    return tile


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = (_tile_intrinsic(rows) for rows in range(1, MAX_ROWS + 1))


@simd.jit
def multiply(rows, x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step):
    """The products of up to ``MAX_ROWS`` rows; see ``_tile_intrinsic``. ``how`` is (finish, sums, residual)."""
    if rows == 1:
        _tile1(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)
    elif rows == 2:
        _tile2(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)
    elif rows == 3:
        _tile3(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)
    elif rows == 4:
        _tile4(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)
    elif rows == 5:
        _tile5(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)
    else:
        _tile6(x, x_index, x_stride, weight, strip_size, pairs, out, out_index, out_stride, how, ahead, step)

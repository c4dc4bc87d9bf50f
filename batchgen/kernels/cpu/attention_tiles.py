"""The two inner products of attention, as tiles of accumulators that stay in vector registers.

Numba would spill them, so they are emitted as LLVM IR, one function for each number of query rows. The element type
of the pointers to queries and probabilities decides how they multiply: ``float32`` one by one, bfloat16 in pairs.
It knows blocks of memory, no sequences and no softmax.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu import simd
from batchgen.kernels.cpu.simd import LOG2_E, intrinsic
from batchgen.kernels.cpu.vector_ir import (
    CACHE_LINE,
    LANES,
    VECTOR,
    emit_dot,
    emit_fma,
    emit_load,
    emit_load_pairs,
    emit_load_whole_pairs,
    emit_prefetch,
    emit_splat,
    emit_splat_pair,
    emit_widen_pairs,
    is_bf16,
)

MAX_ROWS = 8
TILE = 256  # positions whose scores are held at once; a multiple of LANES
SCORE_STRIDE = TILE + 2 * LANES  # a block's last vectors may hang over
_I = types.int64

_ACCUMULATORS = 16  # vectors of sums that leave registers for operands on every machine with 32


def _vector_at(builder, base, index):
    at = builder.gep(base, [index])
    return builder.bitcast(at, VECTOR.as_pointer())


def _spread(builder, kind, base, index):
    """``base[index]``, or the pair that begins there, in every lane."""
    if is_bf16(kind):
        return emit_splat_pair(builder, base, index)
    return emit_splat(builder, builder.load(builder.gep(base, [index])))


def _multiply(builder, paired, a, b, total):
    return emit_dot(builder, a, b, total) if paired else emit_fma(builder, a, b, total)


def _score_intrinsic(rows, vectors):
    """Scores, as base-2 logarithms, of ``rows`` queries against ``16 * vectors`` neighbouring positions of one block.

    Even and odd dimensions (or pairs of them) are summed apart and added last: twice the independent additions hide
    their latency. Meanwhile one cache line after the other is prefetched from ``ahead`` on, one a dimension.
    """

    @intrinsic
    def score_tile(_context, q, width, keys, key_index, key_stride, out, out_index, ahead):
        def generate(_c, builder, _s, arguments):
            q_, width_, keys_, key_index_, key_stride_, out_, out_index_, ahead_ = arguments

            def number(value):
                return ir.Constant(width_.type, value)

            unit = 2 if is_bf16(keys) else 1  # dimensions that lie side by side
            grid = [(r, v) for r in range(rows) for v in range(vectors)]
            zero = ir.Constant(VECTOR, None)
            sums = {(r, v, half): cgutils.alloca_once_value(builder, zero) for r, v in grid for half in range(2)}
            starts = [builder.mul(width_, number(r)) for r in range(rows)]

            def factors(d):
                """Keys from dimension ``d`` on and, for each, the place of what they are multiplied by."""
                at = builder.add(key_index_, builder.mul(d, key_stride_))
                places = [builder.add(at, number(v * LANES * unit)) for v in range(vectors)]
                if unit == 1:
                    return [([emit_load(builder, keys, keys_, place) for place in places], d)]
                pairs = [emit_load_whole_pairs(builder, keys_, place, align=4) for place in places]
                if is_bf16(q):
                    return [(pairs, d)]
                evens, odds = zip(*(emit_widen_pairs(builder, pair) for pair in pairs), strict=True)
                return [(evens, d), (odds, builder.add(d, number(1)))]

            def dimension(d, half):
                for line in range(unit):
                    place = builder.mul(builder.add(d, number(line)), number(CACHE_LINE))
                    emit_prefetch(builder, builder.add(ahead_, place), closeness=2)
                for key, place in factors(d):
                    for r in range(rows):
                        spread = _spread(builder, q, q_, builder.add(starts[r], place))
                        for v in range(vectors):
                            total = sums[r, v, half]
                            builder.store(_multiply(builder, is_bf16(q), spread, key[v], builder.load(total)), total)

            # Both halves at once where the registers hold their sums, one after the other where not.
            for halves in [(0, 1)] if 2 * len(grid) <= _ACCUMULATORS else [(0,), (1,)]:
                with cgutils.for_range(builder, builder.udiv(width_, number(2 * unit))) as loop:
                    for half in halves:
                        first = builder.add(builder.mul(loop.index, number(2 * unit)), number(half * unit))
                        dimension(first, half)
            to_base_2 = emit_splat(builder, ir.Constant(VECTOR.element, float(np.float32(LOG2_E))))
            for r, v in grid:
                at = builder.add(out_index_, number(r * SCORE_STRIDE + v * LANES))
                total = builder.fadd(builder.load(sums[r, v, 0]), builder.load(sums[r, v, 1]))
                builder.store(builder.fmul(total, to_base_2), _vector_at(builder, out_, at), align=4)
            return _c.get_dummy_value()

        return types.void(q, _I, keys, _I, _I, out, _I, _I), generate

    return score_tile


def _value_intrinsic(rows, vectors):
    """Add the values of ``count`` pairs of positions, weighted, to ``vectors`` vectors of ``rows`` accumulators.

    The first position of a pair is found from ``value_index`` on, its second ``apart`` elements further. Meanwhile
    four cache lines a pair are prefetched from ``ahead`` on.
    """

    @intrinsic
    def accumulate_tile(
        _context, weights, weight_index, values, value_index, apart, width, count, out, out_index, ahead
    ):
        def generate(_c, builder, _s, arguments):
            weights_, weight_index_, values_, value_index_, apart_, width_, count_ = arguments[:7]
            out_, out_index_, ahead_ = arguments[7:]

            def number(value):
                return ir.Constant(width_.type, value)

            def place(r, v):
                row = builder.add(builder.mul(width_, number(r)), number(v * LANES))
                return _vector_at(builder, out_, builder.add(out_index_, row))

            def add(value, paired, weight_at):
                for r, start in enumerate(starts):
                    spread = _spread(builder, weights, weights_, builder.add(start, weight_at))
                    for v in range(vectors):
                        total = sums[r * vectors + v]
                        builder.store(_multiply(builder, paired, spread, value[v], builder.load(total)), total)

            def loaded(at):
                return [emit_load(builder, values, values_, builder.add(at, number(v * LANES))) for v in range(vectors)]

            places = [place(r, v) for r in range(rows) for v in range(vectors)]
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
            for where, total in zip(places, sums, strict=True):
                builder.store(builder.load(where, align=4), total)
            starts = [builder.add(weight_index_, number(r * SCORE_STRIDE)) for r in range(rows)]
            with cgutils.for_range(builder, count_) as loop:
                position = builder.mul(loop.index, number(2))
                for line in range(4):
                    near = builder.add(builder.mul(position, number(2)), number(line))
                    emit_prefetch(builder, builder.add(ahead_, builder.mul(near, number(CACHE_LINE))), closeness=2)
                at = builder.add(value_index_, builder.mul(position, width_))
                then = builder.add(at, apart_)
                if is_bf16(weights):
                    add(emit_load_pairs(builder, values_, at, then, vectors), True, position)
                else:
                    add(loaded(at), False, position)
                    add(loaded(then), False, builder.add(position, number(1)))
            for where, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), where, align=4)
            return _c.get_dummy_value()

        return types.void(weights, _I, values, _I, _I, _I, _I, out, _I, _I), generate

    return accumulate_tile


# Tiles of accumulators that fit 32 vector registers, by number of query rows.
_score1, _score2, _score4, _score8 = (_score_intrinsic(rows, 2) for rows in (1, 2, 4, 8))
_score1_thin, _score2_thin, _score4_thin, _score8_thin = (_score_intrinsic(rows, 1) for rows in (1, 2, 4, 8))
_wide1, _wide2, _wide4, _wide8 = (_value_intrinsic(rows, 4 if rows < MAX_ROWS else 2) for rows in (1, 2, 4, 8))
_thin1, _thin2, _thin4, _thin8 = (_value_intrinsic(rows, 1) for rows in (1, 2, 4, 8))


@simd.jit
def score(rows, count, q, width, keys, at, pack, stride, out, to, ahead):
    """Scores of ``rows`` queries against ``count`` positions of a block, and up to 31 more that the caller masks."""
    j = 0
    while j < count:
        wide = count - j > LANES
        if rows == 1 and wide:
            _score1(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif rows == 1:
            _score1_thin(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif rows == 2 and wide:
            _score2(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif rows == 2:
            _score2_thin(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif rows == 4 and wide:
            _score4(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif rows == 4:
            _score4_thin(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        elif wide:
            _score8(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        else:
            _score8_thin(q, width, keys, at + j * pack, stride, out, to + j, ahead)
        j += 2 * LANES if wide else LANES


@simd.jit
def accumulate(rows, weights, weight_index, values, value_index, apart, width, count, out, ahead):
    """``out[r, :width]`` plus the values of ``count`` pairs of positions times ``weights[r]``, pair by pair."""
    vectors = width // LANES
    step = 2 if rows == MAX_ROWS else 4
    whole = vectors - vectors % step
    for v in range(0, whole, step):
        at, to = value_index + v * LANES, v * LANES
        if rows == 1:
            _wide1(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        elif rows == 2:
            _wide2(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        elif rows == 4:
            _wide4(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        else:
            _wide8(weights, weight_index, values, at, apart, width, count, out, to, ahead)
    for v in range(whole, vectors):
        at, to = value_index + v * LANES, v * LANES
        if rows == 1:
            _thin1(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        elif rows == 2:
            _thin2(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        elif rows == 4:
            _thin4(weights, weight_index, values, at, apart, width, count, out, to, ahead)
        else:
            _thin8(weights, weight_index, values, at, apart, width, count, out, to, ahead)

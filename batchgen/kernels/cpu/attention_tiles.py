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
CHUNK = 2 * LANES  # neighbouring positions that are scored side by side
NUM_STREAMS = 4  # places in memory that are read at once: one alone does not fill a core's share of the bandwidth
TILE = 256  # positions whose scores are held at once; a multiple of CHUNK * NUM_STREAMS
SCORE_STRIDE = TILE + 2 * LANES  # a block's last vectors may hang over
_I = types.int64


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


def _score_intrinsic(rows, vectors, chunks=1):
    """Scores, as base-2 logarithms, of ``rows`` queries against ``chunks`` times ``16 * vectors`` positions.

    Chunk c begins at ``starts[c]`` in the keys. A score is a sum over dimensions (or pairs of them) in order; there
    are enough of them under way to hide the latency of an addition. Meanwhile the cache lines from each of ``ahead``
    on are prefetched, one a dimension.
    """

    @intrinsic
    def score_tile(_context, q, width, keys, starts, key_stride, out, out_index, ahead):
        def generate(_c, builder, _s, arguments):
            q_, width_, keys_, starts_, key_stride_, out_, out_index_, ahead_ = arguments

            def number(value):
                return ir.Constant(width_.type, value)

            unit = 2 if is_bf16(keys) else 1  # dimensions that lie side by side
            grid = [(r, v) for r in range(rows) for v in range(chunks * vectors)]
            sums = {place: cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for place in grid}
            first = [builder.mul(width_, number(r)) for r in range(rows)]
            begins = [
                builder.add(start, number(v * LANES * unit))
                for start in cgutils.unpack_tuple(builder, starts_)
                for v in range(vectors)
            ]
            streams = cgutils.unpack_tuple(builder, ahead_)

            def factors(d):
                """Keys from dimension ``d`` on and, for each, the place of what they are multiplied by."""
                row = builder.mul(d, key_stride_)
                places = [builder.add(begin, row) for begin in begins]
                if unit == 1:
                    return [([emit_load(builder, keys, keys_, place) for place in places], d)]
                pairs = [emit_load_whole_pairs(builder, keys_, place, align=4) for place in places]
                if is_bf16(q):
                    return [(pairs, d)]
                evens, odds = zip(*(emit_widen_pairs(builder, pair) for pair in pairs), strict=True)
                return [(evens, d), (odds, builder.add(d, number(1)))]

            with cgutils.for_range(builder, builder.udiv(width_, number(unit))) as loop:
                d = builder.mul(loop.index, number(unit))
                for line in range(unit):
                    place = builder.mul(builder.add(d, number(line)), number(CACHE_LINE))
                    for stream in streams:
                        emit_prefetch(builder, builder.add(stream, place), closeness=2)
                for key, place in factors(d):
                    for r in range(rows):
                        spread = _spread(builder, q, q_, builder.add(first[r], place))
                        for v in range(chunks * vectors):
                            total = sums[r, v]
                            builder.store(_multiply(builder, is_bf16(q), spread, key[v], builder.load(total)), total)
            to_base_2 = emit_splat(builder, ir.Constant(VECTOR.element, float(np.float32(LOG2_E))))
            for r, v in grid:
                at = builder.add(out_index_, number(r * SCORE_STRIDE + v * LANES))
                scaled = builder.fmul(builder.load(sums[r, v]), to_base_2)
                builder.store(scaled, _vector_at(builder, out_, at), align=4)
            return _c.get_dummy_value()

        return types.void(q, _I, keys, starts, _I, out, _I, ahead), generate

    return score_tile


def _value_intrinsic(rows, vectors):
    """Add the weighted values of ``NUM_STREAMS`` chunks to ``vectors`` vectors of ``rows`` accumulators.

    ``chunks`` are the addresses of their values [CHUNK, width] from the first of these vectors on. Two neighbours of
    each chunk are added in turn, then the next two of each. Meanwhile ``vectors`` cache lines for each of those two
    are prefetched, from each of ``ahead`` on.
    """

    @intrinsic
    def accumulate_tile(_context, weights, weight_index, values, chunks, width, out, out_index, ahead):
        def generate(_c, builder, _s, arguments):
            weights_, weight_index_, values_, chunks_, width_, out_, out_index_, ahead_ = arguments

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

            def loaded(base, at):
                return [emit_load(builder, values, base, builder.add(at, number(v * LANES))) for v in range(vectors)]

            places = [place(r, v) for r in range(rows) for v in range(vectors)]
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
            for where, total in zip(places, sums, strict=True):
                builder.store(builder.load(where, align=4), total)
            starts = [builder.add(weight_index_, number(r * SCORE_STRIDE)) for r in range(rows)]
            bases = [builder.inttoptr(chunk, values_.type) for chunk in cgutils.unpack_tuple(builder, chunks_)]
            streams = cgutils.unpack_tuple(builder, ahead_)
            with cgutils.for_range(builder, number(CHUNK // 2)) as loop:
                position = builder.mul(loop.index, number(2))
                at = builder.mul(position, width_)
                then = builder.add(at, width_)
                lines = builder.mul(loop.index, number(vectors * CACHE_LINE))
                for c, base in enumerate(bases):
                    for line in range(vectors):
                        near = builder.add(streams[c], builder.add(lines, number(line * CACHE_LINE)))
                        emit_prefetch(builder, near, closeness=2)
                    weight_at = builder.add(position, number(c * CHUNK))
                    if is_bf16(weights):
                        add(emit_load_pairs(builder, base, at, then, vectors), True, weight_at)
                    else:
                        add(loaded(base, at), False, weight_at)
                        add(loaded(base, then), False, builder.add(weight_at, number(1)))
            for where, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), where, align=4)
            return _c.get_dummy_value()

        return types.void(weights, _I, values, chunks, _I, out, _I, ahead), generate

    return accumulate_tile


# Tiles of accumulators that fit 32 vector registers, by number of query rows.
_score1, _score2, _score4, _score8 = (_score_intrinsic(rows, 2) for rows in (1, 2, 4, 8))
_score1_thin, _score2_thin, _score4_thin, _score8_thin = (_score_intrinsic(rows, 1) for rows in (1, 2, 4, 8))
_score1_chunks, _score2_chunks = (_score_intrinsic(rows, 2, NUM_STREAMS) for rows in (1, 2))
_wide1, _wide2, _wide4, _wide8 = (_value_intrinsic(rows, 4 if rows < MAX_ROWS else 2) for rows in (1, 2, 4, 8))
_thin1, _thin2, _thin4, _thin8 = (_value_intrinsic(rows, 1) for rows in (1, 2, 4, 8))


@simd.jit
def score_chunks(rows, q, width, keys, starts, stride, out, to, ahead):
    """Scores of one or two queries against ``NUM_STREAMS`` chunks of ``CHUNK`` positions; tuples of as many."""
    if rows == 1:
        _score1_chunks(q, width, keys, starts, stride, out, to, ahead)
    else:
        _score2_chunks(q, width, keys, starts, stride, out, to, ahead)


@simd.jit
def score(rows, count, q, width, keys, at, pack, stride, out, to, ahead):
    """Scores of ``rows`` queries against ``count`` positions of a block, and up to 31 more that the caller masks.

    ``ahead`` is the address of what is prefetched meanwhile.
    """
    j, near = 0, (ahead,)
    while j < count:
        start, wide = (at + j * pack,), count - j > LANES
        if rows == 1 and wide:
            _score1(q, width, keys, start, stride, out, to + j, near)
        elif rows == 1:
            _score1_thin(q, width, keys, start, stride, out, to + j, near)
        elif rows == 2 and wide:
            _score2(q, width, keys, start, stride, out, to + j, near)
        elif rows == 2:
            _score2_thin(q, width, keys, start, stride, out, to + j, near)
        elif rows == 4 and wide:
            _score4(q, width, keys, start, stride, out, to + j, near)
        elif rows == 4:
            _score4_thin(q, width, keys, start, stride, out, to + j, near)
        elif wide:
            _score8(q, width, keys, start, stride, out, to + j, near)
        else:
            _score8_thin(q, width, keys, start, stride, out, to + j, near)
        j += 2 * LANES if wide else LANES


@simd.inline
def _shifted(four, by):
    return four[0] + by, four[1] + by, four[2] + by, four[3] + by


@simd.jit
def accumulate(rows, weights, weight_index, values, itemsize, chunks, width, out, ahead):
    """``out[r, :width]`` plus the values at the addresses ``chunks`` times ``weights[r]``; see ``_value_intrinsic``."""
    vectors = width // LANES
    step = 2 if rows == MAX_ROWS else 4
    whole = vectors - vectors % step
    for v in range(0, whole, step):
        parts, to = _shifted(chunks, v * LANES * itemsize), v * LANES
        near = _shifted(ahead, v * CHUNK // 2 * CACHE_LINE)
        if rows == 1:
            _wide1(weights, weight_index, values, parts, width, out, to, near)
        elif rows == 2:
            _wide2(weights, weight_index, values, parts, width, out, to, near)
        elif rows == 4:
            _wide4(weights, weight_index, values, parts, width, out, to, near)
        else:
            _wide8(weights, weight_index, values, parts, width, out, to, near)
    for v in range(whole, vectors):
        parts, to = _shifted(chunks, v * LANES * itemsize), v * LANES
        near = _shifted(ahead, v * CHUNK // 2 * CACHE_LINE)
        if rows == 1:
            _thin1(weights, weight_index, values, parts, width, out, to, near)
        elif rows == 2:
            _thin2(weights, weight_index, values, parts, width, out, to, near)
        elif rows == 4:
            _thin4(weights, weight_index, values, parts, width, out, to, near)
        else:
            _thin8(weights, weight_index, values, parts, width, out, to, near)

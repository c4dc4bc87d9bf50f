"""The two inner products of attention, as tiles of accumulators that stay in vector registers.

Numba would spill them, so they are emitted as LLVM IR, one function for each number of query rows. The element type
of the pointers to queries and probabilities decides how they multiply: ``float32`` one by one, bfloat16 in pairs.
Keys and values that are integers count as such: the caller knows their scales.
It knows blocks of memory, no sequences and no softmax.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted, inline, jit, shifted
from batchgen.kernels.cpu.layout import CHUNK, LANES, MAX_QUERIES, SCORE_STRIDE

MOST_TOGETHER = 4  # query rows that are scored against several chunks at once
ROW_COUNTS = (1, 2, 4, MAX_QUERIES)  # of query rows, for each of which there are tiles that fit 32 vector registers


def _vector_at(builder, base, index):
    return builder.bitcast(builder.gep(base, [index]), emit.VECTOR.as_pointer())


def _spread(builder, base, index):
    """``base[index]``, or the pair of bfloat16 that begins there, in every lane."""
    if emit.is_bf16(base):
        return emit.splat_pair(builder, base, index)
    return emit.splat(builder, builder.load(builder.gep(base, [index])))


def _multiply(builder, paired, a, b, total):
    return emit.dot(builder, a, b, total) if paired else emit.fma(builder, a, b, total)


def _factors(builder, q, keys, places, d):
    """Keys of dimension ``d`` (or the pair from it on) at ``places`` and, for each, what dimension of q they meet."""
    if not emit.is_bf16(keys):
        return [([emit.load(builder, keys, place) for place in places], d)]
    pairs = [emit.load_whole_pairs(builder, keys, place, align=4) for place in places]
    if emit.is_bf16(q):
        return [(pairs, d)]
    evens, odds = zip(*(emit.widen_pairs(builder, pair) for pair in pairs), strict=True)
    return [(evens, d), (odds, builder.add(d, emit.number(1)))]


def _emit_scores(builder, rows, vectors, q, width, keys, starts, key_stride, out, out_index):
    """Scores, as base-2 logarithms, of ``rows`` queries against ``16 * vectors`` positions of each chunk.

    Chunks begin at ``starts`` in the keys. A score is a sum over dimensions (or pairs of them) in order; there are
    enough of them under way to hide the latency of an addition.
    """
    unit = 2 if emit.is_bf16(keys) else 1  # dimensions that lie side by side
    starts = cgutils.unpack_tuple(builder, starts)
    columns = range(len(starts) * vectors)
    grid = [(r, v) for r in range(rows) for v in columns]
    sums = {place: cgutils.alloca_once_value(builder, ir.Constant(emit.VECTOR, None)) for place in grid}
    first = [builder.mul(width, emit.number(r)) for r in range(rows)]
    begins = [builder.add(start, emit.number(v * LANES * unit)) for start in starts for v in range(vectors)]
    with cgutils.for_range(builder, builder.udiv(width, emit.number(unit))) as loop:
        d = builder.mul(loop.index, emit.number(unit))
        row = builder.mul(d, key_stride)
        for key, place in _factors(builder, q, keys, [builder.add(begin, row) for begin in begins], d):
            for r in range(rows):
                spread = _spread(builder, q, builder.add(first[r], place))
                for v in columns:
                    total = sums[r, v]
                    builder.store(_multiply(builder, emit.is_bf16(q), spread, key[v], builder.load(total)), total)
    to_base_2 = emit.splat(builder, ir.Constant(emit.FLOAT, float(np.float32(emit.LOG2_E))))
    for r, v in grid:
        at = builder.add(out_index, emit.number(r * SCORE_STRIDE + v * LANES))
        builder.store(builder.fmul(builder.load(sums[r, v]), to_base_2), _vector_at(builder, out, at), align=4)


def _scores(vectors, row_counts):
    """Function of the tiles of ``_emit_scores`` for each of ``row_counts``."""

    @emitted(types.void, I64, ANY, I64, ANY, ANY, I64, ANY, I64)
    def scores(builder, rows, q, width, keys, starts, key_stride, out, out_index):
        def tile(count):
            _emit_scores(builder, count, vectors, q, width, keys, starts, key_stride, out, out_index)

        emit.switch(builder, rows, row_counts, tile)

    return scores


def _emit_values(builder, rows, vectors, weights, weight_index, chunks, width, out, out_index):
    """Add the weighted values of ``NUM_STREAMS`` chunks to ``vectors`` vectors of ``rows`` accumulators.

    ``chunks`` are pointers to their values [CHUNK, width] from the first of these vectors on. Two neighbours of
    each chunk are added in turn, then the next two of each.
    """

    def place(r, v):
        row = builder.add(builder.mul(width, emit.number(r)), emit.number(v * LANES))
        return _vector_at(builder, out, builder.add(out_index, row))

    def add(value, paired, weight_at):
        for r, start in enumerate(starts):
            spread = _spread(builder, weights, builder.add(start, weight_at))
            for v in range(vectors):
                total = sums[r * vectors + v]
                builder.store(_multiply(builder, paired, spread, value[v], builder.load(total)), total)

    def loaded(base, at):
        return [emit.load(builder, base, builder.add(at, emit.number(v * LANES))) for v in range(vectors)]

    places = [place(r, v) for r in range(rows) for v in range(vectors)]
    sums = [cgutils.alloca_once(builder, emit.VECTOR) for _ in places]
    for where, total in zip(places, sums, strict=True):
        builder.store(builder.load(where, align=4), total)
    starts = [builder.add(weight_index, emit.number(r * SCORE_STRIDE)) for r in range(rows)]
    with cgutils.for_range(builder, emit.number(CHUNK // 2)) as loop:
        position = builder.mul(loop.index, emit.number(2))
        at = builder.mul(position, width)
        then = builder.add(at, width)
        for c, base in enumerate(cgutils.unpack_tuple(builder, chunks)):
            weight_at = builder.add(position, emit.number(c * CHUNK))
            if emit.is_bf16(weights):
                add(emit.load_pairs(builder, base, at, then, vectors), True, weight_at)
            else:
                add(loaded(base, at), False, weight_at)
                add(loaded(base, then), False, builder.add(weight_at, emit.number(1)))
    for where, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), where, align=4)


@jit
def _wide_vectors(rows):
    """Vectors of values that a tile of so many rows is wide, at most: its sums fit the registers."""
    return 2 if rows == MAX_QUERIES else 4


def _values(is_wide):
    """Function of the tiles of ``_emit_values``, as wide as their rows allow or one vector wide."""

    @emitted(types.void, I64, ANY, I64, ANY, I64, ANY, I64)
    def values(builder, rows, weights, weight_index, chunks, width, out, out_index):
        def tile(count):
            vectors = _wide_vectors.py_func(count) if is_wide else 1
            _emit_values(builder, count, vectors, weights, weight_index, chunks, width, out, out_index)

        emit.switch(builder, rows, ROW_COUNTS, tile)

    return values


_scores_wide, _scores_thin = _scores(2, ROW_COUNTS), _scores(1, ROW_COUNTS)
_scores_of_four_chunks, _scores_of_two = _scores(2, (1, 2)), _scores(2, (4,))
_values_wide, _values_thin = _values(True), _values(False)


@jit
def score_chunks(rows, q, width, keys, starts, stride, out, to):
    """Scores of up to ``MOST_TOGETHER`` queries against ``NUM_STREAMS`` chunks of ``CHUNK`` positions.

    ``starts`` is a tuple of as many. Four queries meet two chunks at a time: the registers hold the sums.
    """
    if rows <= 2:
        _scores_of_four_chunks(rows, q, width, keys, starts, stride, out, to)
    else:
        _scores_of_two(rows, q, width, keys, starts[:2], stride, out, to)
        _scores_of_two(rows, q, width, keys, starts[2:], stride, out, to + 2 * CHUNK)


@jit
def score(rows, count, q, width, keys, at, pack, stride, out, to):
    """Scores of ``rows`` queries against ``count`` positions of a block, and up to 31 more that the caller masks."""
    j = 0
    while j < count:
        start = (at + j * pack,)
        if count - j > LANES:
            _scores_wide(rows, q, width, keys, start, stride, out, to + j)
            j += 2 * LANES
        else:
            _scores_thin(rows, q, width, keys, start, stride, out, to + j)
            j += LANES


@inline
def _shifted(four, by):
    """Four pointers, each ``by`` elements further on."""
    return shifted(four[0], by), shifted(four[1], by), shifted(four[2], by), shifted(four[3], by)


@jit
def accumulate(rows, weights, weight_index, chunks, width, out):
    """``out[r, :width]`` plus the values at the pointers ``chunks`` times ``weights[r]``; see ``_emit_values``."""
    vectors = width // LANES
    step = _wide_vectors(rows)
    whole = vectors - vectors % step
    for v in range(0, whole, step):
        _values_wide(rows, weights, weight_index, _shifted(chunks, v * LANES), width, out, v * LANES)
    for v in range(whole, vectors):
        _values_thin(rows, weights, weight_index, _shifted(chunks, v * LANES), width, out, v * LANES)

"""The two inner products of attention as tiles of accumulators in vector registers, emitted as LLVM IR.

The element type of the pointers to queries and probabilities decides how products are computed; callers apply scales.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.compiled.simd import ANY, I64, emitted, inline, jit, shifted
from batchgen.kernels.cpu.layout import CHUNK, LANES, MAX_QUERIES, SCORE_STRIDE
from batchgen.kernels.processor import has_wide_registers

_MAX_SUMS = 4  # sums of 16 numbers if each takes two of 16 registers, and factors need some
# If parts of a tile take turns: the dimensions of keys, or positions of each chunk's values, that all parts use before
# the next ones. These stay in the first-level cache, and memory is read from several places at once.
_DIMENSIONS, _POSITIONS = LANES, 8
MAX_TOGETHER = 4  # most query rows that are scored against several chunks at once
ROW_COUNTS = (1, 2, 3, 4, MAX_QUERIES)  # heights of tiles, in query rows; all fit 32 vector registers


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
    """[(vectors of keys at ``places``, dimension of q to multiply by)] for dimension ``d``, or for the pair from it."""
    if not emit.is_bf16(keys):
        return [([emit.load(builder, keys, place) for place in places], d)]
    pairs = [emit.load_whole_pairs(builder, keys, place, align=4) for place in places]
    if emit.is_bf16(q):
        return [(pairs, d)]
    evens, odds = zip(*(emit.widen_pairs(builder, pair) for pair in pairs), strict=True)
    return [(evens, d), (odds, builder.add(d, emit.number(1)))]


def _turns(rows, columns, base):
    """A tile's rows and columns in parts whose sums fit the registers.

    One or two rows stay one part, since they wait for memory anyway, unless ``base`` points to integers.
    """
    if has_wide_registers() or (rows <= 2 and not emit.is_int8(base)):
        return [(range(rows), range(columns))]
    tall = min(rows, 4 if rows == MAX_QUERIES else 2)  # 2 x 2 parts read the least, 4 x 1 compute the least
    wide = _MAX_SUMS // tall
    return [
        (range(r, min(r + tall, rows)), range(v, min(v + wide, columns)))
        for v in range(0, columns, wide)
        for r in range(0, rows, tall)
    ]


@contextmanager
def _part_of_tile(builder, turn, places):
    """Context with the sums of a part of a tile in registers, loaded from ``places`` and stored there at its end."""
    rows, columns = turn
    sums = {(r, v): cgutils.alloca_once(builder, emit.VECTOR) for r in rows for v in columns}
    for at, total in sums.items():
        builder.store(builder.load(places[at], align=4), total)
    yield sums
    for at, total in sums.items():
        builder.store(builder.load(total), places[at], align=4)


def _emit_scores(builder, rows, vectors, q, width, keys, starts, key_stride, ahead, out, out_index):
    """Write the scores, as base-2 logarithms, of ``rows`` queries against ``16 * vectors`` positions of each chunk.

    Chunks begin at ``starts`` in the keys; if there are several, memory ``ahead`` bytes after them is prefetched. A
    score is a sum over dimensions (or pairs of them) in order. Parts of a tile take turns, to read chunks in parallel.
    """
    unit = 2 if emit.is_bf16(keys) else 1  # dimensions that lie side by side
    starts = cgutils.unpack_tuple(builder, starts)
    begins = [builder.add(start, emit.number(v * LANES * unit)) for start in starts for v in range(vectors)]
    turns = _turns(rows, len(begins), keys)
    num_turns, size = emit.number(1), width
    if len(turns) > 1:
        num_turns, size = builder.udiv(width, emit.number(_DIMENSIONS)), emit.number(_DIMENSIONS)
    results = {
        (r, v): _vector_at(builder, out, builder.add(out_index, emit.number(r * SCORE_STRIDE + v * LANES)))
        for r in range(rows)
        for v in range(len(begins))
    }
    places = results if len(turns) > 1 else {at: cgutils.alloca_once(builder, emit.VECTOR) for at in results}
    for place in places.values():
        builder.store(ir.Constant(emit.VECTOR, None), place, align=4)
    first = [builder.mul(width, emit.number(r)) for r in range(rows)]
    with cgutils.for_range(builder, num_turns) as outer:
        for turn in turns:
            some_rows, columns = turn
            with (
                _part_of_tile(builder, turn, places) as sums,
                cgutils.for_range(builder, builder.udiv(size, emit.number(unit))) as loop,
            ):
                d = builder.add(builder.mul(outer.index, size), builder.mul(loop.index, emit.number(unit)))
                row = builder.mul(d, key_stride)
                lines = [builder.add(begins[v], row) for v in columns]
                if len(starts) > 1 and len(turns) == 1:
                    _prefetch(builder, keys, lines, LANES * unit, ahead)
                for key, place in _factors(builder, q, keys, lines, d):
                    for r in some_rows:
                        spread = _spread(builder, q, builder.add(first[r], place))
                        _add(builder, emit.is_bf16(q), spread, key, [sums[r, v] for v in columns])
    to_base_2 = emit.splat(builder, ir.Constant(emit.FLOAT, float(np.float32(emit.LOG2_E))))
    for at, result in results.items():
        builder.store(builder.fmul(builder.load(places[at], align=4), to_base_2), result, align=4)


def _prefetch(builder, base, places, apart, ahead):
    """Prefetch the lines ``ahead`` bytes after ``base`` at ``places``, which are ``apart`` elements from each other."""
    element = base.type.pointee
    num_bytes = apart * (4 if element == emit.FLOAT else element.width // 8)
    for place in places[:: max(emit.CACHE_LINE // num_bytes, 1)]:
        address = builder.ptrtoint(builder.gep(base, [place]), ir.IntType(64))
        emit.prefetch(builder, builder.add(address, ahead), closeness=2)


def _add(builder, paired, spread, factors, totals):
    for factor, total in zip(factors, totals, strict=True):
        builder.store(_multiply(builder, paired, spread, factor, builder.load(total)), total)


def _scores(vectors, row_counts):
    @emitted(types.void, I64, ANY, I64, ANY, ANY, I64, I64, ANY, I64)
    def scores(builder, rows, q, width, keys, starts, key_stride, ahead, out, out_index):
        def tile(count):
            _emit_scores(builder, count, vectors, q, width, keys, starts, key_stride, ahead, out, out_index)

        emit.switch(builder, rows, row_counts, tile)

    return scores


def _emit_values(builder, rows, vectors, weights, weight_index, chunks, some, width, out, out_index):
    """Add weighted values of some of ``NUM_STREAMS`` chunks to ``vectors`` vectors of ``rows`` accumulators.

    ``some`` is (first chunk, last chunk). A chunk is (pointer to its values [CHUNK, width], at the first vector; bytes
    from there to what few rows prefetch). Each chunk in turn adds two positions.
    """
    some = cgutils.unpack_tuple(builder, some)
    chunks = [cgutils.unpack_tuple(builder, chunk) for chunk in cgutils.unpack_tuple(builder, chunks)]
    turns = _turns(rows, vectors, chunks[0][0])
    size = emit.number(CHUNK if len(turns) == 1 else _POSITIONS)
    starts = [builder.add(weight_index, emit.number(r * SCORE_STRIDE)) for r in range(rows)]
    places: dict[tuple[int, int], ir.Value] = {}
    for r in range(rows):
        row = builder.add(out_index, builder.mul(width, emit.number(r)))
        places |= {(r, v): _vector_at(builder, out, builder.add(row, emit.number(v * LANES))) for v in range(vectors)}
    with cgutils.for_range(builder, builder.udiv(emit.number(CHUNK), size)) as outer:
        for turn in turns:
            with (
                _part_of_tile(builder, turn, places) as sums,
                cgutils.for_range(builder, builder.udiv(size, emit.number(2))) as loop,
            ):
                position = builder.add(builder.mul(outer.index, size), builder.mul(loop.index, emit.number(2)))
                _emit_pairs_of_values(builder, turn, sums, position, weights, starts, chunks, some, width)


def _emit_pairs_of_values(builder, turn, sums, position, weights, starts, chunks, some, width):
    """Add the weighted values at ``position`` of each chunk and at the position after it."""
    rows, columns = turn
    at = builder.mul(position, width)
    then = builder.add(at, width)

    def add(value, paired, weight_at):
        for r in rows:
            spread = _spread(builder, weights, builder.add(starts[r], weight_at))
            _add(builder, paired, spread, value, [sums[r, v] for v in columns])

    def loaded(base, at):
        return [emit.load(builder, base, builder.add(at, emit.number(v * LANES))) for v in columns]

    first, last = some
    for c, (base, ahead) in enumerate(chunks):
        weight_at, number = builder.add(position, emit.number(c * CHUNK)), emit.number(c)
        is_met = builder.and_(builder.icmp_signed("<=", first, number), builder.icmp_signed("<=", number, last))
        with builder.if_then(is_met, likely=True):
            for begin in (at, then) if len(rows) <= MAX_TOGETHER else ():
                places = [builder.add(begin, emit.number(v * LANES)) for v in columns]
                _prefetch(builder, base, places, LANES, ahead)
            if emit.is_bf16(weights):
                add(emit.load_pairs(builder, base, at, then, len(columns)), True, weight_at)
            else:
                add(loaded(base, at), False, weight_at)
                add(loaded(base, then), False, builder.add(weight_at, emit.number(1)))


_WHOLE, _IS_WHOLE = 8, has_wide_registers()  # vectors of 128 dimensions, and whether their sums fit the registers


@jit
def _wide_vectors(rows, vectors):
    """The number of vectors, of ``vectors``, in a tile of ``rows`` rows of values: its sums must fit the registers.

    One or two rows wait for memory, which is read faster in whole rows of 128 dimensions.
    """
    if rows == MAX_QUERIES:
        return 2
    return _WHOLE if _IS_WHOLE and rows <= 2 and vectors % _WHOLE == 0 else 4


def _values(widths):
    """A numba function for tiles of ``_emit_values``; ``widths`` maps each height in rows to a width in vectors."""

    @emitted(types.void, I64, ANY, I64, ANY, ANY, I64, ANY, I64)
    def values(builder, rows, weights, weight_index, chunks, some, width, out, out_index):
        def tile(count):
            _emit_values(builder, count, widths[count], weights, weight_index, chunks, some, width, out, out_index)

        emit.switch(builder, rows, tuple(widths), tile)

    return values


_scores_wide, _scores_thin = _scores(2, ROW_COUNTS), _scores(1, ROW_COUNTS)
_scores_of_four_chunks, _scores_of_two = _scores(2, (1, 2)), _scores(2, (3, 4))
_values_whole, _values_thin = _values(dict.fromkeys((1, 2), _WHOLE)), _values(dict.fromkeys(ROW_COUNTS, 1))
_values_wide = _values({rows: _wide_vectors.py_func(rows, 4) for rows in ROW_COUNTS})


@jit
def score_chunks(rows, last, q, width, keys, starts, stride, ahead, out, to):
    """Score up to ``MAX_TOGETHER`` queries against ``NUM_STREAMS`` chunks of ``CHUNK`` positions.

    ``starts`` has the start of each chunk; chunks after number ``last`` may be left out. Three or four queries take two
    chunks at a time, so that registers hold the sums.
    """
    if rows <= 2:
        _scores_of_four_chunks(rows, q, width, keys, starts, stride, ahead, out, to)
    else:
        _scores_of_two(rows, q, width, keys, starts[:2], stride, ahead, out, to)
        if last >= 2:
            _scores_of_two(rows, q, width, keys, starts[2:], stride, ahead, out, to + 2 * CHUNK)


@jit
def score(rows, count, q, width, keys, at, pack, stride, out, to):
    """Score ``rows`` queries against ``count`` positions of a block, and up to 31 more, which the caller masks."""
    j = 0
    while j < count:
        start = (at + j * pack,)
        if count - j > LANES:
            _scores_wide(rows, q, width, keys, start, stride, 0, out, to + j)
            j += 2 * LANES
        else:
            _scores_thin(rows, q, width, keys, start, stride, 0, out, to + j)
            j += LANES


@inline
def _shifted(chunks, by):
    """Four chunks with their pointers moved ``by`` elements; each keeps its bytes."""
    (a, e), (b, f), (c, g), (d, h) = chunks
    return (shifted(a, by), e), (shifted(b, by), f), (shifted(c, by), g), (shifted(d, by), h)


@jit
def accumulate(rows, weights, weight_index, chunks, some, width, out):
    """Add the values of ``some`` of ``chunks``, times ``weights[r]``, to ``out[r, :width]``; see ``_emit_values``."""
    vectors = width // LANES
    step = _wide_vectors(rows, vectors)
    whole = vectors - vectors % step
    for v in range(0, whole, step):
        if step == _WHOLE:
            _values_whole(rows, weights, weight_index, _shifted(chunks, v * LANES), some, width, out, v * LANES)
            continue
        _values_wide(rows, weights, weight_index, _shifted(chunks, v * LANES), some, width, out, v * LANES)
    for v in range(whole, vectors):
        _values_thin(rows, weights, weight_index, _shifted(chunks, v * LANES), some, width, out, v * LANES)

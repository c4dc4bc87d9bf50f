"""The two inner products of attention on vectors or, for queries of type ``simd.TILED``, on tiles of a matrix unit.

Tiles add 32 dimensions or positions at once, in order: a row's bits do not depend on the other rows of a tile.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import attention_tiles as vectors
from batchgen.kernels.cpu.compiled import emit, simd, tiles
from batchgen.kernels.cpu.compiled.simd import ANY, F32, I64, emitted
from batchgen.kernels.cpu.layout import (
    CHUNK,
    LANES,
    MAX_QUERIES,
    NUM_STREAMS,
    SCORE_STRIDE,
    TILE_ROWS,
    TILE_STEP,
)

_COLUMNS = 2 * LANES  # positions or dimensions that are multiplied side by side
_LOG2_E = np.float32(emit.LOG2_E)
_MIN_RESULT = np.float32(2.0**-126)  # tiles treat smaller numbers as zeros


@simd.chosen
def rows_at_once(q):
    """The most query rows that one product takes."""
    most = TILE_ROWS if simd.is_tiled(q) else MAX_QUERIES
    return lambda q: most


@simd.chosen
def least_result(q):
    """The least magnitude of a result; smaller results become zero.

    Otherwise other rows could decide whether tiles have treated a sum as zero before its last step.
    """
    least = _MIN_RESULT if simd.is_tiled(q) else F32(0.0)
    return lambda q: least


@simd.chosen
def begin(q, state, rows):
    """Prepare for products of at most ``rows`` query rows."""

    def configure(q, state, rows):
        tiles.configure(state, rows)

    return configure if simd.is_tiled(q) else lambda q, state, rows: None


@simd.chosen
def end(q):
    """Release the tiles that ``begin`` configured."""

    def release(q):
        tiles.release()

    return release if simd.is_tiled(q) else lambda q: None


@simd.chosen
def score_chunks(state, rows, last, q, width, keys, starts, stride, ahead, out, to):
    """As ``attention_tiles.score_chunks``."""

    def by_tiles(state, rows, last, q, width, keys, starts, stride, ahead, out, to):
        for number in range(min(last + 1, NUM_STREAMS)):
            chunk = simd.shifted(keys, starts[number])
            _score(state, rows, CHUNK, q, width, chunk, stride, ahead, out, to + number * CHUNK)

    def by_vectors(state, rows, last, q, width, keys, starts, stride, ahead, out, to):
        vectors.score_chunks(rows, last, q, width, keys, starts, stride, ahead, out, to)

    return by_tiles if simd.is_tiled(q) else by_vectors


@simd.chosen
def score(state, rows, count, q, width, keys, at, pack, stride, out, to):
    """As ``attention_tiles.score``."""

    def by_tiles(state, rows, count, q, width, keys, at, pack, stride, out, to):
        _score(state, rows, count, q, width, simd.shifted(keys, at), stride, 0, out, to)

    def by_vectors(state, rows, count, q, width, keys, at, pack, stride, out, to):
        vectors.score(rows, count, q, width, keys, at, pack, stride, out, to)

    return by_tiles if simd.is_tiled(q) else by_vectors


@simd.chosen
def accumulate(state, copies, rows, weights, weight_index, chunks, some, width, out):
    """As ``attention_tiles.accumulate``; ``copies`` are scratch memory."""

    def by_tiles(state, copies, rows, weights, weight_index, chunks, some, width, out):
        _accumulate(state, copies, rows, weights, weight_index, chunks, some, width, out)

    def by_vectors(state, copies, rows, weights, weight_index, chunks, some, width, out):
        vectors.accumulate(rows, weights, weight_index, chunks, some, width, out)

    return by_tiles if simd.is_tiled(weights) else by_vectors


@simd.jit
def _score(state, rows, count, q, width, keys, stride, ahead, out, to):
    """Score against the ``count`` positions that start at ``keys``; prefetch memory ``ahead`` bytes later, unless 0."""
    apart, to_base_2 = (2 * LANES, 2 * stride * TILE_ROWS, 2 * stride), simd.splat(_LOG2_E)
    lines = 2 * TILE_ROWS if ahead else 0
    for j in range(0, count, _COLUMNS):
        here, target = simd.shifted(keys, 2 * j), simd.shifted(out, to + j)
        fetched = simd.address(here) + ahead
        tiles.accumulate_rest(state, q, width, here, apart, target, SCORE_STRIDE, 0, width // TILE_STEP, fetched, lines)
        for r in range(rows):
            for i in range(r * SCORE_STRIDE, r * SCORE_STRIDE + _COLUMNS, LANES):
                simd.store(target, i, simd.mul(simd.load(target, i), to_base_2))


@emitted(types.void, ANY, ANY, I64, I64, ANY)
def _pair_up(builder, chunks, some, width, is_few, out):
    """Write the values of some chunks [CHUNK, width] as [pairs of positions, width, 2]; few rows prefetch the next."""
    first, last = cgutils.unpack_tuple(builder, some)
    for c, chunk in enumerate(cgutils.unpack_tuple(builder, chunks)):
        base, ahead = cgutils.unpack_tuple(builder, chunk)
        number = emit.number(c)
        is_met = builder.and_(builder.icmp_signed("<=", first, number), builder.icmp_signed("<=", number, last))
        target = builder.gep(out, [builder.mul(width, emit.number(c * CHUNK))])
        with builder.if_then(is_met, likely=True), cgutils.for_range(builder, emit.number(CHUNK // 2)) as pair:
            at = builder.mul(builder.mul(pair.index, emit.number(2)), width)
            with cgutils.for_range(builder, builder.udiv(width, emit.number(_COLUMNS))) as loop:
                column = builder.mul(loop.index, emit.number(_COLUMNS))
                rows = [builder.add(start, column) for start in (at, builder.add(at, width))]
                to = builder.add(at, builder.mul(column, emit.number(2)))
                for v, pairs in enumerate(emit.load_pairs(builder, base, rows[0], rows[1], 2)):
                    place = builder.gep(target, [builder.add(to, emit.number(v * 2 * LANES))])
                    builder.store(pairs, builder.bitcast(place, pairs.type.as_pointer()), align=2)
                with builder.if_then(builder.icmp_signed("!=", is_few, emit.number(0))):
                    for row in rows:
                        here = builder.ptrtoint(builder.gep(base, [row]), ahead.type)
                        emit.prefetch(builder, builder.add(here, ahead), closeness=2)


@simd.jit
def _accumulate(state, copies, rows, weights, weight_index, chunks, some, width, out):
    """Add weighted values to ``out``; pairs of values are stored after the copies, which take half of their memory."""
    (first, last), pairs = some, simd.shifted(copies, NUM_STREAMS * CHUNK * width)
    _pair_up(chunks, some, width, np.int64(rows <= vectors.MAX_TOGETHER), pairs)
    apart, steps = (2 * LANES, CHUNK * width, 2 * width), min(last + 1, NUM_STREAMS) - first
    x = simd.shifted(weights, weight_index + first * CHUNK)
    for d in range(0, width, _COLUMNS):
        here, target = simd.shifted(pairs, first * CHUNK * width + 2 * d), simd.shifted(out, d)
        tiles.accumulate_rest(state, x, SCORE_STRIDE, here, apart, target, width, 1, steps, 0, 0)

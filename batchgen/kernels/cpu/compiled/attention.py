"""Causal grouped-query attention over the paged cache: prompts, chunks and single tokens alike.

A work item is a few consecutive tokens of one sequence and one KV head: up to ``MAX_QUERIES`` query rows that read
the same keys. Keys are stored as ``[head_dim, lane]`` in a block, so 16 positions fill one vector and a score needs no
horizontal sum; values as ``[position, head_dim]``. Arithmetic is float32 on keys and values as cached; where the
machine multiplies pairs of bfloat16 (twice as fast), queries and probabilities are rounded to bfloat16 first, as the
reference model rounds them. The element type of the pointers to both decides. Where keys and values are integers, a
score is multiplied by the scale of its key, and a probability by that of its value once it has been summed.

Why a row's result never depends on its batch, chunk or block size: a score is a sum over head_dim in order; the
softmax runs over tiles of ``TILE`` positions that start at multiples of ``TILE`` of the *sequence*, adds
probabilities per lane = position mod 16, and adds values two positions at a time, in turn from each of four chunks of
32 positions. Rows that share an item share loads, never a sum. With a window, what no row of an item sees is left out
by whole tiles, groups and chunks, and what is left out would have added zeros.

Memory is the bound where contexts are long: a core gets its share of the bandwidth only if it reads from several
places at once, and works on what is near while it does. So four chunks are scored side by side while their values are
fetched into the second cache, and their values added up while the next keys are.
"""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.attention_tiles import MOST_TOGETHER, accumulate, score, score_chunks
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.compiled.softmax import softmax_row
from batchgen.kernels.cpu.compiled.work import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, CHUNK, LANES, MAX_QUERIES, NUM_ITEMS, NUM_STREAMS, SCORE_STRIDE, TILE

GROUP = NUM_STREAMS * CHUNK  # positions whose values are added side by side

scratch_floats = simd.jit(layout.attention_scratch_floats)


@simd.jit
def _gather_queries(num_rows, group, q, source, num_heads, width, scratch):
    """Copy the query rows of one KV head together and clear their sums.

    Row r is query head ``r % group`` of the block's token ``r // group``; rows up to a multiple of 8 are zero.
    """
    rows_q, sums, _, _, _, _, peak, total = scratch
    zero = simd.splat(F32(0.0))
    for r in range(-(-num_rows // MAX_QUERIES) * MAX_QUERIES):
        at = (source + (r // group) * num_heads + r % group) * width
        for i in range(0, width, LANES):
            simd.store(rows_q, r * width + i, simd.load(q, at + i) if r < num_rows else zero)
            simd.store(sums, r * width + i, zero)
        peak[r], total[r] = F32(-np.inf), F32(0.0)


@simd.inline
def _pack(itemsize):
    """Dimensions of a key that lie side by side; see ``model.state.key_pack``."""
    return 2 if itemsize == 2 else 1


@simd.inline
def _place(table, position, head, sizes):
    """The number of a position's block and head among all: its keys or values begin at so many times their size."""
    num_kv_heads, _, block_size, _ = sizes
    return table[position // block_size] * num_kv_heads + head


@simd.inline
def _key_streams(table, end, position, head, cache, sizes):
    """Addresses of the keys of ``NUM_STREAMS`` chunks from ``position`` on, as far as ``end``; chunks beyond it repeat.

    A guess where blocks are not as large as chunks; what is prefetched in vain does no harm.
    """
    _, width, _, lanes = sizes
    size, last = width * lanes * cache[4], end - 1
    return (
        cache[2] + _place(table, min(position, last), head, sizes) * size,
        cache[2] + _place(table, min(position + CHUNK, last), head, sizes) * size,
        cache[2] + _place(table, min(position + 2 * CHUNK, last), head, sizes) * size,
        cache[2] + _place(table, min(position + 3 * CHUNK, last), head, sizes) * size,
    )


@simd.inline
def _chunk(table, position, head, cache, sizes):
    """Where the keys of the chunk at ``position`` begin, and the address of its values."""
    _, _, _, values_at, itemsize, _ = cache
    _, width, block_size, lanes = sizes
    place, offset = _place(table, position, head, sizes), position % block_size
    at = place * width * lanes + offset * _pack(itemsize)
    return at, values_at + (place * block_size + offset) * width * itemsize


@simd.jit
def _score_tile(padded, q, tile, begin, tile_end, table, head, cache, sizes, scores):
    """Scores of ``padded`` query rows against the positions from ``begin`` to ``tile_end``, a chunk's start and any.

    What is prefetched meanwhile are the values of the same positions. Few rows take a group of chunks at once, to read
    from several places of memory; for one outside these positions the nearest is scored, and those scores are masked.
    """
    keys, itemsize = cache[0], cache[4]
    _, width, block_size, lanes = sizes
    pack, position = _pack(itemsize), begin
    while position < tile_end:
        if padded <= MOST_TOGETHER and block_size % CHUNK == 0 and tile_end - position > CHUNK:
            group, last = position - position % GROUP, (tile_end - 1) // CHUNK * CHUNK
            at0, ahead0 = _chunk(table, position, head, cache, sizes)
            at1, ahead1 = _chunk(table, max(group + CHUNK, position), head, cache, sizes)
            at2, ahead2 = _chunk(table, min(max(group + 2 * CHUNK, position), last), head, cache, sizes)
            at3, ahead3 = _chunk(table, min(max(group + 3 * CHUNK, position), last), head, cache, sizes)
            starts, ahead = (at0, at1, at2, at3), (ahead0, ahead1, ahead2, ahead3)
            score_chunks(padded, q, width, keys, starts, lanes, scores, group - tile, ahead)
            position = group + GROUP
        else:
            count = min(tile_end - position, block_size - position % block_size)
            at, near = _chunk(table, position, head, cache, sizes)
            score(padded, count, q, width, keys, at, pack, lanes, scores, position - tile, near)
            position += count


@simd.jit
def _values_of(stream, group, tile_end, table, head, cache, sizes, copies):
    """Address of the values of chunk number ``stream`` from ``group`` on; those beyond ``tile_end`` are zero.

    Where they are not contiguous, or other data follows them, they are copied first.
    """
    _, values, _, values_at, itemsize, _ = cache
    _, width, block_size, _ = sizes
    position = group + stream * CHUNK
    if block_size % CHUNK == 0 and position + CHUNK <= tile_end:
        place = _place(table, position, head, sizes) * block_size + position % block_size
        return values_at + place * width * itemsize
    target, address = copies
    first, zero = stream * CHUNK * width, simd.splat(F32(0.0))
    for i in range(CHUNK):
        known = position + i < tile_end
        at = min(position + i, tile_end - 1)
        source = (_place(table, at, head, sizes) * block_size + at % block_size) * width
        for j in range(0, width, LANES):
            simd.store(target, first + i * width + j, simd.load(values, source + j) if known else zero)
    return address + first * itemsize


@simd.jit
def _value_tile(padded, tile, begin, tile_end, table, head, cache, sizes, weights, sums, copies, after):
    """Add the values of the positions from ``begin`` to ``tile_end``, weighted by ``weights``, to ``sums``.

    In place of a chunk of a group outside these positions the first inside is read again, with the zero weights of
    those positions. Meanwhile the keys that are scored next are prefetched: ``after`` is (block table, its end, first
    position, head).
    """
    values, itemsize = cache[1], cache[4]
    width = sizes[1]
    next_table, next_end, next_first, next_head = after
    for group in range(begin - begin % GROUP, tile_end, GROUP):
        first = max(begin - group, 0) // CHUNK
        a = _values_of(first, group, tile_end, table, head, cache, sizes, copies)
        b = c = d = a
        if first < 1 and group + CHUNK < tile_end:
            b = _values_of(1, group, tile_end, table, head, cache, sizes, copies)
        if first < 2 and group + 2 * CHUNK < tile_end:
            c = _values_of(2, group, tile_end, table, head, cache, sizes, copies)
        if first < 3 and group + 3 * CHUNK < tile_end:
            d = _values_of(3, group, tile_end, table, head, cache, sizes, copies)
        ahead = _key_streams(next_table, next_end, next_first + max(group - begin, 0), next_head, cache, sizes)
        accumulate(padded, weights, group - tile, values, itemsize, (a, b, c, d), width, sums, ahead)


@simd.jit
def _gather_scales(tile, begin, tile_end, table, head, scales_at, sizes, scales):
    """Copy the scales from position ``begin`` on: those of keys, and ``TILE`` elements further those of values."""
    _, _, block_size, lanes = sizes
    source, position = simd.pointer(scales_at, F32), begin
    while position < tile_end:
        offset = position % block_size
        count = min(tile_end - position, block_size - offset)
        at, to = 2 * _place(table, position, head, sizes) * lanes + offset, position - tile
        for i in range(count):
            scales[to + i] = source[at + i]
            scales[TILE + to + i] = source[at + lanes + i]
        position += count


@simd.inline
def _lowest(position, window):
    """The first position that the one at ``position`` attends to."""
    return max(position + 1 - window, 0) if window else 0


@simd.inline
def _chunk_of(position):
    return position - position % CHUNK


@simd.jit
def _weigh_rows(first, rows, group, start, window, tile, begin, tile_end, width, scratch, has_scales):
    """Turn the scores of ``rows`` query rows from ``first`` on into probabilities, and shrink their sums as is due."""
    _, sums, scores, weights, _, scales, peak, total = scratch
    cleared = max(begin - begin % GROUP - tile, 0)
    weighted = -(-(tile_end - tile) // GROUP) * GROUP
    for r in range(first, first + rows):
        position = start + r // group
        visible = max(min(position + 1, tile_end) - tile, 0)
        seen = min(max(_lowest(position, window) - tile, 0), visible)
        at, whole = (r - first) * SCORE_STRIDE, seen - seen % LANES
        if has_scales:
            simd.multiply_row(scores, at + whole, visible - whole, scales, whole)
        peak[r], shrink, added = softmax_row(scores, weights, at, cleared, seen, visible, weighted, peak[r])
        if has_scales:
            simd.multiply_row(weights, at + whole, visible - whole, scales, TILE + whole)
        total[r] = total[r] * shrink + added
        if shrink != F32(1.0):
            by = simd.splat(shrink)
            for i in range(r * width, (r + 1) * width, LANES):
                simd.store(sums, i, simd.mul(simd.load(sums, i), by))


@simd.jit
def _attend(num_rows, group, start, window, table, head, cache, sizes, scratch, coming):
    """Query rows (see ``_gather_queries``) against all visible positions; leaves sums and totals in ``scratch``.

    ``start`` is the position of the block's first token. Tiles are the outer loop, so that all rows of the block
    meet a tile's keys and values while they are near. ``coming`` says what is read after all of these: see
    ``_value_tile``.
    """
    rows_q, sums, scores, weights, copies, scales, _, _ = scratch
    width, scales_at = sizes[1], cache[5]
    end, lowest = start + (num_rows - 1) // group + 1, _chunk_of(_lowest(start, window))
    for tile in range(lowest - lowest % TILE, end, TILE):
        after = (table, end, tile + TILE, head) if tile + TILE < end else coming
        if scales_at:
            _gather_scales(tile, max(tile, lowest), min(tile + TILE, end), table, head, scales_at, sizes, scales)
        for first in range(0, num_rows, MAX_QUERIES):
            rows = min(MAX_QUERIES, num_rows - first)
            tile_end = min(tile + TILE, start + (first + rows - 1) // group + 1)
            begin = max(tile, _chunk_of(_lowest(start + first // group, window)))
            if tile_end <= begin:
                continue
            padded = 1
            while padded < rows:
                padded *= 2
            q, mine = simd.shifted(rows_q, first * width), simd.shifted(sums, first * width)
            _score_tile(padded, q, tile, begin, tile_end, table, head, cache, sizes, scores)
            _weigh_rows(first, rows, group, start, window, tile, begin, tile_end, width, scratch, scales_at != 0)
            _value_tile(padded, tile, begin, tile_end, table, head, cache, sizes, weights, mine, copies, after)


@simd.inline
def _sigmoid(scratch, logit):
    x = simd.splat(-logit)
    return F32(1.0) / (F32(1.0) + simd.lane(simd.exp(scratch, x), 0))


@simd.jit
def _write_rows(num_rows, group, target, num_heads, head_dim, width, scratch, gates, out):
    """Divide sums by totals, gate, round, and write the rows to ``out`` [tokens, num_heads, head_dim].

    ``gates`` are (their address or 0, logits whose row ends with one per head, columns).
    """
    _, sums, scores, _, _, _, _, total = scratch
    has_gates, logits, columns = gates
    for r in range(num_rows):
        place = target + (r // group) * num_heads + r % group
        scale = F32(1.0) / total[r]
        if has_gates:
            token, head = place // num_heads, place % num_heads
            scale *= _sigmoid(scores, simd.lane(simd.load_part(logits, (token + 1) * columns - num_heads + head, 1), 0))
        by = simd.splat(scale)
        for i in range(0, head_dim, LANES):
            v = simd.mul(simd.load(sums, r * width + i), by)
            simd.store_some(out, place * head_dim + i, v, head_dim - i)


@simd.jit
def _divide_scratch(mine, num_rows, width, dtype, inner):
    """The parts of one worker's scratch.

    Queries (of type ``inner``) and sums [rows, width], scores and weights (``inner``) [8, SCORE_STRIDE], copied
    values (``dtype``) [NUM_STREAMS, CHUNK, width] with their address, scales [2, TILE], peak and total [rows].
    """
    sums = mine + 4 * num_rows * width
    scores = sums + 4 * num_rows * width
    weights = scores + 4 * MAX_QUERIES * SCORE_STRIDE
    copies = weights + 4 * MAX_QUERIES * SCORE_STRIDE
    scales = copies + 4 * NUM_STREAMS * CHUNK * width
    peak = scales + 4 * 2 * TILE
    return (
        simd.pointer(mine, inner),
        simd.pointer(sums, F32),
        simd.pointer(scores, F32),
        simd.pointer(weights, inner),
        (simd.pointer(copies, dtype), copies),
        simd.pointer(scales, F32),
        simd.pointer(peak, F32),
        simd.pointer(peak + 4 * num_rows, F32),
    )


@simd.jit
def attention(words, result, dtype, inner):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is a query block and a KV head.

    Element types: of the ``result``, of keys and values (``dtype``), and of queries and probabilities where they are
    multiplied (``inner``).
    """
    q = simd.pointer(words[ARGS], F32)
    keys_at, values_at, itemsize = words[ARGS + 1], words[ARGS + 2], words[ARGS + 15]
    scales_at = words[ARGS + 17]
    cache = simd.pointer(keys_at, dtype), simd.pointer(values_at, dtype), keys_at, values_at, itemsize, scales_at
    query_blocks = simd.pointer(words[ARGS + 4], np.int32)
    positions = simd.pointer(words[ARGS + 5], np.int32)
    out = simd.pointer(words[ARGS + 6], result)
    num_heads, num_kv_heads, head_dim, width = words[ARGS + 8], words[ARGS + 9], words[ARGS + 10], words[ARGS + 11]
    block_size, lanes, max_blocks = words[ARGS + 12], words[ARGS + 13], words[ARGS + 14]
    sizes = num_kv_heads, width, block_size, lanes
    group = num_heads // num_kv_heads
    tables, most_rows, window = words[ARGS + 3], words[ARGS + 16], words[ARGS + 18]
    gates = words[ARGS + 19], simd.pointer(words[ARGS + 19], result), words[ARGS + 20]
    worker = worker_number(words)
    mine = words[ARGS + 7] + worker * 4 * scratch_floats(width, most_rows)
    scratch = _divide_scratch(mine, most_rows, width, dtype, inner)
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        block, head = item // num_kv_heads, item % num_kv_heads
        sequence, token, count = query_blocks[3 * block], query_blocks[3 * block + 1], query_blocks[3 * block + 2]
        table = simd.pointer(tables + sequence * max_blocks * 4, np.int32)
        first_head = token * num_heads + head * group
        _gather_queries(count * group, group, q, first_head, num_heads, width, scratch)
        coming = min(item + 1, words[NUM_ITEMS] - 1)  # most likely this worker's next item
        next_block = 3 * (coming // num_kv_heads)
        next_table = simd.pointer(tables + query_blocks[next_block] * max_blocks * 4, np.int32)
        position = positions[query_blocks[next_block + 1]]
        after = next_table, position + 1, _chunk_of(_lowest(position, window)), coming % num_kv_heads
        _attend(count * group, group, positions[token], window, table, head, cache, sizes, scratch, after)
        _write_rows(count * group, group, first_head, num_heads, head_dim, width, scratch, gates, out)
        item = next_item(words, worker)

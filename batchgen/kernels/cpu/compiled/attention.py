"""Causal grouped-query attention over the paged cache: prompts, chunks and single tokens alike.

A work item is a few KV heads and a few consecutive tokens of one sequence, or of several whose block tables begin
alike: the tiles that these share are read once for all of them. Up to ``MAX_QUERIES`` query rows meet a key at once.
Keys are stored as ``[head_dim, lane]`` in a block, so 16 positions fill one vector and a score needs no horizontal
sum; values as ``[position, head_dim]``. Arithmetic is float32 on keys and values as cached; where the machine
multiplies pairs of bfloat16 (twice as fast), queries and probabilities are rounded to bfloat16 first, as the reference
model rounds them. The element type of the pointers to both decides. Where keys and values are integers, a score is
multiplied by the scale of its key, and a probability by that of its value once it has been summed.

Why a row's result never depends on its batch, chunk or block size: a score is a sum over head_dim in order; the
softmax runs over tiles of ``TILE`` positions that start at multiples of ``TILE`` of the *sequence*, adds
probabilities per lane = position mod 16, and adds values two positions at a time, in turn from each of four chunks of
32 positions. Rows that share an item share loads, never a sum. With a window, what no row of an item sees is left out
by whole tiles, groups and chunks, and what is left out would have added zeros.

Memory is the bound where contexts are long, and the processor fetches ahead by itself only what is read in long runs,
from few places. The keys of a block are one run over all heads, and its values another; so an item walks the heads of
four blocks side by side: with one head to an item, runs of a few kilobytes gave two thirds of what memory has to give.
"""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import query_rows, simd
from batchgen.kernels.cpu.compiled.attention_tiles import MOST_TOGETHER, accumulate, score, score_chunks, shifted
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number

scratch_floats = simd.jit(layout.attention_scratch_floats)


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
def _chunk(table, position, head, cache, sizes):
    """Where the keys of the chunk at ``position`` begin."""
    _, width, block_size, lanes = sizes
    return _place(table, position, head, sizes) * width * lanes + position % block_size * _pack(cache[4])


@simd.jit
def _score_tile(tall, apart, tile, begin, tile_end, table, heads, cache, sizes, scratch):
    """Scores of ``tall`` query rows of each head against the positions from ``begin`` to ``tile_end``.

    ``begin`` is a chunk's start. Few rows take a group of chunks at once, to read from several places of memory; for
    one outside these positions the nearest is scored, and those scores are masked.
    """
    keys, pack = cache[0], _pack(cache[4])
    _, width, block_size, lanes = sizes
    head, num_heads = heads
    position, next_head = begin, width * lanes
    while position < tile_end:
        is_group = tall <= MOST_TOGETHER and block_size % layout.CHUNK == 0 and tile_end - position > layout.CHUNK
        group, last = position - position % query_rows.GROUP, (tile_end - 1) // layout.CHUNK * layout.CHUNK
        a = b = c = d = _chunk(table, position, head, cache, sizes)
        if is_group:
            b = _chunk(table, max(group + layout.CHUNK, position), head, cache, sizes)
            c = _chunk(table, min(max(group + 2 * layout.CHUNK, position), last), head, cache, sizes)
            d = _chunk(table, min(max(group + 3 * layout.CHUNK, position), last), head, cache, sizes)
        count = min(tile_end - position, block_size - position % block_size)
        for number in range(num_heads):
            q, _, scores, _, _, _, _, _ = query_rows.of_head(scratch, number, apart, tall, width)
            if is_group:
                starts = shifted((a, b, c, d), number * next_head)
                score_chunks(tall, q, width, keys, starts, lanes, scores, group - tile)
            else:
                score(tall, count, q, width, keys, a + number * next_head, pack, lanes, scores, position - tile)
        position = group + query_rows.GROUP if is_group else position + count


@simd.jit
def _values_of(stream, group, tile_end, table, head, cache, sizes, copies):
    """Address of the values of chunk number ``stream`` from ``group`` on; those beyond ``tile_end`` are zero.

    Where they are not contiguous, or other data follows them, they are copied first.
    """
    _, values, _, values_at, itemsize, _ = cache
    _, width, block_size, _ = sizes
    position = group + stream * layout.CHUNK
    if block_size % layout.CHUNK == 0 and position + layout.CHUNK <= tile_end:
        place = _place(table, position, head, sizes) * block_size + position % block_size
        return values_at + place * width * itemsize
    target, address = copies
    first, zero = stream * layout.CHUNK * width, simd.splat(F32(0.0))
    for i in range(layout.CHUNK):
        known = position + i < tile_end
        at = min(position + i, tile_end - 1)
        source = (_place(table, at, head, sizes) * block_size + at % block_size) * width
        for j in range(0, width, layout.LANES):
            simd.store(target, first + i * width + j, simd.load(values, source + j) if known else zero)
    return address + first * itemsize


@simd.jit
def _value_tile(tall, apart, tile, begin, tile_end, table, heads, cache, sizes, scratch):
    """Add the values of the positions from ``begin`` to ``tile_end``, weighted, to the sums of each head.

    In place of a chunk of a group outside these positions the first inside is read again, with the zero weights of
    those positions.
    """
    values, copies, itemsize = cache[1], scratch[4], cache[4]
    width, (head, num_heads) = sizes[1], heads
    for group in range(begin - begin % query_rows.GROUP, tile_end, query_rows.GROUP):
        first = max(begin - group, 0) // layout.CHUNK
        for number in range(num_heads):
            a = _values_of(first, group, tile_end, table, head + number, cache, sizes, copies)
            b = c = d = a
            if first < 1 and group + layout.CHUNK < tile_end:
                b = _values_of(1, group, tile_end, table, head + number, cache, sizes, copies)
            if first < 2 and group + 2 * layout.CHUNK < tile_end:
                c = _values_of(2, group, tile_end, table, head + number, cache, sizes, copies)
            if first < 3 and group + 3 * layout.CHUNK < tile_end:
                d = _values_of(3, group, tile_end, table, head + number, cache, sizes, copies)
            _, sums, _, weights, _, _, _, _ = query_rows.of_head(scratch, number, apart, tall, width)
            accumulate(tall, weights, group - tile, values, itemsize, (a, b, c, d), width, sums)


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
            scales[layout.TILE + to + i] = source[at + lanes + i]
        position += count


@simd.inline
def _chunk_of(position):
    return position - position % layout.CHUNK


@simd.jit
def _attend(num_rows, apart, group, start, window, first, end, table, heads, cache, sizes, scratch):
    """Query rows (see ``query_rows``) against the positions from ``first``, a tile's, to ``end`` that they see.

    ``heads`` are the first KV head and how many; their rows begin ``apart`` behind each other. ``start`` is the
    position of the block's first token; sums and totals are left in ``scratch``. Tiles are the outer loop, so that all
    rows meet a tile's keys and values while they are near.
    """
    width, scales_at = sizes[1], cache[5]
    head, num_heads = heads
    seen = max(first, _chunk_of(query_rows.lowest(start, window)))
    for tile in range(seen - seen % layout.TILE, end, layout.TILE):
        for number in range(num_heads if scales_at else 0):
            scales = simd.shifted(scratch[5], number * 2 * layout.TILE)
            _gather_scales(
                tile, max(tile, seen), min(tile + layout.TILE, end), table, head + number, scales_at, sizes, scales
            )
        for row in range(0, num_rows, layout.MAX_QUERIES):
            rows = min(layout.MAX_QUERIES, num_rows - row)
            tile_end = min(tile + layout.TILE, start + (row + rows - 1) // group + 1)
            begin = max(tile, _chunk_of(query_rows.lowest(start + row // group, window)))
            if tile_end <= begin:
                continue
            tall, mine = query_rows.padded(rows), query_rows.from_row(scratch, row, width)
            _score_tile(tall, apart, tile, begin, tile_end, table, heads, cache, sizes, mine)
            for number in range(num_heads):
                of_one = query_rows.of_head(scratch, number, apart, tall, width)
                query_rows.weigh_rows(
                    row, rows, group, start, window, tile, begin, tile_end, width, of_one, scales_at != 0
                )
            _value_tile(tall, apart, tile, begin, tile_end, table, heads, cache, sizes, mine)


@simd.inline
def _piece(queries, block):
    """The block table of a query block, its first token, the number of its tokens and the position of the first."""
    query_blocks, positions, tables, max_blocks = queries
    at = block * layout.QUERY_BLOCK_FIELDS
    token = query_blocks[at + 1]
    return (
        simd.pointer(tables + query_blocks[at] * max_blocks * 4, np.int32),
        token,
        query_blocks[at + 2],
        positions[token],
    )


@simd.inline
def _rows_of(queries, block, members, group):
    """Rows of scratch memory for one KV head of ``members`` query blocks."""
    rows = 0
    for i in range(members):
        rows += query_rows.stride(queries[0][(block + i) * layout.QUERY_BLOCK_FIELDS + 2] * group)
    return rows


@simd.inline
def _members(queries, block, most, num_blocks):
    """The number of query blocks from ``block`` on that one item attends for; 0 if that of an earlier one does."""
    place_of = simd.shifted(queries[0], 3)
    place = place_of[block * layout.QUERY_BLOCK_FIELDS]
    if place % most:
        return 0
    members = 1
    while members < most and block + members < num_blocks:
        if place_of[(block + members) * layout.QUERY_BLOCK_FIELDS] != place + members:
            break
        members += 1
    return members


@simd.inline
def _heads_together(rows, most):
    """KV heads of so many rows each that are walked side by side; one where products take longer than reading."""
    if rows > 2 * layout.MAX_QUERIES:
        return 1
    return min(layout.SCORE_ROWS // query_rows.padded(min(rows, layout.MAX_QUERIES)), most)


@simd.jit
def _attend_together(block, members, kv_heads, queries, q, heads, window, cache, sizes, scratch, gates, out):
    """All rows of ``members`` query blocks, from ``block`` on, of some KV heads: the first and how many.

    They meet the tiles that their sequences share side by side, then each block its own by itself.
    """
    num_heads, group, head_dim = heads
    kv_head, num_kv_heads = kv_heads
    width, together, longest = sizes[1], _rows_of(queries, block, members, group), 0
    apart = query_rows.stride(together)
    for number in range(num_kv_heads):
        row = number * apart
        for i in range(members):
            _, token, count, start = _piece(queries, block + i)
            first_head, longest = token * num_heads + (kv_head + number) * group, max(longest, start + count)
            query_rows.gather_queries(
                count * group, group, q, first_head, num_heads, width, query_rows.from_row(scratch, row, width)
            )
            row += query_rows.stride(count * group)
    shared = queries[0][block * layout.QUERY_BLOCK_FIELDS + 4]
    shared = shared - shared % layout.TILE if members > 1 and (window == 0 or longest <= window) else 0
    row = 0
    for i in range(-1 if shared else 0, members):
        table, token, count, start = _piece(queries, block + max(i, 0))
        at, first, end = (0, 0, shared) if i < 0 else (row, shared, start + count)
        rows, begin, seen = (together, shared, 0) if i < 0 else (count * group, start, window)
        mine = query_rows.from_row(scratch, at, width)  # all rows see all that is shared: their positions do not matter
        _attend(rows, apart, group, begin, seen, first, end, table, kv_heads, cache, sizes, mine)
        if i < 0:
            continue
        for number in range(num_kv_heads):
            target, of_one = (
                token * num_heads + (kv_head + number) * group,
                query_rows.from_row(mine, number * apart, width),
            )
            query_rows.write_rows(rows, group, target, num_heads, head_dim, width, of_one, gates, out)
        row += query_rows.stride(rows)


@simd.jit
def attention(args, result, dtype, inner):
    """Arguments (addresses, then sizes) as listed in ``backend``; one item is a query block and
    ``most_heads`` KV heads.

    Element types: of the ``result``, of keys and values (``dtype``), and of queries and probabilities where they are
    multiplied (``inner``).
    """
    q = simd.pointer(args[layout.ARGS], F32)
    keys_at, values_at, itemsize = args[layout.ARGS + 1], args[layout.ARGS + 2], args[layout.ARGS + 15]
    scales_at = args[layout.ARGS + 17]
    cache = simd.pointer(keys_at, dtype), simd.pointer(values_at, dtype), keys_at, values_at, itemsize, scales_at
    out = simd.pointer(args[layout.ARGS + 6], result)
    num_heads, num_kv_heads, head_dim, width = (
        args[layout.ARGS + 8],
        args[layout.ARGS + 9],
        args[layout.ARGS + 10],
        args[layout.ARGS + 11],
    )
    block_size, lanes, max_blocks = args[layout.ARGS + 12], args[layout.ARGS + 13], args[layout.ARGS + 14]
    sizes, heads = (num_kv_heads, width, block_size, lanes), (num_heads, num_heads // num_kv_heads, head_dim)
    positions = simd.pointer(args[layout.ARGS + 5], np.int32)
    queries = simd.pointer(args[layout.ARGS + 4], np.int32), positions, args[layout.ARGS + 3], max_blocks
    most_rows, window = args[layout.ARGS + 16], args[layout.ARGS + 18]
    gates = args[layout.ARGS + 19], simd.pointer(args[layout.ARGS + 19], result), args[layout.ARGS + 20]
    most, most_heads = args[layout.ARGS + 21], args[layout.ARGS + 22]
    shares = num_kv_heads // most_heads
    num_blocks = args[layout.NUM_ITEMS] // shares
    worker = worker_number(args)
    mine = args[layout.ARGS + 7] + worker * 4 * scratch_floats(width, most_rows)
    scratch = query_rows.divide_scratch(mine, most_rows, width, dtype, inner)
    item = next_item(args, worker)
    while item < args[layout.NUM_ITEMS]:
        block, first, last = item // shares, item % shares * most_heads, (item % shares + 1) * most_heads
        members = _members(queries, block, most, num_blocks)
        if members:
            together = _heads_together(_rows_of(queries, block, members, heads[1]), most_heads)
            for head in range(first, last, together):
                some = head, min(together, last - head)
                _attend_together(block, members, some, queries, q, heads, window, cache, sizes, scratch, gates, out)
        item = next_item(args, worker)

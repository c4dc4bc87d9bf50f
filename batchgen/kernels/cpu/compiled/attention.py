"""Grouped-query attention over the paged cache, for prompts, chunks and single tokens.

A row's sums have one order in any batch, chunk or block size (see ``_attend``): the rows of an item only share loads.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import matrix_attention as products
from batchgen.kernels.cpu.compiled import query_blocks, query_rows, simd
from batchgen.kernels.cpu.compiled.attention_tiles import MAX_TOGETHER
from batchgen.kernels.cpu.compiled.entry import DTYPE, Group, OfKind, Own, kernel
from batchgen.kernels.cpu.compiled.heads import (
    CACHE,
    HEADS,
    ROTARY,
    rotate_query,
    scatter_keys,
    spread_key,
    take_key_and_value,
)
from batchgen.kernels.cpu.compiled.simd import F32

INNER = OfKind(2)  # the type of queries and probabilities in products
GATES = Group("Gates", "logits columns", logits=DTYPE)  # ``logits`` may be 0; each row ends with one logit per head
# From these, attention makes queries, keys and values of the first ``num_alone`` tokens; others have them already.
ALONE = Group("Alone", "num_alone qkv columns slots own", qkv=DTYPE, slots=np.int64, own=Own(F32))
# Of a query block: whether it is one of these tokens, and then the index of its first key in ``own``, and its slot.
Newest = namedtuple("Newest", "is_alone waiting slot own head_dim")
# Memory limits the speed of long contexts, and the processor itself only prefetches long runs from few places. The keys
# of a block are one run over all heads, its values another: an item walks the heads of four blocks together (one head
# per item reached two thirds of the bandwidth). If few rows use a key, a run ends before that prefetching starts,
# so code that reads keys prefetches the values at the same positions, and code that reads values the next keys.
# Keys to prefetch: their block table, how many positions they come after the values being read, and their end.
Upcoming = namedtuple("Upcoming", "table ahead end")


@simd.inline
def _place(table, position, head, cache):
    """Index of a position's block and head in the cache; times the size of one, the offset of its keys or values."""
    return table[position // cache.block_size] * cache.num_kv_heads + head


@simd.inline
def _chunk(table, position, head, cache):
    """Offset of the keys of the chunk at ``position``."""
    place = _place(table, position, head, cache)
    return place * cache.width * cache.lanes + position % cache.block_size * cache.pack


@simd.jit
def _score_tile(tall, apart, tile, begin, tile_end, table, heads, cache, scratch):
    """Score ``tall`` query rows of each head against the positions from ``begin`` (a chunk's start) to ``tile_end``.

    Few rows read a group of chunks at once, from several places of memory. The nearest chunk replaces a chunk outside
    these positions; its scores are masked later.
    """
    keys, _, _, _, width, block_size, lanes, pack = cache
    head, num_heads = heads
    position, next_head = begin, width * lanes
    ahead = simd.address(cache.values) - simd.address(keys)
    while position < tile_end:
        is_group = tall <= MAX_TOGETHER and block_size % layout.CHUNK == 0 and tile_end - position > layout.CHUNK
        group, last = position - position % query_rows.GROUP, (tile_end - 1) // layout.CHUNK * layout.CHUNK
        a = b = c = d = _chunk(table, position, head, cache)
        if is_group:
            b = _chunk(table, max(group + layout.CHUNK, position), head, cache)
            c = _chunk(table, min(max(group + 2 * layout.CHUNK, position), last), head, cache)
            d = _chunk(table, min(max(group + 3 * layout.CHUNK, position), last), head, cache)
        count = min(tile_end - position, block_size - position % block_size)
        for number in range(num_heads):
            mine = query_rows.of_head(scratch, number, apart, tall, width)
            if is_group:
                on = number * next_head
                starts = a + on, b + on, c + on, d + on
                number_of_last = (last - group) // layout.CHUNK
                to = group - tile
                where = mine.rows_q, width, keys, starts, lanes, ahead, mine.scores, to
                products.score_chunks(mine.state, tall, number_of_last, *where)
            else:
                at, to = a + number * next_head, position - tile
                products.score(mine.state, tall, count, mine.rows_q, width, keys, at, pack, lanes, mine.scores, to)
        position = group + query_rows.GROUP if is_group else position + count


@simd.jit
def _values_of(position, begin, tile_end, table, head, upcoming, cache, copies):
    """(pointer to the values of the chunk at ``position``, bytes from the pointer to keys to prefetch).

    Values from ``tile_end`` must be zero: a chunk that reaches past it, or past its block, is copied first. If a chunk
    is outside the positions from ``begin`` to ``tile_end``, the caller must not read from the pointer.
    """
    values, width, block_size = cache.values, cache.width, cache.block_size
    if position < begin or position >= tile_end:
        return values, 0
    then = min(position + upcoming.ahead, upcoming.end - 1)
    offset = _place(upcoming.table, then, head, cache) * cache.lanes + then % block_size
    following = simd.address(simd.shifted(cache.keys, offset * width))
    if block_size % layout.CHUNK == 0 and position + layout.CHUNK <= tile_end:
        place = _place(table, position, head, cache) * block_size + position % block_size
        chunk = simd.shifted(values, place * width)
        return chunk, following - simd.address(chunk)
    target = simd.shifted(copies, position % query_rows.GROUP * width)
    valid, i = min(tile_end - position, layout.CHUNK), 0
    while i < valid:
        offset = (position + i) % block_size
        count = min(valid - i, block_size - offset)
        source = (_place(table, position + i, head, cache) * block_size + offset) * width
        for j in range(0, count * width, layout.LANES):
            simd.store(target, i * width + j, simd.load(values, source + j))
        i += count
    for j in range(valid * width, layout.CHUNK * width, layout.LANES):
        simd.store(target, j, simd.splat(F32(0.0)))
    return target, following - simd.address(target)


@simd.jit
def _value_tile(tall, apart, tile, begin, tile_end, table, heads, upcoming, cache, scratch):
    """Add the weighted values from ``begin`` to ``tile_end`` to each head's sums; prefetch the keys of ``upcoming``."""
    copies, width, (head, num_heads) = scratch.copies, cache.width, heads
    for group in range(begin - begin % query_rows.GROUP, tile_end, query_rows.GROUP):
        first, last = max(begin - group, 0) // layout.CHUNK, (tile_end - 1 - group) // layout.CHUNK
        b, c, d = group + layout.CHUNK, group + 2 * layout.CHUNK, group + 3 * layout.CHUNK
        for number in range(num_heads):
            one = head + number
            chunks = (
                _values_of(group, begin, tile_end, table, one, upcoming, cache, copies),
                _values_of(b, begin, tile_end, table, one, upcoming, cache, copies),
                _values_of(c, begin, tile_end, table, one, upcoming, cache, copies),
                _values_of(d, begin, tile_end, table, one, upcoming, cache, copies),
            )
            mine = query_rows.of_head(scratch, number, apart, tall, width)
            where = tall, mine.weights, group - tile, chunks, (first, last), width, mine.sums
            products.accumulate(mine.state, copies, *where)


@simd.jit
def _gather_scales(tile, begin, tile_end, table, head, cache, scales):
    """Copy the scales of the positions from ``begin``: the keys', and ``TILE`` elements further the values'."""
    source, block_size, lanes, position = cache.scales, cache.block_size, cache.lanes, begin
    while position < tile_end:
        offset = position % block_size
        count = min(tile_end - position, block_size - offset)
        at, to = 2 * _place(table, position, head, cache) * lanes + offset, position - tile
        for i in range(count):
            scales[to + i] = source[at + i]
            scales[layout.TILE + to + i] = source[at + lanes + i]
        position += count


@simd.inline
def _chunk_of(position):
    return position - position % layout.CHUNK


@simd.jit
def _attend(num_rows, apart, group, start, window, first, end, table, heads, newest, following, cache, scratch):
    """Attend from query rows (see ``query_rows``) to the positions they see from ``first`` (a tile's start) to ``end``.

    ``heads`` is (first KV head, number of heads); heads' rows begin ``apart`` rows from each other. ``start`` is the
    position of the block's first token. Sums and totals stay in ``scratch``. ``following`` is read after these keys.
    """
    width, has_scales, (head, num_heads) = cache.width, simd.address(cache.scales) != 0, heads
    most = products.rows_at_once(scratch.rows_q)
    seen = max(first, _chunk_of(query_rows.lowest(start, window)))
    # Why other rows do not change a row's bits: a score is a sum over head_dim in order; tiles start at multiples of
    # ``TILE`` of the *sequence*; probabilities add up per lane = position mod 16; values add up two positions at once,
    # in turn from each of four chunks of 32 (see ``matrix_attention`` for tiles). Positions outside a window add zeros.
    # Tiles are the outer loop, so that all rows use a tile's keys and values while caches hold them.
    for tile in range(seen - seen % layout.TILE, end, layout.TILE):
        tile_end = min(tile + layout.TILE, end)
        for number in range(num_heads if has_scales else 0):
            scales = simd.shifted(scratch.scales, number * 2 * layout.TILE)
            _gather_scales(tile, max(tile, seen), tile_end, table, head + number, cache, scales)
        for row in range(0, num_rows, most):
            rows = min(most, num_rows - row)
            tile_end = min(tile + layout.TILE, end, start + (row + rows - 1) // group + 1)
            begin = max(tile, _chunk_of(query_rows.lowest(start + row // group, window)))
            if tile_end <= begin:
                continue
            tall, mine = query_rows.stride(rows), query_rows.from_row(scratch, row, width)
            products.begin(mine.rows_q, mine.state, tall)
            _score_tile(tall, apart, tile, begin, tile_end, table, heads, cache, mine)
            if newest.is_alone and tile_end == end:
                _own_keys(end - 1 - tile, tall, apart, heads, newest, cache, mine)
            for number in range(num_heads):
                of_one = query_rows.of_head(scratch, number, apart, tall, width)
                query_rows.weigh_rows(row, rows, group, start, window, tile, begin, tile_end, width, of_one, has_scales)
            upcoming = Upcoming(following.table, following.ahead - tile, following.end)
            if tile + layout.TILE < end:
                upcoming = Upcoming(table, layout.TILE, end)
            _value_tile(tall, apart, tile, begin, tile_end, table, heads, upcoming, cache, mine)
    products.end(scratch.rows_q)


@simd.jit
def _take_alone(token, position, number, waiting, group, heads, rotary, alone, cache, scratch):
    """For a token and KV head ``number``, write queries and key (number ``waiting``) to scratch, value to the cache."""
    width, own = cache.width, alone.own
    row, angle = token * alone.columns, position * (heads.head_dim // 2)
    query_rows.clear(group, width, scratch)
    for r in range(group):
        rotate_query(alone.qkv, row, number * group + r, heads, rotary, angle, own, scratch.rows_q, r * width)
    take_key_and_value(alone.qkv, row, number, heads, rotary, angle, alone.slots[token], own, waiting, cache)


@simd.jit
def _own_keys(place, tall, apart, heads, newest, cache, scratch):
    """Score a sequence's only token against its own key, as score ``place``, and write the key to the cache.

    The key is spread over cache lines that the other scores have fetched; fetching them only for it would take long.
    """
    (head, num_heads), own, waiting = heads, newest.own, newest.waiting
    cleared = simd.shifted(own, cache.width * (1 + layout.MAX_WAITING))
    spread = simd.pointer(simd.address(cleared), cache.keys)
    for i in range(0, cache.width * layout.LANES, layout.LANES):  # old contents may be NaN or denormal
        simd.store(cleared, i, simd.splat(F32(0.0)))
    for number in range(num_heads):
        mine = query_rows.of_head(scratch, number, apart, tall, cache.width)
        spread_key(own, waiting + number, newest.head_dim, cache, spread)
        where = mine.rows_q, cache.width, spread, 0, cache.pack, layout.LANES, mine.scores, place
        products.score(mine.state, tall, 1, *where)
        scatter_keys(own, waiting + number, 1, newest.slot, head + number, newest.head_dim, cache)


@simd.jit
def _attend_together(
    block, members, num_blocks, kv_heads, queries, q, heads, rotary, alone, window, cache, scratch, gates, out
):
    """Compute attention for ``members`` query blocks, starting at ``block``; ``kv_heads`` is (first head, number).

    First all blocks attend to the tiles that their sequences share, then each block to its own tiles.
    """
    num_heads, head_dim, group = heads.num_heads, heads.head_dim, heads.num_heads // cache.num_kv_heads
    kv_head, num_kv_heads = kv_heads
    width, together, longest = cache.width, query_blocks.rows_of(queries, block, members, group), 0
    apart = query_rows.stride(together)
    for number in range(num_kv_heads):
        row = number * apart
        for i in range(members):
            _, token, count, start, ending = query_blocks.piece(queries, block + i, window)
            longest, mine = max(longest, ending), query_rows.from_row(scratch, row, width)
            if token < alone.num_alone:
                waiting = i * num_kv_heads + number
                _take_alone(token, start, kv_head + number, waiting, group, heads, rotary, alone, cache, mine)
            else:
                first_head = token * num_heads + (kv_head + number) * group
                query_rows.gather_queries(count * group, group, q, first_head, num_heads, width, mine)
            row += query_rows.stride(count * group)
    shared = queries.blocks[block * layout.QUERY_BLOCK_FIELDS + 4]
    shared = shared - shared % layout.TILE if members > 1 and (window == 0 or longest <= window) else 0
    row = 0
    for i in range(-1 if shared else 0, members):
        table, token, count, start, ending = query_blocks.piece(queries, block + max(i, 0), window)
        at, first, end = (0, 0, shared) if i < 0 else (row, shared, ending)
        rows, begin, seen = (together, shared, 0) if i < 0 else (count * group, start, window)
        mine = query_rows.from_row(scratch, at, width)  # all rows see all that is shared: their positions do not matter
        slot, is_alone = simd.shifted(alone.slots, token), i >= 0 and token < alone.num_alone
        next_table, _, _, _, next_end = query_blocks.piece(queries, min(block + i + 1, num_blocks - 1), window)
        following = Upcoming(next_table, shared if i + 1 < members else 0, next_end)
        newest = Newest(is_alone, i * num_kv_heads, slot, alone.own, head_dim)
        _attend(rows, apart, group, begin, seen, first, end, table, kv_heads, newest, following, cache, mine)
        if i < 0:
            continue
        for number in range(num_kv_heads):
            of_one = query_rows.from_row(mine, number * apart, width)
            target = token * num_heads + (kv_head + number) * group
            least = products.least_result(of_one.rows_q)
            query_rows.write_rows(rows, group, target, num_heads, head_dim, width, least, of_one, gates, out)
        row += query_rows.stride(rows)


@kernel(
    **{"q": F32, "cache": CACHE, "queries": query_blocks.QUERIES, "heads": HEADS, "rotary": ROTARY, "alone": ALONE},
    **{"rows_q": Own(INNER), "gates": GATES, "out": DTYPE},
)
def attention(
    item, q, cache, queries, heads, rotary, alone, rows_q, most_rows, window, gates, most, most_heads, num_blocks, out
):
    """Compute attention for up to ``most`` of ``num_blocks`` query blocks and for ``most_heads`` KV heads.

    ``rows_q`` points to ``layout.attention_scratch_floats`` words for ``most_rows`` rows.
    """
    shares, group = cache.num_kv_heads // most_heads, heads.num_heads // cache.num_kv_heads
    block, first, last = item // shares, item % shares * most_heads, (item % shares + 1) * most_heads
    members = query_blocks.members(queries, block, most, num_blocks)
    if members:
        scratch = query_rows.divide_scratch(rows_q, most_rows, cache.width, cache.values)
        rows, at_once = query_blocks.rows_of(queries, block, members, group), products.rows_at_once(scratch.rows_q)
        together = query_blocks.heads_together(rows, at_once, most_heads)
        for head in range(first, last, together):
            some = head, min(together, last - head)
            _attend_together(
                block, members, num_blocks, some, queries, q, heads, rotary, alone, window, cache, scratch, gates, out
            )

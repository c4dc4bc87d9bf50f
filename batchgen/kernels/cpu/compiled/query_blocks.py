"""Query blocks: a few tokens of one sequence each, and the grouping of blocks into items of attention."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import query_rows, simd
from batchgen.kernels.cpu.compiled.entry import Group

QUERIES = Group("Queries", "blocks positions tables max_blocks", blocks=np.int32, positions=np.int32, tables=np.int32)


@simd.inline
def piece(queries, block, window):
    """(block table, first token, number of tokens, last position the first token sees, end of all positions seen).

    If all tokens see the whole text, the last two are both the text's end. If tokens see later ones, a token's window
    is centred on it.
    """
    at = block * layout.QUERY_BLOCK_FIELDS
    table, token = simd.shifted(queries.tables, queries.blocks[at] * queries.max_blocks), queries.blocks[at + 1]
    count, reach, start = queries.blocks[at + 2], queries.blocks[at + 5], queries.positions[token]
    if reach and not window:
        return table, token, count, reach, reach
    last = start + window // 2 if reach else start
    return table, token, count, last, min(last + count, reach) if reach else last + count


@simd.inline
def rows_of(queries, block, members, group):
    """The rows of scratch memory that one KV head takes for ``members`` query blocks, starting at ``block``."""
    rows = 0
    for i in range(members):
        rows += query_rows.stride(queries.blocks[(block + i) * layout.QUERY_BLOCK_FIELDS + 2] * group)
    return rows


@simd.inline
def members(queries, block, most, num_blocks):
    """The number of query blocks in the item that starts at ``block``; 0 if ``block`` is in an earlier block's item."""
    place_of = simd.shifted(queries.blocks, 3)
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
def heads_together(rows, at_once, most):
    """The number of KV heads, of ``rows`` rows each, to walk side by side; 1 if products take longer than reading."""
    if rows > 2 * layout.MAX_QUERIES:
        return 1
    return min(layout.SCORE_ROWS // query_rows.stride(min(rows, at_once)), most)

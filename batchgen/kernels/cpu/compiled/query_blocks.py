"""Query blocks: a few tokens of one sequence each, and the grouping of blocks into items of attention."""

from __future__ import annotations

import numpy as np

from batchgen.kernels.cpu import layout
from batchgen.kernels.cpu.compiled import query_rows, simd
from batchgen.kernels.cpu.compiled.entry import Group

QUERIES = Group("Queries", "blocks positions tables max_blocks", blocks=np.int32, positions=np.int32, tables=np.int32)


@simd.inline
def piece(queries, block, window):
    """The block table of a query block, its first token, number of tokens, and how far the first token sees.

    Also the end of the positions that all see; if all tokens see the whole text, both are equal. The window of a token
    that sees later ones is centred on it.
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
    """Rows of scratch memory for one KV head of ``members`` query blocks."""
    rows = 0
    for i in range(members):
        rows += query_rows.stride(queries.blocks[(block + i) * layout.QUERY_BLOCK_FIELDS + 2] * group)
    return rows


@simd.inline
def members(queries, block, most, num_blocks):
    """The number of query blocks from ``block`` on that one item attends for; 0 if an earlier block's item does."""
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
    """KV heads of ``rows`` rows walked side by side; 1 if products of ``at_once`` rows take longer than reading."""
    if rows > 2 * layout.MAX_QUERIES:
        return 1
    return min(layout.SCORE_ROWS // query_rows.stride(min(rows, at_once)), most)

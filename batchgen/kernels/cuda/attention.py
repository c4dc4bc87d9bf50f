"""Ragged paged attention with an online softmax: single tokens split over their context, prompts in tiles.

A sequence's positions fall into spans of ``SPAN``, whatever the batch. Each span is summed by itself and the spans
are then merged in order; a token in decode has one program per span and KV head, a tile of a prompt walks over its
spans in one program. Both call the same two functions below, so with tiles of the same height they sum in the same
order, and nothing that shares the batch takes part in a row's arithmetic.

Rows of a tile are (token, head of the group that shares a KV head), so that grouped heads read keys once and a
single token still fills part of a matrix instruction. Scratch of split decode is float32
[num_seqs, num_heads, num_spans, head_dim], num_spans being that of the longest sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen.kernels.cuda.tiles import tile_of

SPAN = 512
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(best, total, mixed, best2, total2, mixed2):
    """One (largest score, sum of weights, weighted values) of two; fused by hand so that all callers round alike."""
    largest = tl.maximum(best, best2)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # a row that has seen nothing yet
    a, b = tl.exp2(best - base), tl.exp2(best2 - base)
    return largest, tl.fma(total, a, total2 * b), tl.fma(mixed, a[:, None], mixed2 * b[:, None])


@triton.jit
def _attend_span(
    q,
    position,
    keys,
    values,
    table,
    kv_head,
    num_kv_heads,
    first,
    end,
    max_blocks,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """Rows q [rows, dims] at ``position`` [rows] over cached positions [first, end): see ``_merge`` for what returns.

    ``RUN`` positions, aligned to as many, are neighbours in memory: the compiler cannot see it through the block table.
    Keys past ``end`` may hold anything: their scores are replaced. Values are multiplied by a weight of zero,
    which does not silence an infinity, so those past ``end`` are not read.
    """
    ROWS: tl.constexpr = q.shape[0]
    DIMS: tl.constexpr = q.shape[1]
    dim = tl.arange(0, DIMS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(first, end, TILE):
        at = start + tl.arange(0, TILE)
        index = at // BLOCK_SIZE
        block = tl.load(table + index, mask=index < max_blocks, other=0).to(tl.int64)
        block = tl.max_constancy(block, RUN)
        place, offset = block * num_kv_heads + kv_head, tl.max_contiguous(tl.multiple_of(at % BLOCK_SIZE, RUN), RUN)
        k = tl.load(
            keys + (place * (WIDTH * LANES) + offset)[None, :] + dim[:, None] * LANES,
            mask=(dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * LOG2_E
        scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        v = tl.load(
            values + ((place * BLOCK_SIZE + offset) * WIDTH)[:, None] + dim[None, :],
            mask=(at < end)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        total = tl.fma(total, fade, tl.sum(weights, 1))
        best = largest
    return best, total, mixed


@triton.jit
def _queries(q, token, head, valid, num_heads, dtype: tl.constexpr, WIDTH: tl.constexpr, DIMS: tl.constexpr):
    """Rows of q for tokens and heads [rows], as the type that keys have; zero where not ``valid``."""
    dim = tl.arange(0, DIMS)
    at = q + (token.to(tl.int64) * num_heads + head)[:, None] * WIDTH + dim[None, :]
    return tl.load(at, mask=valid[:, None] & (dim < WIDTH)[None, :], other=0.0).to(dtype)


@triton.jit(do_not_specialize=["max_blocks", "num_spans"])
def attend_one_token(
    q,
    keys,
    values,
    tables,
    positions,
    cu_seqlens,
    best_out,
    total_out,
    mixed_out,
    num_heads,
    num_kv_heads,
    max_blocks,
    num_spans,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """One program per sequence, KV head and span, for sequences that have one token in this step."""
    sequence, kv_head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    context = tl.load(positions + token) + 1
    first = span * SPAN
    if (tl.load(cu_seqlens + sequence + 1) - token != 1) | (first >= context):
        return
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    rows = _queries(q, token + row * 0, head, row < GROUP, num_heads, keys.dtype.element_ty, WIDTH, DIMS)
    table = tables + sequence.to(tl.int64) * max_blocks
    best, total, mixed = _attend_span(
        rows,
        context - 1 + row * 0,
        keys,
        values,
        table,
        kv_head,
        num_kv_heads,
        first,
        tl.minimum(first + SPAN, context),
        max_blocks,
        TILE,
        HEAD_DIM,
        WIDTH,
        BLOCK_SIZE,
        LANES,
        RUN,
    )
    to = (sequence.to(tl.int64) * num_heads + head) * num_spans + span
    dim = tl.arange(0, DIMS)
    tl.store(best_out + to, best, mask=row < GROUP)
    tl.store(total_out + to, total, mask=row < GROUP)
    tl.store(
        mixed_out + to[:, None] * HEAD_DIM + dim[None, :],
        mixed,
        mask=(row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_spans"])
def merge_spans(
    best_in,
    total_in,
    mixed_in,
    positions,
    cu_seqlens,
    out,
    num_heads,
    num_spans,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program per sequence and ``ROWS`` heads: the spans of ``attend_one_token`` in order."""
    sequence = tl.program_id(0).to(tl.int64)
    token = tl.load(cu_seqlens + sequence)
    if tl.load(cu_seqlens + sequence + 1) - token != 1:
        return
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    valid = head < num_heads
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for span in range(0, tl.load(positions + token) // SPAN + 1):
        at = (sequence * num_heads + head) * num_spans + span
        best2 = tl.load(best_in + at, mask=valid, other=0.0)
        total2 = tl.load(total_in + at, mask=valid, other=1.0)
        mixed2 = tl.load(mixed_in + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        best, total, mixed = _merge(best, total, mixed, best2, total2, mixed2)
    to = out + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
def attend_tile(
    q,
    keys,
    values,
    tables,
    positions,
    cu_seqlens,
    out,
    num_seqs,
    num_heads,
    num_kv_heads,
    max_blocks,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """One program per tile of ``TOKENS`` tokens and KV head, for sequences with more than one token in this step."""
    kv_head = tl.program_id(1)
    sequence, first_token, end_token = tile_of(tl.program_id(0), cu_seqlens, num_seqs, TOKENS, False)
    if (first_token >= end_token) | (end_token - tl.load(cu_seqlens + sequence) == 1):
        return
    row = tl.arange(0, ROWS)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    valid = (row < TOKENS * GROUP) & (token < end_token)
    rows = _queries(q, token, head, valid, num_heads, keys.dtype.element_ty, WIDTH, DIMS)
    position = tl.load(positions + token, mask=valid, other=0)
    context = tl.load(positions + tl.minimum(first_token + TOKENS, end_token) - 1) + 1
    table = tables + tl.cast(sequence, tl.int64) * max_blocks
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(0, context, SPAN):
        best2, total2, mixed2 = _attend_span(
            rows,
            position,
            keys,
            values,
            table,
            kv_head,
            num_kv_heads,
            first,
            tl.minimum(first + SPAN, context),
            max_blocks,
            TILE,
            HEAD_DIM,
            WIDTH,
            BLOCK_SIZE,
            LANES,
            RUN,
        )
        best, total, mixed = _merge(best, total, mixed, best2, total2, mixed2)
    dim = tl.arange(0, DIMS)
    to = out + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)

"""Ragged paged attention with an online softmax: single tokens split over their context, prompts in tiles.

Spans of ``SPAN`` positions are summed separately, then merged in order: a row's bits do not depend on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.cuda import tuning
from batchgen.kernels.cuda.tiles import SplitCounters, num_tiles, power_of_two, tile_of
from batchgen.kernels.cuda.tuning import SPAN
from batchgen.kernels.inputs import KVCache, ModelInput

LOG2_E = tl.constexpr(1.4426950408889634)


# Places in LAYOUT, the sizes that the kernels here are compiled for: positions per span and per step of the loop; heads
# per KV head; head_dim and the power of two that holds it; width, block_size and lanes of ``KVCache``; the window.
SPAN_AT, TILE_AT, GROUP_AT, HEAD_DIM_AT, DIMS_AT = (tl.constexpr(i) for i in range(5))
WIDTH_AT, BLOCK_SIZE_AT, LANES_AT, WINDOW_AT = (tl.constexpr(i) for i in range(5, 9))


@triton.jit
def _lowest(position, LAYOUT: tl.constexpr):
    """The first position that the token at ``position`` attends to."""
    WINDOW: tl.constexpr = LAYOUT[WINDOW_AT]
    return tl.maximum(position + 1 - WINDOW, 0) if WINDOW else position * 0


@triton.jit
def _gated(mixed, gates, token, head, valid, num_heads):
    """Rows of heads times the sigmoid of their gate; each row of ``gates`` ends with one logit per head."""
    logits, columns = gates
    if logits is not None:
        at = logits + token.to(tl.int64) * columns + columns - num_heads + head
        mixed *= tl.sigmoid(tl.load(at, mask=valid, other=0.0).to(tl.float32))[:, None]
    return mixed


@triton.jit
def _merge(best, total, mixed, best2, total2, mixed2):
    """Merge two (largest score, sum of weights, weighted values), fused by hand so that all callers round alike."""
    largest = tl.maximum(best, best2)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # a row that has seen nothing yet
    a, b = tl.exp2(best - base), tl.exp2(best2 - base)
    return largest, tl.fma(total, a, total2 * b), tl.fma(mixed, a[:, None], mixed2 * b[:, None])


@triton.jit
def _attend_span(q, position, cache, table, kv_head, first, end, max_blocks, LAYOUT: tl.constexpr):
    """Rows q [rows, dims] at ``position`` [rows] over cached positions [first, end); returns values for ``_merge``.

    ``cache`` is (keys, values, scales, num_kv_heads). Scores of keys past ``end`` are replaced; values past it are not
    read, since zero times infinity is NaN. Cached integers, which 16-bit types hold exactly, are multiplied before
    their scales; a weight times a scale may be too small for float16, so it is bfloat16.
    """
    keys, values, scales, num_kv_heads = cache
    TILE: tl.constexpr = LAYOUT[TILE_AT]
    HEAD_DIM: tl.constexpr = LAYOUT[HEAD_DIM_AT]
    WIDTH: tl.constexpr = LAYOUT[WIDTH_AT]
    BLOCK_SIZE: tl.constexpr = LAYOUT[BLOCK_SIZE_AT]
    LANES: tl.constexpr = LAYOUT[LANES_AT]
    ROWS: tl.constexpr = q.shape[0]
    DIMS: tl.constexpr = q.shape[1]
    dim = tl.arange(0, DIMS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(first, end, TILE):
        at = start + tl.arange(0, TILE)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            index = at // BLOCK_SIZE
            block = tl.load(table + index, mask=index < max_blocks, other=0).to(tl.int64)
        place, offset = block * num_kv_heads + kv_head, at % BLOCK_SIZE
        key = keys + ((place * LANES + offset) * WIDTH)[:, None] + dim[None, :]
        k = tl.load(key, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        if scales is None:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2_E
        else:
            scale = scales + place * (2 * LANES) + offset  # the keys' scales; the values' scales follow ``LANES`` later
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (tl.load(scale) * LOG2_E)[None, :]
        visible = at[None, :] <= position[:, None]
        if LAYOUT[WINDOW_AT]:
            visible &= at[None, :] >= _lowest(position, LAYOUT)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        value = values + ((place * BLOCK_SIZE + offset) * WIDTH)[:, None] + dim[None, :]
        v = tl.load(value, mask=(at < end)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        shares = weights
        if scales is not None:
            shares = weights * tl.load(scale + LANES, mask=at < end, other=0.0)[None, :]
            v = v.to(tl.float32 if q.dtype == tl.float32 else tl.bfloat16)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        total = tl.fma(total, fade, tl.sum(weights, 1))
        best = largest
    return best, total, mixed


@triton.jit
def _queries(q, token, head, valid, num_heads, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows of q for tokens and heads [rows], in ``dtype``; zero where not ``valid``."""
    dim = tl.arange(0, LAYOUT[DIMS_AT])
    WIDTH: tl.constexpr = LAYOUT[WIDTH_AT]
    at = q + (token.to(tl.int64) * num_heads + head)[:, None] * WIDTH + dim[None, :]
    return tl.load(at, mask=valid[:, None] & (dim < WIDTH)[None, :], other=0.0).to(dtype)


@triton.jit
def _folded(spans, at, row_is_valid, num_seen, LAYOUT: tl.constexpr):
    """``_merge`` of the first ``num_seen`` spans in order; ``at`` [rows] is where the spans of a head start."""
    best_in, total_in, mixed_in = spans
    HEAD_DIM: tl.constexpr = LAYOUT[HEAD_DIM_AT]
    DIMS: tl.constexpr = LAYOUT[DIMS_AT]
    dim = tl.arange(0, DIMS)
    inside = row_is_valid[:, None] & (dim < HEAD_DIM)[None, :]
    best = tl.full([at.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([at.shape[0]], tl.float32)
    mixed = tl.zeros([at.shape[0], DIMS], tl.float32)
    for span in range(0, num_seen):
        best2 = tl.load(best_in + at + span, mask=row_is_valid, other=0.0)
        total2 = tl.load(total_in + at + span, mask=row_is_valid, other=1.0)
        mixed2 = tl.load(mixed_in + (at + span)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        best, total, mixed = _merge(best, total, mixed, best2, total2, mixed2)
    return total, mixed


@triton.jit(do_not_specialize=["max_blocks", "num_spans"])
def attend_one_token(
    tensors,
    spans,
    counters,
    gates,
    out,
    num_heads,
    num_kv_heads,
    max_blocks,
    num_spans,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program per sequence, KV head and span with visible positions, for sequences with one token in this step.

    The last program to arrive merges the spans, in order, and resets the counter in ``counters`` [num_seqs,
    num_kv_heads] to zero for the next launch.
    """
    q, keys, values, scales, tables, positions, cu_seqlens = tensors
    best_out, total_out, mixed_out = spans
    SPAN: tl.constexpr = LAYOUT[SPAN_AT]
    GROUP: tl.constexpr = LAYOUT[GROUP_AT]
    HEAD_DIM: tl.constexpr = LAYOUT[HEAD_DIM_AT]
    TILE: tl.constexpr = LAYOUT[TILE_AT]
    sequence, kv_head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + sequence)
    context = tl.load(positions + token) + 1
    lowest = _lowest(context - 1, LAYOUT)
    first = (lowest // SPAN + span) * SPAN
    if (tl.load(cu_seqlens + sequence + 1) - token != 1) | (first >= context):
        return
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    valid = row < GROUP
    rows = _queries(q, token + row * 0, head, valid, num_heads, out.dtype.element_ty, LAYOUT)
    table = tables + sequence.to(tl.int64) * max_blocks
    end = tl.minimum(first + SPAN, context)
    cache = (keys, values, scales, num_kv_heads)
    position = context - 1 + row * 0
    if LAYOUT[WINDOW_AT]:
        first = tl.maximum(first, lowest // TILE * TILE)
    best, total, mixed = _attend_span(rows, position, cache, table, kv_head, first, end, max_blocks, LAYOUT)
    dim = tl.arange(0, LAYOUT[DIMS_AT])
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    num_seen = (context - 1) // SPAN - lowest // SPAN + 1
    is_last = num_seen == 1
    if num_seen > 1:
        at = (sequence.to(tl.int64) * num_heads + head) * num_spans
        tl.store(best_out + at + span, best, mask=valid)
        tl.store(total_out + at + span, total, mask=valid)
        tl.store(mixed_out + (at + span)[:, None] * HEAD_DIM + dim[None, :], mixed, mask=inside)
        arrived = counters + sequence * num_kv_heads + kv_head
        tl.debug_barrier()  # every thread has written before one of them counts
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == num_seen - 1
        if is_last:
            total, mixed = _folded(spans, at, valid, num_seen, LAYOUT)
            tl.store(arrived, 0)
    if is_last:
        mixed = _gated(mixed / total[:, None], gates, token + row * 0, head, valid, num_heads)
        to = out + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
def attend_tile(
    tensors, gates, out, num_seqs, num_heads, num_kv_heads, max_blocks, ROWS: tl.constexpr, LAYOUT: tl.constexpr
):
    """One program per tile of ``ROWS // GROUP`` tokens and KV head, for sequences with several tokens in this step."""
    q, keys, values, scales, tables, positions, cu_seqlens = tensors
    GROUP: tl.constexpr = LAYOUT[GROUP_AT]
    HEAD_DIM: tl.constexpr = LAYOUT[HEAD_DIM_AT]
    DIMS: tl.constexpr = LAYOUT[DIMS_AT]
    SPAN: tl.constexpr = LAYOUT[SPAN_AT]
    TILE: tl.constexpr = LAYOUT[TILE_AT]
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    sequence, first_token, end_token = tile_of(tl.program_id(0), cu_seqlens, num_seqs, TOKENS, False)
    if (first_token >= end_token) | (end_token - tl.load(cu_seqlens + sequence) == 1):
        return
    row = tl.arange(0, ROWS)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    valid = (row < TOKENS * GROUP) & (token < end_token)
    rows = _queries(q, token, head, valid, num_heads, out.dtype.element_ty, LAYOUT)
    position = tl.load(positions + token, mask=valid, other=0)
    context = tl.load(positions + tl.minimum(first_token + TOKENS, end_token) - 1) + 1
    table = tables + tl.cast(sequence, tl.int64) * max_blocks
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    cache = (keys, values, scales, num_kv_heads)
    lowest = _lowest(tl.load(positions + first_token), LAYOUT)
    for span in range(lowest // SPAN * SPAN, context, SPAN):
        first, end = span, tl.minimum(span + SPAN, context)
        if LAYOUT[WINDOW_AT]:
            first = tl.maximum(span, lowest // TILE * TILE)
        best2, total2, mixed2 = _attend_span(rows, position, cache, table, kv_head, first, end, max_blocks, LAYOUT)
        best, total, mixed = _merge(best, total, mixed, best2, total2, mixed2)
    dim = tl.arange(0, DIMS)
    to = out + (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    mixed = _gated(mixed / total[:, None], gates, token, head, valid, num_heads)
    tl.store(to, mixed.to(out.dtype.element_ty), mask=inside)


def attend(
    q: Tensor,
    cache: KVCache,
    inputs: ModelInput,
    out: Tensor,
    window: int,
    gates: Tensor | None,
    counters: SplitCounters,
    one_order: bool,
) -> None:
    """Write the attention of queries q [num_tokens, num_heads, width] to ``out`` [num_tokens, num_heads * head_dim].

    ``Heads`` explains ``window`` and the columns of ``gates``. With ``one_order``, prompts have tiles as high as a
    single token's, and the compiler cannot choose how to round: a token gets the same bits in a prompt as by itself.
    """
    num_tokens, num_heads, width = q.shape
    head_dim, num_kv_heads = out.shape[1] // num_heads, cache.keys.shape[1]
    num_seqs, max_blocks = inputs.block_tables.shape
    num_spans = -(-max_blocks * cache.block_size // SPAN)
    if window:
        num_spans = min(num_spans, (window - 2) // SPAN + 2)
    group, is_wide = num_heads // num_kv_heads, out.element_size() == 4
    rows = max(tuning.MIN_ROWS, power_of_two(group))
    tile, dims = tuning.TILE_FLOAT32 if is_wide else tuning.TILE, max(16, power_of_two(head_dim))
    prompt_rows, num_stages = tuning.PROMPT_ROWS, tuning.ATTENTION_STAGES
    if dims > tuning.WIDE_DIMS:
        prompt_rows, num_stages = tuning.WIDE_PROMPT_ROWS, tuning.WIDE_STAGES
    layout = (SPAN, tile, group, head_dim, dims, width, cache.block_size, cache.lanes, window)
    options = {"LAYOUT": layout, "num_stages": num_stages, "enable_fp_fusion": not one_order}
    kv = (cache.keys, cache.values, cache.scales)
    tensors = (q, *kv, inputs.block_tables, inputs.positions, inputs.cu_seqlens)
    gating = (gates, 0 if gates is None else gates.shape[1])
    best, total = (q.new_empty(num_seqs, num_heads, num_spans) for _ in range(2))
    spans = (best, total, q.new_empty(num_seqs, num_heads, num_spans, head_dim))
    arrived = counters.at_least(num_seqs * num_kv_heads, out.device)
    attend_one_token[(num_seqs, num_kv_heads, num_spans)](
        *(tensors, spans, arrived, gating, out, num_heads, num_kv_heads, max_blocks, num_spans),
        ROWS=rows,
        num_warps=tuning.ONE_TOKEN_WARPS,
        **options,
    )
    if num_tokens == num_seqs:
        return
    if not one_order:
        rows = max(tuning.PROMPT_ROWS_FLOAT32 if is_wide else prompt_rows, rows)
    attend_tile[(num_tiles(num_tokens, num_seqs, rows // group), num_kv_heads)](
        *(tensors, gating, out, num_seqs, num_heads, num_kv_heads, max_blocks),
        ROWS=rows,
        num_warps=tuning.PROMPT_WARPS if rows < 128 else tuning.TALL_PROMPT_WARPS,
        **options,
    )

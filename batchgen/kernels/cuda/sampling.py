"""Draws one token per row of logits without a sort: one program per row, the logits read again instead of kept.

A filter's threshold is found three of the 30 bits of a probability at a time, from logits in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(4096)
DIGIT_BITS = tl.constexpr(3)
NUM_CANDIDATES = tl.constexpr(8)  # one per value of a digit
NUM_DIGITS = tl.constexpr(10)
MIN = tl.constexpr(2 << 23)  # bits of 2**-125: a smaller probability counts as zero, as on the other back ends
HOTTEST = tl.constexpr(2.0**125)  # the device's division fails beyond 2**126; both make tokens equally likely


@triton.jit
def _probabilities(logits, start, width, peak, temperature):
    """exp((logit - peak) / temperature) of ``BLOCK`` tokens from ``start`` on; zero past the row's end."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
    return tl.exp((x - peak) / temperature)


@triton.jit
def _total(logits, width, peak, temperature):
    """Sum of a row's probabilities; NaN if a logit is NaN or +inf, or all are -inf."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        total += _probabilities(logits, start, width, peak, temperature)
    return tl.sum(total)


@triton.jit
def _weights(logits, width, peak, temperature, floor, candidates, BY_MASS: tl.constexpr):
    """Weight of the tokens at or above each of ``candidates`` (bits), without tokens below ``floor``.

    A token weighs its probability if ``BY_MASS``, else one. Sums have one shape, so that a subset never weighs more.
    """
    weighed = tl.zeros([candidates.shape[0], BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        p = _probabilities(logits, start, width, peak, temperature)
        bits = p.to(tl.int32, bitcast=True)
        weight = p if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where(bits >= floor, weight, 0.0)
        weighed += tl.where(bits[None, :] >= candidates[:, None], weight[None, :], 0.0)
    return tl.sum(weighed, 1)


@triton.jit
def _threshold(logits, width, peak, temperature, floor, target, BY_MASS: tl.constexpr):
    """The largest probability (bits) such that the tokens at or above it weigh ``target`` or more, else ``floor``."""
    digit = tl.arange(0, NUM_CANDIDATES)
    threshold = floor * 0
    for place in range(NUM_DIGITS):
        shift = (NUM_DIGITS - 1 - place) * DIGIT_BITS
        candidates = threshold + (digit << shift)
        weights = _weights(logits, width, peak, temperature, floor, candidates, BY_MASS)
        enough = tl.sum((weights.to(tl.float64) >= target).to(tl.int32))
        threshold += tl.maximum(enough - 1, 0) << shift
    return tl.maximum(threshold, floor)


@triton.jit
def _mass(logits, width, peak, temperature, floor):
    """Weight of all tokens at or above ``floor``, summed as ``_threshold`` sums."""
    same = floor + tl.zeros([NUM_CANDIDATES], tl.int32)
    return tl.max(_weights(logits, width, peak, temperature, floor, same, True)).to(tl.float64)


@triton.jit
def _cumulative(logits, start, width, peak, temperature, floor, reached):
    """(kept tokens, cumulative probability in float64) of ``BLOCK`` tokens, after ``reached`` in earlier blocks."""
    p = _probabilities(logits, start, width, peak, temperature)
    kept = p.to(tl.int32, bitcast=True) >= floor
    return kept, reached + tl.cumsum(tl.where(kept, p, 0.0).to(tl.float64), 0)


@triton.jit
def _draw(logits, width, peak, temperature, floor, uniform):
    """First token at which the sum of probabilities, at or above ``floor``, exceeds ``uniform`` times the total."""
    whole = uniform * 0.0
    last = floor * 0
    for start in range(0, width, BLOCK):
        kept, cumulative = _cumulative(logits, start, width, peak, temperature, floor, whole)
        whole = tl.max(cumulative)
        last = tl.maximum(last, tl.max(tl.where(kept, start + tl.arange(0, BLOCK), 0)))
    target = uniform * whole
    drawn = last  # if rounding leaves nothing above the target
    reached = whole * 0.0
    for start in range(0, width, BLOCK):
        kept, cumulative = _cumulative(logits, start, width, peak, temperature, floor, reached)
        column = start + tl.arange(0, BLOCK)
        drawn = tl.minimum(drawn, tl.min(tl.where(kept & (cumulative > target), column, last)))
        reached = tl.max(cumulative)
    return drawn


@triton.jit
def _peak(logits, width):
    """The largest of a row's logits, NaN left out."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    return tl.max(largest)


@triton.jit
def sample(logits, temperature, min_p, top_k, top_p, uniform, out, width):
    """One program per row; -1 for a row that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    hot = tl.minimum(tl.load(temperature + row), HOTTEST)
    peak = _peak(logits, width)
    if _total(logits, width, peak, hot) > 0.0:
        floor = tl.maximum(tl.load(min_p + row).to(tl.int32, bitcast=True), MIN)
        k = tl.load(top_k + row)
        if (k > 0) & (k < width):
            target = k.to(tl.float64)
            floor = _threshold(logits, width, peak, hot, floor, target, False)
        nucleus = tl.load(top_p + row)
        if nucleus < 1.0:
            target = nucleus * _mass(logits, width, peak, hot, floor)
            floor = _threshold(logits, width, peak, hot, floor, target, True)
        tl.store(out + row, _draw(logits, width, peak, hot, floor, tl.load(uniform + row)).to(tl.int64))
    else:
        tl.store(out + row, tl.full([], -1, tl.int64))


@triton.jit
def logsumexp(logits, out, width):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    peak = _peak(logits + row * width, width)
    tl.store(out + row, peak + tl.log(_total(logits + row * width, width, peak, 1.0)))


@triton.jit
def mask(logits, rows, bits, width, num_words):
    """One program per row to mask and ``BLOCK`` of its tokens; allowed tokens are not read."""
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + item * num_words + column // 32, mask=column < width, other=-1)
    is_forbidden = (word >> (column % 32)) & 1 == 0
    at = logits + tl.load(rows + item) * width + column
    v = tl.load(at, mask=is_forbidden, other=0.0).to(tl.float32)
    tl.store(at, float("-inf"), mask=is_forbidden & (v == v))

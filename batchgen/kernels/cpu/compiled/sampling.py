"""Draws one token per row of logits, without a sort and without a copy of the logits.

Probabilities in (0, 1] are ordered like their bits: histograms of 12, 10 and 10 bits find a filter's threshold.
"""

from __future__ import annotations

import math

import numpy as np

from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, Own, kernel
from batchgen.kernels.cpu.compiled.rows import row_max
from batchgen.kernels.cpu.compiled.simd import F32
from batchgen.kernels.cpu.layout import BINS, LANES

F64 = np.float64
MIN = np.int64(2 << 23)  # bits of 2**-125; a smaller probability counts as zero, since exp is 0 below 2**-126


@simd.jit
def _threshold(bits, p, width, floor, target, by_mass, bins):
    """The largest probability (as bits) such that the tokens at or above it weigh at least ``target``.

    A token weighs its probability if ``by_mass``, else one. Tokens below ``floor`` (bits) do not count. If all tokens
    together weigh less, the result is ``floor``.
    """
    prefix, low = np.int64(0), 32
    above = 0.0
    for digit in (12, 10, 10):
        shift = low - digit
        for b in range(1 << digit):
            bins[b] = 0.0
        for i in range(width):
            x = np.int64(bits[i])
            if x >= floor and x >> low == prefix:
                bins[(x >> shift) & ((1 << digit) - 1)] += F64(p[i]) if by_mass else 1.0
        b = (1 << digit) - 1
        while b >= 0 and above + bins[b] < target:
            above += bins[b]
            b -= 1
        if b < 0:  # no tokens are left: all of them weigh less, or rounding made the sum too small
            return floor if low == 32 else max(floor, prefix << low)
        prefix, low = prefix << digit | b, shift
    return prefix


@simd.jit
def _probabilities(x, start, width, temperature, p):
    """exp((x - max x) / temperature) for one row, zero in the padding up to a whole vector.

    Returns their rough sum: NaN if any logit is NaN or infinite upward (NaNs may have any sign, so they must be
    caught before probabilities are ordered by their bits).
    """
    by, peak = simd.splat(F32(1.0) / temperature), simd.splat(row_max(x, start, width))
    zero = simd.splat(F32(0.0))
    total = zero
    for i in range(0, width, LANES):
        count = width - i
        v = simd.load_some(x, start + i, count)
        v = simd.exp(p, simd.mul(simd.sub(v, peak), by))
        v = simd.keep_lanes(v, zero, count)
        total = simd.add(total, v)
        simd.store(p, i, v)
    return simd.sum_lanes(total)


@simd.jit
def _mass(bits, p, width, floor):
    total = 0.0
    for i in range(width):
        if bits[i] >= floor:
            total += F64(p[i])
    return total


@simd.jit
def _draw(bits, p, width, floor, u):
    """First token at which the cumulative probability of tokens at or above ``floor`` exceeds ``u`` times the total."""
    target, reached, last = u * _mass(bits, p, width, floor), 0.0, -1
    for i in range(width):
        if bits[i] >= floor:
            reached += F64(p[i])
            last = i
            if reached > target:
                break
    return last


@kernel(x=DTYPE, out=np.int64, temperature=F32, min_p=F32, top_k=np.int64, top_p=F64, uniform=F64, bins=Own(F64))
def sample(row, x, out, temperature, min_p, top_k, top_p, uniform, bins, width):
    """Draw from each row of x to ``out`` [rows], -1 if not finite; ``bins`` has ``layout.sampling_scratch_bytes``."""
    behind = simd.address(bins) + 8 * BINS
    p, bits = simd.pointer(behind, F32), simd.pointer(behind, np.int32)
    if not _probabilities(x, row * width, width, temperature[row], p) > 0.0:
        out[row] = -1
        return
    floor = max(np.int64(simd.bits_of_float(min_p[row])), MIN)
    if 0 < top_k[row] < width:
        floor = max(floor, _threshold(bits, p, width, floor, F64(top_k[row]), False, bins))
    if top_p[row] < 1.0:
        target = top_p[row] * _mass(bits, p, width, floor)
        floor = max(floor, _threshold(bits, p, width, floor, target, True, bins))
    out[row] = _draw(bits, p, width, floor, uniform[row])


@kernel(x=DTYPE, out=F32)
def logsumexp(row, x, out, width):
    """Log-sum-exp of each row of x [rows, width] to ``out`` [rows]."""
    start, peak, lowest = row * width, row_max(x, row * width, width), simd.splat(F32(-np.inf))
    by, total = simd.splat(peak), simd.splat(F32(0.0))
    for i in range(0, width, LANES):
        count = width - i
        v = simd.load_some(x, start + i, count)
        total = simd.add(total, simd.exp(out, simd.keep_lanes(simd.sub(v, by), lowest, count)))
    out[row] = peak + F32(math.log(simd.sum_lanes(total)))

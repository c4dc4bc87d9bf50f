"""Loops that do nothing but multiply, or nothing but read: the most that a processor and its memory can do.

Products stay in registers, and so many totals are under way that none waits for the one before. Reads come from several
places of a large buffer at once. Both are what a linear would be without the other half of its work.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit, simd
from batchgen.kernels.cpu.compiled.entry import DTYPE, Own, kernel
from batchgen.kernels.cpu.compiled.int8 import adds_up, emit_dot
from batchgen.kernels.cpu.compiled.simd import ANY, F32, I64, emitted
from batchgen.kernels.cpu.kernel_specs import PEAK_TOTALS
from batchgen.kernels.cpu.layout import LANES, NUM_STREAMS


def emit_products(builder, place, rounds, num_totals):
    """Add ``rounds`` products to each of ``num_totals`` vectors at ``place``; their factors are the two that follow.

    The element type of the pointer says what a product is: one of float32, pairs of bfloat16, integers of 32 bits.
    """
    kind = emit.INT_VECTOR if emit.is_int8(place) else emit.VECTOR
    start = builder.bitcast(place, kind.as_pointer())
    slots = [builder.gep(start, [emit.number(i)]) for i in range(num_totals + 2)]
    totals = [cgutils.alloca_once_value(builder, builder.load(slot, align=4)) for slot in slots[:num_totals]]
    a, b = (builder.load(slot, align=4) for slot in slots[num_totals:])

    def loaded_anew(slot):
        """What is there each time: products of what stays the same are else computed once, before the loop."""
        kept = ir.FunctionType(slot.type, [slot.type])
        return builder.load(builder.asm(kept, "", "=r,0", [slot], side_effect=True), align=4)

    def product(total):
        if emit.is_int8(place):
            factor = b if adds_up() else loaded_anew(slots[-1])
            return emit_dot(builder, a, factor, total)
        return emit.dot(builder, a, b, total) if emit.is_bf16(place) else emit.fma(builder, a, b, total)

    with cgutils.for_range(builder, rounds):
        for total in totals:
            builder.store(product(builder.load(total)), total)
    for slot, total in zip(slots, totals, strict=False):
        builder.store(builder.load(total), slot, align=4)


@emitted(types.void, ANY, I64)
def _products(builder, place, rounds):
    emit_products(builder, place, rounds, PEAK_TOTALS)


@kernel(totals=Own(DTYPE))
def multiply(_, totals, rounds):
    """``rounds`` products for each of ``totals``; with the factors behind them they are a worker's ``PEAK_VECTORS``."""
    _products(totals, rounds)


@kernel(total=Own(F32), x=F32)
def read(item, total, x, size):
    """Add ``size`` elements of x to a worker's total of 16; they are read from ``NUM_STREAMS`` places at once."""
    part, here = size // NUM_STREAMS, simd.shifted(x, item * size)
    a = simd.load(total, 0)
    b = c = d = simd.splat(F32(0.0))
    for i in range(0, part, LANES):
        a = simd.add(a, simd.load(here, i))
        b = simd.add(b, simd.load(here, part + i))
        c = simd.add(c, simd.load(here, 2 * part + i))
        d = simd.add(d, simd.load(here, 3 * part + i))
    simd.store(total, 0, simd.add(simd.add(a, b), simd.add(c, d)))

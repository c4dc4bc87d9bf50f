"""Loops that do nothing but multiply, or nothing but read: the most that a processor and its memory can do.

Products stay in registers, and so many totals are under way that none waits for the one before. Reads come from several
places of a large buffer at once. Both are what a linear would be without the other half of its work.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit, simd
from batchgen.kernels.cpu.compiled.int8 import emit_dots
from batchgen.kernels.cpu.compiled.simd import ANY, F32, I64, emitted
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.kernel_specs import PEAK_TOTALS
from batchgen.kernels.cpu.layout import ARGS, LANES, NUM_ITEMS, NUM_STREAMS, PEAK_VECTORS


def emit_products(builder, place, rounds, num_totals):
    """Add ``rounds`` products to each of ``num_totals`` vectors at ``place``; their factors are the two that follow.

    The element type of the pointer says what a product is: one of float32, pairs of bfloat16, eight bytes.
    """
    kind = emit.INT_VECTOR if emit.is_int8(place) else emit.VECTOR
    start = builder.bitcast(place, kind.as_pointer())
    slots = [builder.gep(start, [emit.number(i)]) for i in range(num_totals + 2)]
    totals = [cgutils.alloca_once_value(builder, builder.load(slot, align=4)) for slot in slots[:num_totals]]
    a, b = (builder.load(slot, align=4) for slot in slots[num_totals:])

    def product(total):
        if emit.is_int8(place):
            as_bytes = [builder.bitcast(v, ir.VectorType(ir.IntType(8), 4 * LANES)) for v in (a, b)]
            return emit_dots(builder, as_bytes, [b, a], total)
        return emit.dot(builder, a, b, total) if emit.is_bf16(place) else emit.fma(builder, a, b, total)

    with cgutils.for_range(builder, rounds):
        for total in totals:
            builder.store(product(builder.load(total)), total)
    for slot, total in zip(slots, totals, strict=False):
        builder.store(builder.load(total), slot, align=4)


@emitted(types.void, ANY, I64)
def _products(builder, place, rounds):
    emit_products(builder, place, rounds, PEAK_TOTALS)


@simd.jit
def multiply(args, dtype):
    """Arguments: memory of ``PEAK_VECTORS`` vectors for each worker (address), products of each total in an item."""
    worker = worker_number(args)
    place = simd.pointer(args[ARGS] + worker * PEAK_VECTORS * LANES * 4, dtype)
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        _products(place, args[ARGS + 1])
        item = next_item(args, worker)


@simd.jit
def read(args):
    """Arguments: memory for the sum of each worker, what is read (addresses), float32 elements of an item.

    An item is read from ``NUM_STREAMS`` places at once.
    """
    worker, size = worker_number(args), args[ARGS + 2]
    part = size // NUM_STREAMS
    a = simd.splat(F32(0.0))
    b = c = d = a
    item = next_item(args, worker)
    while item < args[NUM_ITEMS]:
        x = simd.pointer(args[ARGS + 1] + item * size * 4, F32)
        for i in range(0, part, LANES):
            a = simd.add(a, simd.load(x, i))
            b = simd.add(b, simd.load(x, part + i))
            c = simd.add(c, simd.load(x, 2 * part + i))
            d = simd.add(d, simd.load(x, 3 * part + i))
        item = next_item(args, worker)
    sums = simd.pointer(args[ARGS] + worker * PEAK_VECTORS * LANES * 4, F32)
    simd.store(sums, 0, simd.add(simd.add(a, b), simd.add(c, d)))

"""Rotates inputs of products and rounds them to 8-bit integers: the same bits as ``quantize.quantize_rows``.

A group of 128 inputs stays in registers; within a vector, lanes times 1 or -1 are added to permuted lanes.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.compiled.entry import DTYPE, kernel
from batchgen.kernels.cpu.compiled.int8 import integer_type
from batchgen.kernels.cpu.compiled.simd import ANY, BYTES, F32, I64, emitted
from batchgen.kernels.cpu.layout import DOT_GROUP, LANES, MIN_QUANTIZED, ROWS_PER_ITEM, WEIGHT_DIVISOR

_MAX = 127.0
_VECTORS = DOT_GROUP // LANES
_BIT = ir.IntType(1)


def _float(value):
    return ir.Constant(emit.FLOAT, value)


def _lanes(values):
    return ir.Constant(emit.INT_VECTOR, [ir.Constant(emit.INT, value) for value in values])


def emit_hadamard(builder, vectors):
    """``quantize.hadamard`` over all lanes of ``vectors``, whose number is a power of two."""
    mixed, half = list(vectors), len(vectors) // 2
    while half:
        for i in range(len(mixed)):
            if not i & half:
                a, b = mixed[i], mixed[i + half]
                mixed[i], mixed[i + half] = builder.fadd(a, b), builder.fsub(a, b)
        half //= 2
    distance = LANES // 2
    while distance:
        places = _lanes([lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(emit.VECTOR, [_float(-1.0 if lane & distance else 1.0) for lane in range(LANES)])
        mixed = [emit.fma(builder, v, signs, builder.shuffle_vector(v, v, places)) for v in mixed]
        distance //= 2
    return mixed


def _emit_largest(builder, vectors):
    """The largest magnitude of all lanes, and whether any lane is NaN."""
    best, odd = ir.Constant(emit.VECTOR, None), None
    for v in vectors:
        best = emit.call(builder, "llvm.maxnum.v16f32", [best, emit.call(builder, "llvm.fabs.v16f32", [v])])
        is_nan = builder.fcmp_unordered("uno", v, v)
        odd = is_nan if odd is None else builder.or_(odd, is_nan)
    largest = emit.call(builder, "llvm.vector.reduce.fmax.v16f32", [best], emit.FLOAT)
    return largest, emit.call(builder, "llvm.vector.reduce.or.v16i1", [odd], _BIT)


def _emit_integers(builder, vectors, out, to):
    """Write a rotated group as integers, starting at ``out[to]``; returns (largest magnitude or NaN, integers' sum)."""
    largest, is_nan = _emit_largest(builder, vectors)
    is_zero = builder.fcmp_ordered("<", largest, _float(MIN_QUANTIZED))
    factor = builder.select(is_zero, _float(0.0), builder.fdiv(_float(_MAX), largest))
    by, kind = emit.splat(builder, factor), ir.VectorType(integer_type(), LANES)
    start = builder.gep(builder.bitcast(out, integer_type().as_pointer()), [to])
    total = None
    for i in range(len(vectors), _VECTORS):
        at = builder.bitcast(builder.gep(start, [emit.number(i * LANES)]), kind.as_pointer())
        builder.store(ir.Constant(kind, None), at, align=1)
    for i, v in enumerate(vectors):
        nearest = emit.call(builder, "llvm.rint.v16f32", [builder.fmul(v, by)])
        integers = builder.fptosi(nearest, emit.INT_VECTOR)
        total = integers if total is None else builder.add(total, integers)
        at = builder.bitcast(builder.gep(start, [emit.number(i * LANES)]), kind.as_pointer())
        builder.store(builder.trunc(integers, kind), at, align=1)
    summed = emit.call(builder, "llvm.vector.reduce.add.v16i32", [total], emit.INT)
    return builder.select(is_nan, _float(float("nan")), largest), summed


@emitted(types.void, ANY, I64, I64, ANY, ANY, ANY, I64, I64)
def _quantize_group(builder, x, start, count, out, scales, shifts, place, shift):
    """Write the ``count`` numbers that start at ``x[start]`` as the integers of group ``place``, padded with zeros."""

    def write(num_vectors):
        rests = [builder.sub(count, emit.number(i * LANES)) for i in range(num_vectors or _VECTORS)]
        places = [builder.add(start, emit.number(i * LANES)) for i in range(num_vectors or _VECTORS)]
        if num_vectors:
            vectors = [emit.load_part(builder, x, at, rest) for at, rest in zip(places, rests, strict=True)]
        else:
            vectors = [emit.load(builder, x, at) for at in places]
        rotated = emit_hadamard(builder, vectors)
        largest, total = _emit_integers(builder, rotated, out, builder.mul(place, emit.number(DOT_GROUP)))
        divisor = _float(_MAX * len(vectors) * LANES / WEIGHT_DIVISOR)
        builder.store(builder.fdiv(largest, divisor), builder.gep(scales, [place]))
        taken = builder.mul(total, builder.trunc(shift, emit.INT))
        builder.store(builder.neg(taken), builder.gep(shifts, [place]))

    is_whole = builder.icmp_signed("==", count, emit.number(DOT_GROUP))
    with builder.if_else(is_whole) as (whole, part):
        with whole:
            write(0)
        with part:
            length = emit.number(1)
            for num_vectors in (2, 4, 8):
                is_longer = builder.icmp_signed(">", count, emit.number(num_vectors * LANES // 2))
                length = builder.select(is_longer, emit.number(num_vectors), length)
            emit.switch(builder, length, (1, 2, 4, 8), write)


@kernel(x=DTYPE, out=BYTES, scales=F32, shifts=np.int32)
def quantize_rows(item, x, out, scales, shifts, rows, width, groups, shift):
    """Quantize x [rows, width] to ``out`` [rows, groups * DOT_GROUP], scales and shifts [rows, groups].

    Since ``shift`` is added to weights, a product is too large by ``shift`` times the sum of x; ``shifts`` cancel that.
    """
    for row in range(item * ROWS_PER_ITEM, min(rows, (item + 1) * ROWS_PER_ITEM)):
        for group in range(groups):
            start, place = group * DOT_GROUP, row * groups + group
            count = min(width - start, DOT_GROUP)
            _quantize_group(x, row * width + start, count, out, scales, shifts, place, shift)

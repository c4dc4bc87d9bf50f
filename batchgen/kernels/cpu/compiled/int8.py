"""Weights of 8 bits in a tile: read as numbers, or multiplied as the integers that they are. Emitted as LLVM IR.

Numbers: a strip is, for each group of 32 inputs, 16 float16 scales and [16 pairs, 16 outputs, 2 inputs] of bytes. A
number is the integer times its scale, rounded to the type in which the product is computed.

Integers: a strip is, for each group of 128 inputs, 16 float32 scales and [32, 16 outputs, 4 inputs] of bytes, which are
shifted to be positive where the machine multiplies unsigned by signed bytes. Products within a group add up exactly.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.layout import DOT_GROUP, DOT_GROUP_BYTES, GROUP, GROUP_BYTES, LANES
from batchgen.kernels.processor import cpu_features

_BYTE = ir.IntType(8)
_SCALE_BYTES = 2 * LANES
_PAIR_BYTES = 2 * LANES  # of a pair of inputs
_QUAD_BYTES = 4 * LANES
_ADDING = frozenset({"avx512vnni", "avxvnni", "dotprod"})
_QUADS = ir.VectorType(_BYTE, _QUAD_BYTES)


def _at(builder, base, offset, kind):
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def emit_scales(builder, strip, group):
    """The float32 scales of 16 outputs in a group of a strip of numbers."""
    halves = ir.VectorType(ir.HalfType(), LANES)
    at = _at(builder, strip, builder.mul(group, emit.number(GROUP_BYTES)), halves)
    return builder.fpext(builder.load(at, align=_SCALE_BYTES), emit.VECTOR)


def emit_numbers(builder, strip, group, pair, scales, x):
    """What a pair of inputs of 16 outputs multiplies: a vector of pairs of bfloat16, or two of float32.

    ``x`` is the pointer to what they are multiplied with, in the type to which they are rounded.
    """
    start = builder.add(builder.mul(group, emit.number(GROUP_BYTES)), emit.number(_SCALE_BYTES))
    at = builder.add(start, builder.mul(pair, emit.number(_PAIR_BYTES)))
    if emit.is_bf16(x) and emit.HAS_BF16:
        sides = []
        for side in range(2):
            lanes = ir.Constant(
                emit.INT_VECTOR, [ir.Constant(emit.INT, side * LANES // 2 + i // 2) for i in range(LANES)]
            )
            both = builder.shuffle_vector(scales, ir.Constant(emit.VECTOR, ir.Undefined), lanes)
            half = _at(builder, strip, builder.add(at, emit.number(side * LANES)), ir.VectorType(_BYTE, LANES))
            integers = builder.sext(builder.load(half, align=LANES), emit.INT_VECTOR)
            sides.append(builder.fmul(builder.sitofp(integers, emit.VECTOR), both))
        return [emit.pair_of(builder, *sides)]
    pairs = builder.load(_at(builder, strip, at, ir.VectorType(ir.IntType(16), LANES)), align=_PAIR_BYTES)
    wide = builder.sext(pairs, emit.INT_VECTOR)
    low = builder.ashr(builder.shl(wide, emit.int_splat(24)), emit.int_splat(24))
    integers = [low, builder.ashr(wide, emit.int_splat(8))]
    return [emit.round_like(builder, x, builder.fmul(builder.sitofp(i, emit.VECTOR), scales)) for i in integers]


def emit_unpack(builder, out, strip, groups, x):
    """Write the numbers of ``groups`` groups of a strip to ``out``: [pairs, 16, 2] of bfloat16 or [inputs, 16]."""
    with cgutils.for_range(builder, groups) as outer:
        scales = emit_scales(builder, strip, outer.index)
        with cgutils.for_range(builder, emit.number(GROUP // 2)) as inner:
            vectors = emit_numbers(builder, strip, outer.index, inner.index, scales, x)
            pair = builder.add(builder.mul(outer.index, emit.number(GROUP // 2)), inner.index)
            for i, vector in enumerate(vectors):
                at = builder.gep(out, [builder.add(builder.mul(pair, emit.number(2 * LANES)), emit.number(i * LANES))])
                builder.store(vector, builder.bitcast(at, vector.type.as_pointer()), align=64)


def adds_up():
    """Whether one instruction multiplies bytes and adds the products to a total."""
    return not _ADDING.isdisjoint(cpu_features())


def emit_dots(builder, weights, inputs, total):
    """``total`` plus the sums of the products of 16 outputs' 8 bytes: of ``weights``, two vectors, and ``inputs``.

    ``inputs`` are two times four signed bytes in every lane.
    """
    features = cpu_features()
    if "avx512vnni" in features:
        for w, x in zip(weights, inputs, strict=True):
            name = "llvm.x86.avx512.vpdpbusd.512"
            total = emit.call(builder, name, [total, builder.bitcast(w, emit.INT_VECTOR), x], emit.INT_VECTOR)
        return total
    parts = 4 if "dotprod" in features else 2
    kind = ir.VectorType(emit.INT, LANES // parts)

    def part(vector, i):
        lanes = [ir.Constant(emit.INT, i * LANES // parts + lane) for lane in range(LANES // parts)]
        mask = ir.Constant(ir.VectorType(emit.INT, LANES // parts), lanes)
        return builder.shuffle_vector(
            builder.bitcast(vector, emit.INT_VECTOR), ir.Constant(emit.INT_VECTOR, ir.Undefined), mask
        )

    found = [
        _emit_part(builder, features, kind, [part(w, i) for w in weights], [part(x, i) for x in inputs], part(total, i))
        for i in range(parts)
    ]
    while len(found) > 1:
        found = [_joined(builder, a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _joined(builder, a, b):
    lanes = 2 * a.type.count
    mask = ir.Constant(ir.VectorType(emit.INT, lanes), [ir.Constant(emit.INT, lane) for lane in range(lanes)])
    return builder.shuffle_vector(a, b, mask)


def _emit_part(builder, features, kind, weights, inputs, total):
    """``emit_dots`` for the outputs that fill one register of ``kind``."""
    as_bytes = ir.VectorType(_BYTE, 4 * kind.count)
    if "avxvnni" in features:
        for w, x in zip(weights, inputs, strict=True):
            total = emit.call(builder, "llvm.x86.avx512.vpdpbusd.256", [total, w, x], kind)
        return total
    pairs = [(builder.bitcast(w, as_bytes), builder.bitcast(x, as_bytes)) for w, x in zip(weights, inputs, strict=True)]
    if "dotprod" in features:
        for w, x in pairs:
            total = emit.call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", [total, w, x], kind)
        return total
    # 7-bit weights below 128 and 7-bit inputs: four products of up to 127 * 63 stay below the 2**15 of a 16-bit sum.
    halves = ir.VectorType(ir.IntType(16), 2 * kind.count)
    first, second = (emit.call(builder, "llvm.x86.avx2.pmadd.ub.sw", [w, x], halves) for w, x in pairs)
    ones = ir.Constant(halves, [ir.Constant(ir.IntType(16), 1)] * halves.count)
    return builder.add(total, emit.call(builder, "llvm.x86.avx2.pmadd.wd", [builder.add(first, second), ones], kind))


def emit_integer_sums(builder, totals, x, first_row, strip, groups, num_steps, prefetch):
    """Add the products of rows with strips to ``totals`` {(row, strip): vector}, group by group in float32.

    There are ``num_steps`` of 8 inputs: what fills the last group is left out.

    ``x`` is (bytes [rows, groups * 128], their float32 scales [rows, groups], what the shift of the weights adds to
    each sum, negated, int32 [rows, groups]). ``prefetch`` takes the number of a step of 8 inputs.
    """
    values, scales, shifts = x
    rows = 1 + max(r for r, _ in totals)
    place = [builder.mul(builder.add(first_row, emit.number(r)), groups) for r in range(rows)]
    steps = DOT_GROUP // 8
    with cgutils.for_range(builder, groups) as outer:
        at = [builder.add(start, outer.index) for start in place]
        sums: dict[tuple[int, int], ir.Value] = {}
        for r in range(rows):
            shift = emit.splat(builder, builder.load(builder.gep(shifts, [at[r]])))
            sums |= {(r, v): cgutils.alloca_once(builder, emit.INT_VECTOR) for v in range(len(strip))}
            for v in range(len(strip)):
                builder.store(shift, sums[r, v])
        base = builder.mul(outer.index, emit.number(DOT_GROUP_BYTES))
        left = builder.sub(num_steps, builder.mul(outer.index, emit.number(steps)))
        is_whole = builder.icmp_signed(">=", left, emit.number(steps))
        with cgutils.for_range(builder, builder.select(is_whole, emit.number(steps), left)) as inner:
            prefetch(builder.add(builder.mul(outer.index, emit.number(steps)), inner.index))
            quads = builder.add(base, builder.mul(inner.index, emit.number(2 * _QUAD_BYTES)))
            weights = [
                [
                    builder.load(_at(builder, s, builder.add(quads, emit.number(4 * LANES + i)), _QUADS), align=64)
                    for i in (0, _QUAD_BYTES)
                ]
                for s in strip
            ]
            for r in range(rows):
                first = builder.add(
                    builder.mul(at[r], emit.number(DOT_GROUP)), builder.mul(inner.index, emit.number(8))
                )
                spread = [
                    emit.splat(
                        builder,
                        builder.load(_at(builder, values, builder.add(first, emit.number(i)), emit.INT), align=4),
                    )
                    for i in (0, 4)
                ]
                for v, w in enumerate(weights):
                    builder.store(emit_dots(builder, w, spread, builder.load(sums[r, v])), sums[r, v])
        of_weights = [
            emit.load(builder, builder.bitcast(builder.gep(s, [base]), emit.FLOAT.as_pointer()), emit.number(0))
            for s in strip
        ]
        for r in range(rows):
            of_row = emit.splat(builder, builder.load(builder.gep(scales, [at[r]])))
            for v, scale in enumerate(of_weights):
                by = builder.fmul(of_row, scale)
                term = builder.fmul(by, builder.sitofp(builder.load(sums[r, v]), emit.VECTOR))
                builder.store(builder.fadd(builder.load(totals[r, v]), term), totals[r, v])

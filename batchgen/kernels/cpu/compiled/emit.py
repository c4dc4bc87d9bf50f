"""Operations on vectors of 16 float32, as functions that emit LLVM IR; ``simd`` makes them callable from numba.

A pointer's element type decides how elements become float32: 16-bit integers are bfloat16 bits, 8-bit ones numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from batchgen.kernels.cpu.layout import LANES
from batchgen.kernels.processor import has_bfloat16_pairs

LOG2_E = 1.4426950408889634
CACHE_LINE = 64  # bytes: how far one prefetch reaches
# Whether the processor has instructions that round to bfloat16 and multiply pairs of bfloat16.
HAS_BF16 = has_bfloat16_pairs()

FLOAT = ir.FloatType()
INT = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
INT_VECTOR = ir.VectorType(INT, LANES)
HALF_VECTOR = ir.VectorType(ir.IntType(16), LANES)
BYTE_VECTOR = ir.VectorType(ir.IntType(8), LANES)
_MAX = 127.0  # the largest 8-bit integer used; the smallest is -127, since -128 is not used


class _BFloat(ir.Type):  # llvmlite lacks this type
    """LLVM's ``bfloat``."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def number(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(ir.IntType(64), value)


def int_splat(value: int) -> ir.Constant:
    """The same integer in every lane."""
    return ir.Constant(INT_VECTOR, [ir.Constant(INT, value)] * LANES)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """``scalar``, a float32 or an int32, in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, int_splat(0))


def call(builder: ir.IRBuilder, name: str, arguments: Sequence[ir.Value], result: ir.Type = VECTOR) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def lane_mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Mask of the lanes below ``count``."""
    lanes = ir.Constant(INT_VECTOR, [ir.Constant(INT, i) for i in range(LANES)])
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, INT)))


def is_bf16(pointer: ir.Value) -> bool:
    """Whether a pointer leads to bfloat16 bits."""
    return bool(pointer.type.pointee == ir.IntType(16))


def is_int8(pointer: ir.Value) -> bool:
    """Whether a pointer leads to 8-bit integers."""
    return bool(pointer.type.pointee == ir.IntType(8))


def _memory_form(pointer: ir.Value) -> tuple[ir.VectorType, str, int]:
    """The vector type of 16 elements at a pointer, its name in intrinsics, and an element's alignment in bytes."""
    if is_int8(pointer):
        return BYTE_VECTOR, "v16i8", 1
    return (HALF_VECTOR, "v16i16", 2) if is_bf16(pointer) else (VECTOR, "v16f32", 4)


def widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Float32 numbers whose upper halves are these bfloat16 bits."""
    return builder.bitcast(builder.shl(builder.zext(halves, INT_VECTOR), int_splat(16)), VECTOR)


def narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to bfloat16 (to nearest, ties to even); returns the bits."""
    if HAS_BF16:
        kind = ir.VectorType(_BFloat(), LANES)
        return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", [value], kind), HALF_VECTOR)
    bits = builder.bitcast(value, INT_VECTOR)
    odd = builder.and_(builder.lshr(bits, int_splat(16)), int_splat(1))
    rounded = builder.add(bits, builder.add(odd, int_splat(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, int_splat(16)), HALF_VECTOR)


def round_to_byte(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The nearest integers from -127 to 127, ties to even; 127 for NaN."""
    most, least = (splat(builder, ir.Constant(FLOAT, bound)) for bound in (_MAX, -_MAX))
    value = call(builder, "llvm.minnum.v16f32", [value, most])
    value = call(builder, "llvm.rint.v16f32", [call(builder, "llvm.maxnum.v16f32", [value, least])])
    return builder.trunc(builder.fptosi(value, INT_VECTOR), BYTE_VECTOR)


def _from_memory(builder: ir.IRBuilder, base: ir.Value, loaded: ir.Value) -> ir.Value:
    """Convert 16 elements that were loaded from ``base`` to float32."""
    if is_int8(base):
        return builder.sitofp(builder.sext(loaded, INT_VECTOR), VECTOR)
    return widen(builder, loaded) if is_bf16(base) else loaded


def _to_memory(builder: ir.IRBuilder, base: ir.Value, value: ir.Value) -> ir.Value:
    """Round 16 float32 to the element type of ``base``."""
    if is_int8(base):
        return round_to_byte(builder, value)
    return narrow(builder, value) if is_bf16(base) else value


def _vector_at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> tuple[ir.Value, int]:
    """Pointer to the 16 elements that start at ``base[index]``, and their alignment in bytes."""
    shape, _, align = _memory_form(base)
    return builder.bitcast(builder.gep(base, [index]), shape.as_pointer()), align


def load(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """The 16 elements that start at ``base[index]``, as float32."""
    at, align = _vector_at(builder, base, index)
    return _from_memory(builder, base, builder.load(at, align=align))


def store(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Round 16 values to the element type and write them, starting at ``base[index]``."""
    at, align = _vector_at(builder, base, index)
    builder.store(_to_memory(builder, base, value), at, align=align)


def _emit_copy_in(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, count: ir.Value) -> ir.Value:
    """The ``count`` (up to 16) elements that start at ``base[index]``, unconverted; zero in the other lanes."""
    at, align = _vector_at(builder, base, index)
    shape, name, _ = _memory_form(base)
    parts = [at, ir.Constant(INT, align), lane_mask(builder, count), ir.Constant(shape, None)]
    return call(builder, f"llvm.masked.load.{name}.p0", parts, shape)


def _emit_copy_out(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, elements: ir.Value, count: ir.Value) -> None:
    """Write the first ``count`` (up to 16) of ``elements``, unconverted, starting at ``base[index]``."""
    at, align = _vector_at(builder, base, index)
    parts = [elements, at, ir.Constant(INT, align), lane_mask(builder, count)]
    call(builder, f"llvm.masked.store.{_memory_form(base)[1]}.p0", parts, ir.VoidType())


def load_part(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, count: ir.Value) -> ir.Value:
    """The ``count`` (up to 16) elements that start at ``base[index]``, as float32; zero in the other lanes."""
    return _from_memory(builder, base, _emit_copy_in(builder, base, index, count))


def store_part(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Like ``store``, but only for the first ``count`` lanes."""
    _emit_copy_out(builder, base, index, _to_memory(builder, base, value), count)


def forbid(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, allowed: ir.Value, count: ir.Value) -> None:
    """Set -inf in the elements, starting at ``base[index]``, whose bit in ``allowed`` is 0; NaN stays.

    Of 16 elements only the first ``count`` are changed. Allowed ones keep their bits, which a conversion to float32 and
    back may change for the smallest numbers.
    """
    shape, _, _ = _memory_form(base)
    lowest = ir.Constant(shape, [ir.Constant(shape.element, 0xFF80 if is_bf16(base) else -float("inf"))] * LANES)
    bits = builder.bitcast(builder.trunc(allowed, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))

    def forbidden(elements: ir.Value) -> ir.Value:
        value = _from_memory(builder, base, elements)
        return builder.select(builder.or_(bits, builder.fcmp_unordered("uno", value, value)), elements, lowest)

    with builder.if_else(builder.icmp_signed(">=", count, number(LANES))) as (whole, part):
        with whole:
            at, align = _vector_at(builder, base, index)
            builder.store(forbidden(builder.load(at, align=align)), at, align=align)
        with part:
            _emit_copy_out(builder, base, index, forbidden(_emit_copy_in(builder, base, index, count)), count)


def round_like(builder: ir.IRBuilder, base: ir.Value, value: ir.Value) -> ir.Value:
    """Round every lane to the element type of ``base``, then convert it back to float32."""
    return _from_memory(builder, base, _to_memory(builder, base, value))


def any_equal(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """True if any lane of ``a`` equals its counterpart in ``b``."""
    same = builder.fcmp_ordered("==", a, b)
    return call(builder, "llvm.vector.reduce.or.v16i1", [same], ir.IntType(1))


def all_equal(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """True if every lane of ``a`` equals its counterpart in ``b``; NaN equals nothing."""
    same = builder.fcmp_ordered("==", a, b)
    return call(builder, "llvm.vector.reduce.and.v16i1", [same], ir.IntType(1))


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """``a * b + c``, rounded once."""
    return call(builder, "llvm.fma.v16f32", [a, b, c])


# Taylor coefficients of 2**f, highest power first: accurate to float32 for |f| <= 1/2; five suffice for bfloat16.
_POWERS_OF_2 = (
    1.5252733804059840e-5,
    1.5403530393381609e-4,
    1.3333558146428443e-3,
    9.6181291076284772e-3,
    5.5504108664821580e-2,
    2.4022650695910072e-1,
    6.9314718055994531e-1,
    1.0,
)


def exp2(builder: ir.IRBuilder, base: ir.Value, x: ir.Value) -> ir.Value:
    """2**x, to about one unit in the last place of float32, or of bfloat16 if ``base`` points to bfloat16.

    The result is 0 below -126 (denormal numbers would make products thirty times slower) and 2**127 above 127; NaN
    stays NaN. With x = n + f and |f| <= 1/2, it is 2**n times a polynomial in f.
    """
    low, high = (splat(builder, ir.Constant(FLOAT, bound)) for bound in (-126.0, 127.0))
    is_low = builder.fcmp_ordered("<", x, low)  # min and max below are comparisons, so that NaN stays NaN
    x = builder.select(is_low, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = call(builder, "llvm.rint.v16f32", [x])
    fraction = builder.fsub(x, n)
    powers = [ir.Constant(FLOAT, float(np.float32(c))) for c in _POWERS_OF_2[3 if is_bf16(base) else 0 :]]
    total = splat(builder, powers[0])
    for power in powers[1:]:
        total = fma(builder, total, fraction, splat(builder, power))
    biased = builder.add(builder.fptosi(n, INT_VECTOR), int_splat(127))  # n as the exponent of a float32
    power = builder.fmul(total, builder.bitcast(builder.shl(biased, int_splat(23)), VECTOR))
    return builder.select(is_low, ir.Constant(VECTOR, None), power)


def exp(builder: ir.IRBuilder, base: ir.Value, x: ir.Value) -> ir.Value:
    """e**x by ``exp2``; in float32 the error reaches a hundred units in the last place at |x| = 80."""
    log2_e = ir.Constant(FLOAT, float(np.float32(LOG2_E)))
    return exp2(builder, base, builder.fmul(x, splat(builder, log2_e)))


def silu_mul(builder: ir.IRBuilder, out: ir.Value, gate: ir.Value, up: ir.Value) -> ir.Value:
    """``gate * sigmoid(gate) * up``, to the precision of the element type of ``out``."""
    return sigmoid_mul(builder, out, gate, gate, up)


def sigmoid_mul(builder: ir.IRBuilder, out: ir.Value, gate: ir.Value, x: ir.Value, up: ir.Value) -> ir.Value:
    """``gate * sigmoid(x) * up``."""
    zero, one = (splat(builder, ir.Constant(FLOAT, scalar)) for scalar in (0.0, 1.0))
    sigmoid = builder.fdiv(one, builder.fadd(one, exp(builder, out, builder.fsub(zero, x))))
    return builder.fmul(builder.fmul(gate, sigmoid), up)


_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)


def load_pairs(
    builder: ir.IRBuilder, base: ir.Value, first: ir.Value, second: ir.Value, vectors: int
) -> list[ir.Value]:
    """16 pairs per vector of bfloat16 from two rows, which start at ``base[first]`` and ``base[second]``."""
    wide = 2 if vectors % 2 == 0 else 1
    shape = ir.VectorType(ir.IntType(16), wide * LANES)
    pairs = []
    for v in range(0, vectors, wide):
        step = ir.Constant(first.type, v * LANES)
        rows = []
        for index in (first, second):
            at = builder.gep(base, [builder.add(index, step)])
            rows.append(builder.load(builder.bitcast(at, shape.as_pointer()), align=2))
        for part in range(wide):
            lanes = [part * LANES + i // 2 + (i % 2) * wide * LANES for i in range(2 * LANES)]
            mask = ir.Constant(ir.VectorType(INT, 2 * LANES), [ir.Constant(INT, lane) for lane in lanes])
            pairs.append(builder.shuffle_vector(*rows, mask))
    return pairs


def splat_pair(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """The bfloat16 elements ``base[index]`` and ``base[index + 1]`` as every pair of a vector."""
    at = builder.bitcast(builder.gep(base, [index]), INT.as_pointer())
    return builder.bitcast(splat(builder, builder.load(at, align=2)), _PAIRS)


def scalar_as_float(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """``base[index]`` as float32."""
    scalar = builder.load(builder.gep(base, [index]))
    if not is_bf16(base):
        return scalar
    return builder.bitcast(builder.shl(builder.zext(scalar, INT), ir.Constant(INT, 16)), FLOAT)


def dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """``total`` plus, in every lane, the dot product of a pair of ``a`` and a pair of ``b``; needs ``HAS_BF16``."""
    kind = ir.VectorType(_BFloat(), 2 * LANES)
    pairs = [builder.bitcast(v, kind) for v in (a, b)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", [total, *pairs])


def load_whole_pairs(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, align: int) -> ir.Value:
    """The 16 pairs of bfloat16 that start at ``base[index]``, whose address is a multiple of ``align`` bytes."""
    return builder.load(builder.bitcast(builder.gep(base, [index]), _PAIRS.as_pointer()), align=align)


def widen_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and the second elements of 16 pairs of bfloat16, as two vectors of float32."""
    both = builder.bitcast(pairs, INT_VECTOR)
    first, second = builder.shl(both, int_splat(16)), builder.and_(both, int_splat(-(1 << 16)))
    return builder.bitcast(first, VECTOR), builder.bitcast(second, VECTOR)


def pair_of(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """Round two vectors of float32 to bfloat16; returns 16 pairs of neighbours. Needs ``HAS_BF16``."""
    kind = ir.VectorType(_BFloat(), 2 * LANES)
    return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", [second, first], kind), _PAIRS)


def prefetch(builder: ir.IRBuilder, address: ir.Value, closeness: int = 3) -> None:
    """Prefetch the cache line at an integer address; ``closeness`` 3 is the first-level cache, 2 the second."""
    flags = [ir.Constant(INT, flag) for flag in (0, closeness, 1)]  # read, how close, data
    where = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", [where, *flags], ir.VoidType())


def switch(builder: ir.IRBuilder, choice: ir.Value, cases: Sequence[int], write: Callable[[int], None]) -> None:
    """Branch on ``choice``: ``write(case)`` for each of ``cases``; the last case is the default."""
    if len(cases) == 1:
        write(cases[0])
        return
    with builder.if_else(builder.icmp_signed("==", choice, number(cases[0]))) as (same, other):
        with same:
            write(cases[0])
        with other:
            switch(builder, choice, cases[1:], write)

"""Vectors of 16 float32 in LLVM IR: their types, and what emits an operation on them.

LLVM lowers 16 lanes to whatever the machine has (one AVX-512 register, two AVX2, four NEON). ``simd`` makes these
operations callable from numba functions; a kernel that wants a tile of accumulators kept in registers emits its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.processor import has_bfloat16_pairs

LANES = 16
CACHE_LINE = 64  # bytes: how far one prefetch reaches
# Whether the machine rounds to bfloat16 and multiplies pairs of them by itself.
HAS_BF16 = has_bfloat16_pairs()

FLOAT = ir.FloatType()
INT = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
INT_VECTOR = ir.VectorType(INT, LANES)
HALF_VECTOR = ir.VectorType(ir.IntType(16), LANES)


class _BFloat(ir.Type):  # llvmlite does not have this one
    """LLVM's ``bfloat``."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def int_splat(value: int, vector: ir.VectorType = INT_VECTOR) -> ir.Constant:
    """The same integer in every lane."""
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * LANES)


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """IR of ``splat``."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, int_splat(0))


def emit_call(builder: ir.IRBuilder, name: str, arguments: Sequence[ir.Value], result: ir.Type = VECTOR) -> ir.Value:
    """A call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_lane_mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Mask of the lanes below ``count``."""
    lanes = ir.Constant(INT_VECTOR, [ir.Constant(INT, i) for i in range(LANES)])
    undefined = ir.Constant(INT_VECTOR, ir.Undefined)
    narrow = builder.trunc(count, INT)
    first = builder.insert_element(undefined, narrow, ir.Constant(INT, 0))
    return builder.icmp_signed("<", lanes, builder.shuffle_vector(first, undefined, int_splat(0)))


def is_bf16(pointer: Any) -> bool:
    """Whether a numba pointer type leads to bfloat16 bits."""
    return bool(pointer.dtype == types.uint16)


def emit_widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Bfloat16 bits are the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, INT_VECTOR), int_splat(16)), VECTOR)


def emit_narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to bfloat16, to nearest even; the result's bits."""
    if HAS_BF16:
        kind = ir.VectorType(_BFloat(), LANES)
        return builder.bitcast(emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", [value], kind), HALF_VECTOR)
    bits = builder.bitcast(value, INT_VECTOR)
    odd = builder.and_(builder.lshr(bits, int_splat(16)), int_splat(1))
    rounded = builder.add(bits, builder.add(odd, int_splat(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, int_splat(16)), HALF_VECTOR)


def emit_load(builder: ir.IRBuilder, kind: Any, base: ir.Value, index: ir.Value) -> ir.Value:
    """IR of ``load``; ``kind`` is the numba type of ``base``."""
    at = builder.gep(base, [index])
    if not is_bf16(kind):
        return builder.load(builder.bitcast(at, VECTOR.as_pointer()), align=4)
    return emit_widen(builder, builder.load(builder.bitcast(at, HALF_VECTOR.as_pointer()), align=2))


def emit_store(builder: ir.IRBuilder, kind: Any, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """IR of ``store``; ``kind`` is the numba type of ``base``."""
    at = builder.gep(base, [index])
    if is_bf16(kind):
        builder.store(emit_narrow(builder, value), builder.bitcast(at, HALF_VECTOR.as_pointer()), align=2)
    else:
        builder.store(value, builder.bitcast(at, VECTOR.as_pointer()), align=4)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """IR of ``fma``."""
    return emit_call(builder, "llvm.fma.v16f32", [a, b, c])


_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)


def emit_load_pairs(
    builder: ir.IRBuilder, base: ir.Value, first: ir.Value, second: ir.Value, vectors: int
) -> list[ir.Value]:
    """Bfloat16 elements from ``base[first]`` and ``base[second]`` on, side by side: 16 pairs in each vector."""
    wide = 2 if vectors % 2 == 0 else 1
    shape = ir.VectorType(ir.IntType(16), wide * LANES)
    found = []
    for v in range(0, vectors, wide):
        step = ir.Constant(first.type, v * LANES)
        rows = []
        for index in (first, second):
            at = builder.gep(base, [builder.add(index, step)])
            rows.append(builder.load(builder.bitcast(at, shape.as_pointer()), align=2))
        for part in range(wide):
            lanes = [part * LANES + i // 2 + (i % 2) * wide * LANES for i in range(2 * LANES)]
            mask = ir.Constant(ir.VectorType(INT, 2 * LANES), [ir.Constant(INT, lane) for lane in lanes])
            found.append(builder.shuffle_vector(*rows, mask))
    return found


def emit_splat_pair(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """The bfloat16 elements ``base[index]`` and ``base[index + 1]`` as every pair of a vector."""
    at = builder.bitcast(builder.gep(base, [index]), INT.as_pointer())
    undefined = ir.Constant(INT_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, builder.load(at, align=2), ir.Constant(INT, 0))
    return builder.bitcast(builder.shuffle_vector(first, undefined, int_splat(0)), _PAIRS)


def emit_dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """``total`` plus, in every lane, the sum of the products of its two pairs; needs ``HAS_BF16``."""
    kind = ir.VectorType(_BFloat(), 2 * LANES)
    pairs = [builder.bitcast(v, kind) for v in (a, b)]
    return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", [total, *pairs])


def emit_load_whole_pairs(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, align: int) -> ir.Value:
    """16 neighbouring pairs of bfloat16 from ``base[index]`` on, which lies at a multiple of ``align`` bytes."""
    return builder.load(builder.bitcast(builder.gep(base, [index]), _PAIRS.as_pointer()), align=align)


def emit_widen_pairs(builder: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and the second of 16 pairs of bfloat16, as float32."""
    both = builder.bitcast(pairs, INT_VECTOR)
    first, second = builder.shl(both, int_splat(16)), builder.and_(both, int_splat(-(1 << 16)))
    return builder.bitcast(first, VECTOR), builder.bitcast(second, VECTOR)


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value, closeness: int = 3) -> None:
    """IR that asks for the cache line at an integer address, to be read soon; 3 is the first cache, 2 the second."""
    flags = [ir.Constant(INT, flag) for flag in (0, closeness, 1)]  # read, how close, data
    where = builder.inttoptr(address, ir.IntType(8).as_pointer())
    emit_call(builder, "llvm.prefetch.p0", [where, *flags], ir.VoidType())

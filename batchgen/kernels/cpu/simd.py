"""Vectors of 16 float32 as first-class values inside numba functions.

Numba has no vector type, and its auto-vectorizer neither keeps a tile of accumulators in registers nor
reorders a float sum, so the kernels spell their vectors out. LLVM lowers 16 lanes to whatever the machine
has (one AVX-512 register, two AVX2, four NEON). Loads and stores convert from and to the model's dtype: the
element type of a typed pointer decides (``uint16`` holds bfloat16 bits, ``float32`` itself).

Nothing here knows tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import register_model

LANES = 16
LOG2_E = 1.4426950408889634
LOG2_E_F32 = float(np.float32(LOG2_E))
# A kernel cannot raise: an exception inside the worker threads would leave its items undone, unseen.
jit: Any = njit(error_model="numpy")
inline: Any = njit(error_model="numpy", forceinline=True)  # a call would pass vectors through memory
intrinsic: Any = numba_intrinsic  # numba's own annotation describes the function before it is decorated
BF16 = np.uint16  # element type of a pointer to bfloat16 bits
F32 = np.float32

# Whether the machine rounds to bfloat16 and multiplies pairs of them by itself.
HAS_BF16 = bool(binding.get_host_cpu_features().get("avx512bf16"))

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
VECTOR = ir.VectorType(_F32, LANES)
_IVEC = ir.VectorType(_I32, LANES)
_HVEC = ir.VectorType(ir.IntType(16), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class _BFloat(ir.Type):  # llvmlite does not have this one
    """LLVM's ``bfloat``."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Vec(types.Type):
    """Numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vec16f32")


vec = Vec()


@register_model(Vec)
class _VecModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


def _int_splat(value: int, vector: ir.VectorType = _IVEC) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * LANES)


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """IR of ``splat``."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _int_splat(0))


def _llvm(builder: ir.IRBuilder, name: str, arguments: Sequence[ir.Value], result: ir.Type = VECTOR) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _lane_mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Mask of the lanes below ``count``."""
    lanes = ir.Constant(_IVEC, [ir.Constant(_I32, i) for i in range(LANES)])
    undefined = ir.Constant(_IVEC, ir.Undefined)
    narrow = builder.trunc(count, _I32)
    first = builder.insert_element(undefined, narrow, ir.Constant(_I32, 0))
    return builder.icmp_signed("<", lanes, builder.shuffle_vector(first, undefined, _int_splat(0)))


def is_bf16(pointer: Any) -> bool:
    """Whether a numba pointer type leads to bfloat16 bits."""
    return bool(pointer.dtype == types.uint16)


def _widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Bfloat16 bits are the upper half of a float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, _IVEC), _int_splat(16)), VECTOR)


def _narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to bfloat16, to nearest even; the result's bits."""
    if HAS_BF16:
        kind = ir.VectorType(_BFloat(), LANES)
        return builder.bitcast(_llvm(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", [value], kind), _HVEC)
    bits = builder.bitcast(value, _IVEC)
    odd = builder.and_(builder.lshr(bits, _int_splat(16)), _int_splat(1))
    rounded = builder.add(bits, builder.add(odd, _int_splat(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _int_splat(16)), _HVEC)


def emit_load(builder: ir.IRBuilder, kind: Any, base: ir.Value, index: ir.Value) -> ir.Value:
    """IR of ``load``; ``kind`` is the numba type of ``base``."""
    at = builder.gep(base, [index])
    if not is_bf16(kind):
        return builder.load(builder.bitcast(at, VECTOR.as_pointer()), align=4)
    return _widen(builder, builder.load(builder.bitcast(at, _HVEC.as_pointer()), align=2))


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """IR of ``fma``."""
    return _llvm(builder, "llvm.fma.v16f32", [a, b, c])


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
            mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), [ir.Constant(_I32, lane) for lane in lanes])
            found.append(builder.shuffle_vector(*rows, mask))
    return found


def emit_splat_pair(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """The bfloat16 elements ``base[index]`` and ``base[index + 1]`` as every pair of a vector."""
    at = builder.bitcast(builder.gep(base, [index]), _I32.as_pointer())
    undefined = ir.Constant(_IVEC, ir.Undefined)
    first = builder.insert_element(undefined, builder.load(at, align=2), ir.Constant(_I32, 0))
    return builder.bitcast(builder.shuffle_vector(first, undefined, _int_splat(0)), _PAIRS)


def emit_dot(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """``total`` plus, in every lane, the sum of the products of its two pairs; needs ``HAS_BF16``."""
    kind = ir.VectorType(_BFloat(), 2 * LANES)
    pairs = [builder.bitcast(v, kind) for v in (a, b)]
    return _llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", [total, *pairs])


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """IR that asks for the cache line at an integer address, to be read soon."""
    flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]  # read, keep close, data
    where = builder.inttoptr(address, ir.IntType(8).as_pointer())
    _llvm(builder, "llvm.prefetch.p0", [where, *flags], ir.VoidType())


@intrinsic
def pointer(_context: Any, address: Any, dtype: Any) -> Any:
    """Typed pointer to the element at an integer address."""
    kind = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, dtype), generate


@intrinsic
def shifted(_context: Any, base: Any, index: Any) -> Any:
    """Pointer to ``base[index]``."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.gep(arguments[0], [arguments[1]])

    return base(base, types.int64), generate


@intrinsic
def fetch_add(_context: Any, base: Any, index: Any, amount: Any) -> Any:
    """Atomically add ``amount`` to the int64 ``base[index]``; the value before."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", builder.gep(arguments[0], [arguments[1]]), arguments[2], "monotonic")

    return types.int64(base, types.int64, types.int64), generate


@intrinsic
def load(_context: Any, base: Any, index: Any) -> Any:
    """16 consecutive elements from ``base[index]`` on, as float32."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return emit_load(builder, base, *arguments)

    return vec(base, types.int64), generate


@intrinsic
def load_part(_context: Any, base: Any, index: Any, count: Any) -> Any:
    """The first ``count`` (up to 16) elements from ``base[index]`` on; zero in the other lanes."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        at = builder.gep(arguments[0], [arguments[1]])
        mask = _lane_mask(builder, arguments[2])
        shape, name, align = (_HVEC, "v16i16", 2) if is_bf16(base) else (VECTOR, "v16f32", 4)
        where = builder.bitcast(at, shape.as_pointer())
        zero = ir.Constant(shape, None)
        parts = [where, ir.Constant(_I32, align), mask, zero]
        loaded = _llvm(builder, f"llvm.masked.load.{name}.p0", parts, shape)
        return _widen(builder, loaded) if is_bf16(base) else loaded

    return vec(base, types.int64, types.int64), generate


@intrinsic
def store(_context: Any, base: Any, index: Any, value: Any) -> Any:
    """Round 16 values to the element type and write them from ``base[index]`` on."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        at = builder.gep(arguments[0], [arguments[1]])
        if is_bf16(base):
            builder.store(_narrow(builder, arguments[2]), builder.bitcast(at, _HVEC.as_pointer()), align=2)
        else:
            builder.store(arguments[2], builder.bitcast(at, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(base, types.int64, vec), generate


@intrinsic
def store_part(_context: Any, base: Any, index: Any, value: Any, count: Any) -> Any:
    """As ``store``, the first ``count`` lanes only."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        at = builder.gep(arguments[0], [arguments[1]])
        mask = _lane_mask(builder, arguments[3])
        bf16 = is_bf16(base)
        data = _narrow(builder, arguments[2]) if bf16 else arguments[2]
        shape, name, align = (_HVEC, "v16i16", 2) if bf16 else (VECTOR, "v16f32", 4)
        where = builder.bitcast(at, shape.as_pointer())
        _llvm(builder, f"llvm.masked.store.{name}.p0", [data, where, ir.Constant(_I32, align), mask], ir.VoidType())
        return context.get_dummy_value()

    return types.void(base, types.int64, vec, types.int64), generate


@intrinsic
def round_like(_context: Any, base: Any, value: Any) -> Any:
    """Round every lane to the element type of ``base`` and back."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        if not is_bf16(base):
            return arguments[1]
        return _widen(builder, _narrow(builder, arguments[1]))

    return vec(base, vec), generate


@intrinsic
def splat(_context: Any, scalar: Any) -> Any:
    """The same float32 in every lane."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return emit_splat(builder, arguments[0])

    return vec(types.float32), generate


def _elementwise(name: str, arity: int, emit: Callable[[ir.IRBuilder, Any], ir.Value], doc: str) -> Any:
    """Intrinsic of ``arity`` vectors to one."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return emit(builder, arguments)

    signature = vec(*[vec] * arity)

    def one(_context: Any, a: Any) -> Any:
        return signature, generate

    def two(_context: Any, a: Any, b: Any) -> Any:
        return signature, generate

    def three(_context: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, generate

    typed: Any = (one, two, three)[arity - 1]
    typed.__name__ = name
    typed.__doc__ = doc
    return intrinsic(typed)


add = _elementwise("add", 2, lambda b, v: b.fadd(*v), "a + b")
sub = _elementwise("sub", 2, lambda b, v: b.fsub(*v), "a - b")
mul = _elementwise("mul", 2, lambda b, v: b.fmul(*v), "a * b")
div = _elementwise("div", 2, lambda b, v: b.fdiv(*v), "a / b")
fma = _elementwise("fma", 3, lambda b, v: emit_fma(b, *v), "a * b + c, rounded once")
maximum = _elementwise("maximum", 2, lambda b, v: _llvm(b, "llvm.maxnum.v16f32", v), "the larger, lane by lane")
nearest = _elementwise("nearest", 1, lambda b, v: _llvm(b, "llvm.rint.v16f32", v), "round to an integer")


@intrinsic
def lane(_context: Any, value: Any, index: Any) -> Any:
    """One lane as a scalar."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.extract_element(arguments[0], builder.trunc(arguments[1], _I32))

    return types.float32(vec, types.int64), generate


@intrinsic
def any_equal(_context: Any, a: Any, b: Any) -> Any:
    """Whether any lane of ``a`` equals its counterpart in ``b``."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        same = builder.fcmp_ordered("==", *arguments)
        return _llvm(builder, "llvm.vector.reduce.or.v16i1", [same], ir.IntType(1))

    return types.boolean(vec, vec), generate


@intrinsic
def float_of_bits(_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an int64 (how a kernel gets a float argument)."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(builder.trunc(arguments[0], _I32), _F32)

    return types.float32(types.int64), generate


@intrinsic
def bits_of_float(_context: Any, value: Any) -> Any:
    """The bits of a float32 as a non-negative int64."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.zext(builder.bitcast(arguments[0], _I32), ir.IntType(64))

    return types.int64(types.float32), generate


@intrinsic
def keep_lanes(_context: Any, value: Any, other: Any, count: Any) -> Any:
    """``value`` in the lanes below ``count``, ``other`` above."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.select(_lane_mask(builder, arguments[2]), arguments[0], arguments[1])

    return vec(vec, vec, types.int64), generate


@intrinsic
def _scale_by_power_of_two(_context: Any, value: Any, exponent: Any) -> Any:
    """``value * 2**exponent`` for integral exponents in [-126, 127]."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        biased = builder.add(builder.fptosi(arguments[1], _IVEC), _int_splat(127))
        return builder.fmul(arguments[0], builder.bitcast(builder.shl(biased, _int_splat(23)), VECTOR))

    return vec(vec, vec), generate


@intrinsic
def _clamp(_context: Any, value: Any, low: Any, high: Any) -> Any:
    """``value`` bounded to [low, high]; NaN stays NaN (one instruction each, as x86's max and min pass it on)."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        x, low, high = arguments[0], emit_splat(builder, arguments[1]), emit_splat(builder, arguments[2])
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        return builder.select(builder.fcmp_ordered(">", x, high), high, x)

    return vec(vec, types.float32, types.float32), generate


# Taylor coefficients of 2**f, the highest first: good to float32 for |f| <= 1/2, and the last five to bfloat16.
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


@intrinsic
def _power_of_fraction(_context: Any, base: Any, fraction: Any) -> Any:
    """2**f for |f| <= 1/2, as good as the element type of ``base`` can tell."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        powers = [ir.Constant(_F32, float(np.float32(c))) for c in _POWERS_OF_2[3 if is_bf16(base) else 0 :]]
        total = emit_splat(builder, powers[0])
        for power in powers[1:]:
            total = emit_fma(builder, total, arguments[1], emit_splat(builder, power))
        return total

    return vec(base, vec), generate


@inline
def exp2(base, x):
    """2**x, to about one unit in the last place of float32, or of bfloat16 where ``base`` points to such.

    2**-126 below -126, 2**127 above 127; NaN stays NaN. x = n + f with |f| <= 1/2, then a polynomial in f.
    """
    x = _clamp(x, F32(-126.0), F32(127.0))
    n = nearest(x)
    return _scale_by_power_of_two(_power_of_fraction(base, sub(x, n)), n)


@inline
def exp(base, x):
    """e**x, as ``exp2``; in float32 off by up to a hundred units in the last place at |x| = 80."""
    return exp2(base, mul(x, splat(F32(LOG2_E))))


@inline
def sum_lanes(v):
    """Sum over lanes in a fixed order."""
    total = lane(v, 0)
    for i in range(1, LANES):
        total += lane(v, i)
    return total


@inline
def max_lanes(v):
    """Largest lane; NaN lanes are passed over."""
    largest = lane(v, 0)
    for i in range(1, LANES):
        largest = max(largest, lane(v, i))
    return largest

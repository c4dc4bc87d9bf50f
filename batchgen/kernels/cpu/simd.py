"""Vectors of 16 float32 as first-class values inside numba functions.

Numba has no vector type, and its auto-vectorizer neither keeps a tile of accumulators in registers nor
reorders a float sum, so the kernels spell their vectors out. Loads and stores convert from and to the model's dtype:
the element type of a typed pointer decides (``uint16`` holds bfloat16 bits, ``float32`` itself).

Nothing here knows tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import register_model

from batchgen.kernels.cpu.vector_ir import (
    FLOAT,
    HALF_VECTOR,
    INT,
    INT_VECTOR,
    LANES,
    VECTOR,
    emit_call,
    emit_fma,
    emit_lane_mask,
    emit_load,
    emit_narrow,
    emit_splat,
    emit_store,
    emit_widen,
    int_splat,
    is_bf16,
)

LOG2_E = 1.4426950408889634
# A kernel cannot raise: an exception inside the worker threads would leave its items undone, unseen.
jit: Any = njit(error_model="numpy")
inline: Any = njit(error_model="numpy", forceinline=True)  # a call would pass vectors through memory
intrinsic: Any = numba_intrinsic  # numba's own annotation describes the function before it is decorated
BF16 = np.uint16  # element type of a pointer to bfloat16 bits
F32 = np.float32


class Vec(types.Type):
    """Numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vec16f32")


vec = Vec()


@register_model(Vec)
class _VecModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


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
def call(_context: Any, code: Any) -> Any:
    """Call a C function ``int f(void)`` by its address."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        kind = ir.FunctionType(INT, [])
        answer = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])
        return builder.sext(answer, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def call_with(_context: Any, code: Any, function: Any, data: Any, count: Any) -> Any:
    """Call a C function ``void f(void *function, void *data, unsigned count, unsigned 0)`` by its address."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        address = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [address, address, INT, INT])
        called = builder.inttoptr(arguments[0], kind.as_pointer())
        pointers = [builder.inttoptr(argument, address) for argument in arguments[1:3]]
        builder.call(called, [*pointers, builder.trunc(arguments[3], INT), ir.Constant(INT, 0)])
        return context.get_dummy_value()

    return types.void(code, function, data, count), generate


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
        mask = emit_lane_mask(builder, arguments[2])
        shape, name, align = (HALF_VECTOR, "v16i16", 2) if is_bf16(base) else (VECTOR, "v16f32", 4)
        where = builder.bitcast(at, shape.as_pointer())
        zero = ir.Constant(shape, None)
        parts = [where, ir.Constant(INT, align), mask, zero]
        loaded = emit_call(builder, f"llvm.masked.load.{name}.p0", parts, shape)
        return emit_widen(builder, loaded) if is_bf16(base) else loaded

    return vec(base, types.int64, types.int64), generate


@intrinsic
def store(_context: Any, base: Any, index: Any, value: Any) -> Any:
    """Round 16 values to the element type and write them from ``base[index]`` on."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        emit_store(builder, base, *arguments)
        return context.get_dummy_value()

    return types.void(base, types.int64, vec), generate


@intrinsic
def store_part(_context: Any, base: Any, index: Any, value: Any, count: Any) -> Any:
    """As ``store``, the first ``count`` lanes only."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        at = builder.gep(arguments[0], [arguments[1]])
        mask = emit_lane_mask(builder, arguments[3])
        bf16 = is_bf16(base)
        data = emit_narrow(builder, arguments[2]) if bf16 else arguments[2]
        shape, name, align = (HALF_VECTOR, "v16i16", 2) if bf16 else (VECTOR, "v16f32", 4)
        where = builder.bitcast(at, shape.as_pointer())
        emit_call(builder, f"llvm.masked.store.{name}.p0", [data, where, ir.Constant(INT, align), mask], ir.VoidType())
        return context.get_dummy_value()

    return types.void(base, types.int64, vec, types.int64), generate


@intrinsic
def round_like(_context: Any, base: Any, value: Any) -> Any:
    """Round every lane to the element type of ``base`` and back."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        if not is_bf16(base):
            return arguments[1]
        return emit_widen(builder, emit_narrow(builder, arguments[1]))

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
maximum = _elementwise("maximum", 2, lambda b, v: emit_call(b, "llvm.maxnum.v16f32", v), "the larger, lane by lane")
nearest = _elementwise("nearest", 1, lambda b, v: emit_call(b, "llvm.rint.v16f32", v), "round to an integer")


@intrinsic
def lane(_context: Any, value: Any, index: Any) -> Any:
    """One lane as a scalar."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.extract_element(arguments[0], builder.trunc(arguments[1], INT))

    return types.float32(vec, types.int64), generate


@intrinsic
def any_equal(_context: Any, a: Any, b: Any) -> Any:
    """Whether any lane of ``a`` equals its counterpart in ``b``."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        same = builder.fcmp_ordered("==", *arguments)
        return emit_call(builder, "llvm.vector.reduce.or.v16i1", [same], ir.IntType(1))

    return types.boolean(vec, vec), generate


@intrinsic
def float_of_bits(_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an int64 (how a kernel gets a float argument)."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(builder.trunc(arguments[0], INT), FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def bits_of_float(_context: Any, value: Any) -> Any:
    """The bits of a float32 as a non-negative int64."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.zext(builder.bitcast(arguments[0], INT), ir.IntType(64))

    return types.int64(types.float32), generate


@intrinsic
def keep_lanes(_context: Any, value: Any, other: Any, count: Any) -> Any:
    """``value`` in the lanes below ``count``, ``other`` above."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        return builder.select(emit_lane_mask(builder, arguments[2]), arguments[0], arguments[1])

    return vec(vec, vec, types.int64), generate


@intrinsic
def _scale_by_power_of_two(_context: Any, value: Any, exponent: Any) -> Any:
    """``value * 2**exponent`` for integral exponents in [-126, 127]."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, arguments: Any) -> ir.Value:
        biased = builder.add(builder.fptosi(arguments[1], INT_VECTOR), int_splat(127))
        return builder.fmul(arguments[0], builder.bitcast(builder.shl(biased, int_splat(23)), VECTOR))

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
        powers = [ir.Constant(FLOAT, float(np.float32(c))) for c in _POWERS_OF_2[3 if is_bf16(base) else 0 :]]
        total = emit_splat(builder, powers[0])
        for power in powers[1:]:
            total = emit_fma(builder, total, arguments[1], emit_splat(builder, power))
        return total

    return vec(base, vec), generate


@inline
def load_some(x, at, count):
    """As ``load_part`` for any positive ``count``; all lanes from 16 up."""
    return load(x, at) if count >= LANES else load_part(x, at, count)


@inline
def store_some(x, at, value, count):
    """As ``store_part`` for any positive ``count``."""
    if count >= LANES:
        store(x, at, value)
    else:
        store_part(x, at, value, count)


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

"""Vectors of 16 float32 as first-class values inside numba functions: a numba signature for each function of ``emit``.

Numba lacks a vector type, and its auto-vectorizer neither keeps accumulators in registers nor reorders a float sum.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload, register_model

from batchgen.kernels.cpu.compiled import emit
from batchgen.kernels.cpu.layout import LANES

# Kernels must not raise: after an exception in a worker thread, items would be missing without notice.
jit: Any = njit(error_model="numpy")
# Inlined, since a call passes vectors through memory. Callees are inlined too, so they must not have accumulators.
inline: Any = njit(error_model="numpy", forceinline=True)
intrinsic: Any = numba_intrinsic  # numba's own annotation describes the function before it is decorated
BF16, TILED = np.uint16, np.int16  # element types of bfloat16 bits; ``TILED`` if tiles multiply them
F32 = np.float32
BYTES = np.uint8  # element type of 8-bit integers in a kernel's arguments, signed or unsigned


class Vec(types.Type):
    """Numba type of a vector of 16 float32."""

    def __init__(self) -> None:
        super().__init__(name="Vec16f32")


vec = Vec()
ANY = None  # in a signature: whatever type the argument has; as the result, the type of the first argument
I64 = types.int64


@register_model(Vec)
class _VecModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, emit.VECTOR)


def emitted(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that turns ``write(builder, *values)``, which emits LLVM IR, into a function for numba to call.

    ``result`` and ``parameters`` are its numba types, or ``ANY``. A ``write`` that returns None makes a void function.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        @wraps(write)  # numba reads names and number of the parameters from the signature
        def typed(_context: Any, *arguments: Any) -> Any:
            kinds = [arg if kind is ANY else kind for kind, arg in zip(parameters, arguments, strict=True)]
            answer = arguments[0] if result is ANY else result

            def generate(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> ir.Value:
                value = write(builder, *values)
                return context.get_dummy_value() if value is None else value

            return answer(*kinds), generate

        return intrinsic(typed)

    return decorate


def chosen(choose: Callable[..., Callable[..., Any]]) -> Any:
    """Decorator for a function that, given the numba types of the arguments, returns the function to call."""

    def called(*_: Any) -> Any:
        raise AssertionError("a name for kernels, which is compiled as what is chosen")

    overload(called, jit_options={"error_model": "numpy"})(choose)
    return called


def is_tiled(base: Any) -> bool:
    """Whether the elements of a numba pointer type are ``TILED``: bfloat16 that tiles multiply."""
    return bool(base.dtype == types.int16)


load = emitted(vec, ANY, I64)(emit.load)
load_part = emitted(vec, ANY, I64, I64)(emit.load_part)
store = emitted(types.void, ANY, I64, vec)(emit.store)
store_part = emitted(types.void, ANY, I64, vec, I64)(emit.store_part)
round_like = emitted(vec, ANY, vec)(emit.round_like)
splat = emitted(vec, types.float32)(emit.splat)
forbid = emitted(types.void, ANY, I64, I64, I64)(emit.forbid)
any_equal = emitted(types.boolean, vec, vec)(emit.any_equal)
all_equal = emitted(types.boolean, vec, vec)(emit.all_equal)
nan_or = emitted(vec, vec, vec)(lambda builder, a, b: builder.select(builder.fcmp_unordered("uno", a, a), a, b))
add = emitted(vec, vec, vec)(lambda builder, a, b: builder.fadd(a, b))
sub = emitted(vec, vec, vec)(lambda builder, a, b: builder.fsub(a, b))
mul = emitted(vec, vec, vec)(lambda builder, a, b: builder.fmul(a, b))
div = emitted(vec, vec, vec)(lambda builder, a, b: builder.fdiv(a, b))
fma = emitted(vec, vec, vec, vec)(emit.fma)
absolute = emitted(vec, vec)(lambda builder, v: emit.call(builder, "llvm.fabs.v16f32", [v]))
# The larger, lane by lane; if one is NaN, the other.
maximum = emitted(vec, vec, vec)(lambda builder, a, b: emit.call(builder, "llvm.maxnum.v16f32", [a, b]))
lane = emitted(types.float32, vec, I64)(lambda builder, v, i: builder.extract_element(v, builder.trunc(i, emit.INT)))
# ``a`` in the lanes below ``n``, ``b`` in the others.
keep_lanes = emitted(vec, vec, vec, I64)(lambda builder, a, b, n: builder.select(emit.lane_mask(builder, n), a, b))
exp2 = emitted(vec, ANY, vec)(emit.exp2)
exp = emitted(vec, ANY, vec)(emit.exp)
silu_mul = emitted(vec, ANY, vec, vec)(emit.silu_mul)


@emitted(vec, vec, types.float32)
def drop_below(builder: ir.IRBuilder, v: ir.Value, least: ir.Value) -> ir.Value:
    """Zero in the lanes whose magnitude is below ``least``; NaN stays."""
    magnitude = emit.call(builder, "llvm.fabs.v16f32", [v])
    is_small = builder.fcmp_ordered("<", magnitude, emit.splat(builder, least))
    return builder.select(is_small, ir.Constant(emit.VECTOR, None), v)


@emitted(vec, ANY, vec, vec)
def gelu_mul(builder: ir.IRBuilder, out: ir.Value, gate: ir.Value, up: ir.Value) -> ir.Value:
    """``gelu(g) * up``: gelu is g / 2 * (1 + tanh(x)) = g * sigmoid(2 x), x = sqrt(2 / pi) * (g + 0.044715 g**3)."""
    first = 2 * math.sqrt(2 / math.pi)
    linear, cubic = (
        emit.splat(builder, ir.Constant(emit.FLOAT, float(np.float32(c)))) for c in (first, 0.044715 * first)
    )
    slope = emit.fma(builder, builder.fmul(gate, gate), cubic, linear)
    return emit.sigmoid_mul(builder, out, gate, builder.fmul(gate, slope), up)


@intrinsic
def pointer(_context: Any, address: Any, dtype: Any) -> Any:
    """Typed pointer to an integer address; ``dtype`` is the element type, or a pointer with the same element type."""
    kind = dtype if isinstance(dtype, types.CPointer) else types.CPointer(dtype.dtype)

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(I64, dtype), generate


@emitted(I64, ANY)
def address(builder: ir.IRBuilder, base: ir.Value) -> ir.Value:
    """The address that a pointer holds."""
    return builder.ptrtoint(base, ir.IntType(64))


@emitted(ANY, ANY, I64)
def shifted(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Pointer to ``base[index]``."""
    return builder.gep(base, [index])


@intrinsic
def units(_context: Any, keys: Any) -> Any:
    """``keys`` as a pointer to the unit in which a cached key is copied: a byte for integers, otherwise four bytes."""
    kind = keys if keys.dtype == types.int8 else types.CPointer(types.uint32)

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(arguments[0], context.get_value_type(kind))

    return kind(keys), generate


@emitted(types.void, ANY, I64, ANY, I64)
def copy_element(builder: ir.IRBuilder, out: ir.Value, to: ir.Value, x: ir.Value, index: ir.Value) -> None:
    """``out[to] = x[index]``: the same bits, or bfloat16 converted to float32."""
    same = out.type == x.type
    value = builder.load(builder.gep(x, [index])) if same else emit.scalar_as_float(builder, x, index)
    builder.store(value, builder.gep(out, [to]))


@emitted(I64, ANY, I64, I64)
def fetch_add(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, amount: ir.Value) -> ir.Value:
    """Atomically add ``amount`` to the int64 ``base[index]``; returns the previous value."""
    return builder.atomic_rmw("add", builder.gep(base, [index]), amount, "seq_cst")


@emitted(I64, ANY, I64)
def fetch(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Atomically read the int64 ``base[index]``."""
    return builder.load_atomic(builder.gep(base, [index]), "seq_cst", 8)


@emitted(types.boolean, ANY, I64, I64, I64)
def replace(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, old: ir.Value, new: ir.Value) -> ir.Value:
    """Atomically set the int64 ``base[index]`` to ``new`` if it is ``old``; returns whether it was."""
    exchange = builder.cmpxchg(builder.gep(base, [index]), old, new, "seq_cst", "seq_cst")
    return builder.extract_value(exchange, 1)


@emitted(types.void)
def pause(builder: ir.IRBuilder) -> None:
    """Tell the processor that this loop only waits."""
    if platform.machine() in ("x86_64", "AMD64"):
        emit.call(builder, "llvm.x86.sse2.pause", [], ir.VoidType())


@emitted(I64, types.float32)
def bits_of_float(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The bits of a float32 as a non-negative int64."""
    return builder.zext(builder.bitcast(value, emit.INT), ir.IntType(64))


@emitted(I64, I64, I64, I64, I64, I64, I64)
def call(  # numba wants to see the parameters
    builder: ir.IRBuilder, code: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value, e: ir.Value
) -> ir.Value:
    """Call the C function at address ``code`` with five integers or addresses; returns its C int."""
    kind = ir.FunctionType(emit.INT, [a.type] * 5)
    called = builder.call(builder.inttoptr(code, kind.as_pointer()), [a, b, c, d, e])
    return builder.sext(called, ir.IntType(64))


@inline
def load_some(x, at, count):
    """Like ``load_part``, for any positive ``count``: with 16 or more, all lanes are loaded."""
    return load(x, at) if count >= LANES else load_part(x, at, count)


@inline
def store_some(x, at, value, count):
    """Like ``store_part``, for any positive ``count``."""
    if count >= LANES:
        store(x, at, value)
    else:
        store_part(x, at, value, count)


@inline
def multiply_row(x, start, count, factors, first):
    """``x[start + i] *= factors[first + i]`` for ``count`` elements."""
    for i in range(0, count, LANES):
        rest = count - i
        v = mul(load_some(x, start + i, rest), load_some(factors, first + i, rest))
        store_some(x, start + i, v, rest)


@inline
def sum_lanes(v):
    """Sum over lanes in a fixed order."""
    total = lane(v, 0)
    for i in range(1, LANES):
        total += lane(v, i)
    return total


@inline
def max_lanes(v):
    """Largest lane of a vector without NaN."""
    largest = lane(v, 0)
    for i in range(1, LANES):
        largest = max(largest, lane(v, i))
    return largest

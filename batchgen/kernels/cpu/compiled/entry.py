"""The C function that a launch calls: it takes items and calls a kernel's function for each of them.

A kernel's function takes an item and named arguments; ``kernel`` declares the types of those that are not integers.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import from_dtype

from batchgen.kernels.cpu.compiled import emit, simd
from batchgen.kernels.cpu.compiled.thread_pool import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, NUM_ITEMS, NUM_WORKERS

# Types of arguments: an element type (for a pointer to elements, or 0), ``FLOAT``, or one of the classes below.
FLOAT = types.float32  # passed as its bits


@dataclass(frozen=True)
class OfKind:
    """A pointer whose element type is number ``index`` of the kind's element types."""

    index: int


@dataclass(frozen=True)
class Own:
    """A pointer to the worker's part of scratch memory, passed as two words: its address and the bytes per part."""

    element: Any


class Group:
    """Several arguments as one named tuple; ``pointers`` are the types of arguments that are not integers."""

    def __init__(self, name: str, fields: str, **pointers: Any) -> None:
        self.made: Any = namedtuple(name, fields)  # type: ignore[misc]  # mypy does not know types made at run time
        self.fields = [pointers.get(field, simd.I64) for field in fields.split()]


CACHE_FIELDS = "keys values scales num_kv_heads width block_size lanes pack"  # of a ``Group``; see ``inputs.KVCache``
DTYPE, STORED = OfKind(0), OfKind(1)  # the model's type, and the stored type that it reads, if the kind has one


@dataclass(frozen=True)
class ItemKernel:
    """A kernel's function and the types of its arguments; ``is_last_first``: it takes items from last to first."""

    function: Any
    parameters: list[Any]
    is_last_first: bool = False

    def entry(self, element_types: tuple[Any, ...]) -> Callable[[Any], None]:
        """A function of a launch's words that runs the kernel on elements of these types."""
        called, is_last_first, unpack = self.function, self.is_last_first, _unpacking(self.parameters, element_types)

        def kernel(args: Any) -> None:
            worker, num_items = worker_number(args), args[NUM_ITEMS]
            arguments = unpack(args, worker)
            turn = args[NUM_WORKERS] - 1 - worker if is_last_first else worker
            item = next_item(args, turn)
            while item < num_items:
                called(num_items - 1 - item if is_last_first else item, *arguments)
                item = next_item(args, turn)

        return kernel


def kernel(**pointers: Any) -> Callable[[Callable[..., None]], ItemKernel]:
    """Decorator that makes an ``ItemKernel``; ``pointers`` are the types of arguments that are not integers."""

    def decorate(function: Callable[..., None]) -> ItemKernel:
        _, *names = inspect.signature(function).parameters
        assert pointers.keys() <= set(names), "each type belongs to a parameter"
        return ItemKernel(simd.jit(function), [pointers.get(name, simd.I64) for name in names])

    return decorate


def last_first(kernel: ItemKernel) -> ItemKernel:
    """Decorator for a kernel that takes its items from last to first."""
    return replace(kernel, is_last_first=True)


def _unpacking(parameters: list[Any], element_types: tuple[Any, ...]) -> Any:
    """A numba function that turns a launch's words and a worker's number into the tuple of a kernel's arguments."""

    def typed(parameter: Any) -> Any:
        if isinstance(parameter, Group):
            return types.NamedTuple([typed(field) for field in parameter.fields], parameter.made)
        if parameter in (simd.I64, FLOAT):
            return parameter
        element = parameter.element if isinstance(parameter, Own) else parameter
        element = element_types[element.index] if isinstance(element, OfKind) else element
        return types.CPointer(from_dtype(np.dtype(element)))

    answer = types.Tuple([typed(parameter) for parameter in parameters])

    @simd.intrinsic
    def unpack(_context: Any, args: Any, worker: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> ir.Value:
            words, number = values
            places = iter(range(ARGS, 1 << 10))

            def word() -> ir.Value:
                return builder.load(builder.gep(words, [emit.number(next(places))]))

            def value(parameter: Any, kind: Any) -> ir.Value:
                if isinstance(parameter, Group):
                    return context.make_tuple(builder, kind, list(map(value, parameter.fields, kind)))
                word_value = word()
                if isinstance(parameter, Own):
                    word_value = builder.add(word_value, builder.mul(number, word()))
                if kind is FLOAT:
                    return builder.bitcast(builder.trunc(word_value, emit.INT), emit.FLOAT)
                return word_value if kind is simd.I64 else builder.inttoptr(word_value, context.get_value_type(kind))

            return context.make_tuple(builder, answer, list(map(value, parameters, answer)))

        return answer(args, worker), generate

    return unpack

"""Compiles a kernel with numba: inner functions are only translated, the complete kernel is optimized once.

By default numba also optimizes and wraps each inner function: more than twice the time, for the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import compiler, registry
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock

from batchgen.kernels.cpu.kernel_specs import KernelSpec
from batchgen.kernels.cpu.layout import ENTRY

_WORDS = types.CPointer(types.int64)
_KEPT: list[Any] = []  # plainly compiled kernels: their machine code lives as long as they do


class _Translation(JITCodeLibrary):
    """The functions of a kernel, translated to LLVM IR but not optimized."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Left to ``machine_code``."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        return 0  # as numba returns for a function without such a wrapper

    def machine_code(self) -> bytes:
        """The kernel's object file. Raises NotImplementedError if it calls functions that need numba in the process."""
        self.finalize()
        super()._optimize_final_module()
        module, process = self._final_module, ctypes.CDLL(None)
        called = [function.name for function in module.functions if function.is_declaration]
        if missing := [name for name in called if not name.startswith("llvm.") and not hasattr(process, name)]:
            raise NotImplementedError(f"calls of {', '.join(missing)}")
        code: bytes = self._codegen._tm.emit_object(module)
        return code


class _Codegen(JITCPUCodegen):
    """Numba's code generator for its own target, but with a ``_Translation`` as the library."""

    _library_class = _Translation

    def set_env(self, *_: Any) -> None:
        """Kernels do not call Python, so their functions do not need an environment."""


def prepare(modules: Iterable[str]) -> None:
    """Import the modules and refresh numba's registries, so that forks of this process need not do it."""
    registry.cpu_target.typing_context.refresh()
    registry.cpu_target.target_context.refresh()
    for module in modules:
        import_module(module)


def machine_code(spec: KernelSpec, kind: str) -> bytes:
    """A kernel's object file, with the C function ``ENTRY``. May raise any error if numba's internals have changed."""
    typing, context = registry.cpu_target.typing_context, registry.cpu_target.target_context
    context.refresh()
    flags: Any = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    with global_compiler_lock, _translating(context):
        result = compiler.compile_extra(typing, context, _function(spec, kind), (_WORDS,), types.void, flags, {})
        _add_entry(context, result.library, result.fndesc)
        code: bytes = result.library.machine_code()
        return code


@contextmanager
def _translating(context: Any) -> Iterator[None]:
    replaced = {
        "_internal_codegen": _Codegen("batchgen"),
        "cached_internal_func": {},  # numba's own functions, which its usual code generator has compiled
        "create_cpython_wrapper": lambda *_, **__: None,
        "create_cfunc_wrapper": lambda *_, **__: None,
    }
    before = {name: getattr(context, name) for name in replaced}
    try:
        vars(context).update(replaced)
        yield
    finally:
        vars(context).update(before)


def _add_entry(context: Any, library: Any, kernel: Any) -> None:
    """Add the C function ``ENTRY``, which calls a kernel by numba's calling convention; kernels do not raise."""
    module, convention = context.create_module(ENTRY), context.call_conv
    called = ir.Function(module, convention.get_function_type(types.void, (_WORDS,)), kernel.llvm_func_name)
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [context.get_value_type(_WORDS)]), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    convention.call_function(builder, called, types.void, (_WORDS,), entry.args)
    builder.ret_void()
    library.add_ir_module(module)


def compile_plainly(spec: KernelSpec, kind: str) -> int:
    """Compile a kernel with numba's plain ``cfunc``; returns its address."""
    kept: Any = cfunc(types.void(_WORDS))(_function(spec, kind))
    _KEPT.append(kept)
    address: int = kept.address
    return address


def _function(spec: KernelSpec, kind: str) -> Callable[[Any], None]:
    kernel = getattr(import_module(spec.module), spec.name)
    of_words: Callable[[Any], None] = kernel.entry(spec.kinds[kind]) if hasattr(kernel, "entry") else kernel.py_func
    return of_words

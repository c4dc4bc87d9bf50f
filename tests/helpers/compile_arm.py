"""Compiles the CPU kernels of usual models for 64-bit Arm, on any processor: llvmlite's LLVM has that target.

Run as a program with the features to compile for, in a process of its own: what numba believes of this machine is
replaced. Prints a line of JSON per kernel: its size, what it calls, and how many instructions multiply floats or bytes.
With a further argument, "keep", the cache of kernels has them, for an emulated processor that is told the same features
in ``NUMBA_CPU_FEATURES`` and has the same sources and versions of numba and llvmlite.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from typing import Any

TRIPLE, PROCESSOR = "aarch64-unknown-linux-gnu", "neoverse-n1"


def target_machine(features: str) -> Any:
    """LLVM's compiler for such a processor."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    sizes = {"opt": 3, "reloc": "default", "codemodel": "default"}
    return binding.Target.from_triple(TRIPLE).create_target_machine(cpu=PROCESSOR, features=features, **sizes)


def compile_for(machine: Any) -> None:
    """Make ``compiler.machine_code`` give another machine's code, with its text and what it calls."""
    from numba.core import codegen as numba_codegen

    from batchgen.kernels.cpu import compiler as own_compiler

    codegen: Any = numba_codegen  # whose methods have no types, and are replaced
    compiler: Any = own_compiler
    customize, begin = codegen.JITCPUCodegen._customize_tm_options, compiler._Codegen.__init__

    def without_features(self: Any, options: dict[str, Any]) -> None:
        customize(self, options)
        options.update(cpu="", features="")  # which are of no use to the target that numba makes first

    def begin_for_machine(self: Any, name: str) -> None:
        begin(self, name)
        self._tm, self._data_layout = machine, str(machine.target_data)

    def other_code(self: Any) -> tuple[list[str], str, bytes]:
        self.finalize()
        module = self._final_module
        module.triple, module.data_layout = TRIPLE, str(machine.target_data)
        codegen.JITCodeLibrary._optimize_final_module(self)
        called = [found.name for found in module.functions if found.is_declaration]
        code = machine.emit_object(module)
        return [name for name in called if not name.startswith("llvm.")], machine.emit_assembly(module), code

    codegen.JITCPUCodegen._customize_tm_options = without_features
    compiler._Codegen.__init__ = begin_for_machine
    compiler._Translation.machine_code = other_code


def main(features: str, is_kept: bool) -> None:
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = PROCESSOR, features
    setattr(platform, "machine", lambda: "aarch64")  # noqa: B010 - mypy refuses to assign to a function
    machine = target_machine(features)
    compile_for(machine)
    from batchgen.kernels.cpu import compiler, kernel_specs, object_cache
    from batchgen.kernels.processor import cpu_obstacle

    specs = {spec for spec in vars(kernel_specs).values() if isinstance(spec, kernel_specs.KernelSpec)}
    if cpu_obstacle("int8"):  # not every processor multiplies bytes
        specs.remove(kernel_specs.MATMUL_INTEGERS)
    kernels = ((spec, kind) for spec in specs for kind in spec.kinds if kind != "bf16_pairs")  # which is for x86
    code_of: Any = compiler.machine_code  # which gives more, as replaced above
    for spec, kind in sorted(kernels, key=str):
        calls, text, code = code_of(spec, kind)
        if is_kept:
            assert object_cache.write(object_cache.file_name(spec, kind), code), "the cache can be written"
        found = {"name": spec.name, "kind": kind, "bytes": len(code), "calls": calls}
        counts = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("fmla", "sdot")}
        print(json.dumps({**found, **counts}))


if __name__ == "__main__":
    main(sys.argv[1], "keep" in sys.argv[2:])

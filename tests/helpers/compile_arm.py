"""Compiles the CPU kernels of usual models for 64-bit Arm, on any processor: llvmlite's LLVM has that target.

Run as a program with the features to compile for, in a process of its own: what numba believes of this machine is
replaced. Prints a line of JSON per kernel: its size, what it calls, and how many instructions multiply floats or bytes.
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
    """Make ``compiler.machine_code`` give, in place of this machine's code, text for another's."""
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

    def assembly(self: Any) -> tuple[list[str], str, int]:
        self.finalize()
        module = self._final_module
        module.triple, module.data_layout = TRIPLE, str(machine.target_data)
        codegen.JITCodeLibrary._optimize_final_module(self)
        called = [found.name for found in module.functions if found.is_declaration]
        text = machine.emit_assembly(module)
        return [name for name in called if not name.startswith("llvm.")], text, len(machine.emit_object(module))

    codegen.JITCPUCodegen._customize_tm_options = without_features
    compiler._Codegen.__init__ = begin_for_machine
    compiler._Translation.machine_code = assembly


def main(features: str) -> None:
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = PROCESSOR, features
    setattr(platform, "machine", lambda: "aarch64")  # noqa: B010 - mypy refuses to assign to a function
    machine = target_machine(features)
    compile_for(machine)
    from batchgen.kernels.cpu import compiler, kernel_specs
    from batchgen.kernels.processor import cpu_obstacle

    activations = "auto" if cpu_obstacle("int8") else "int8"  # which not every processor multiplies
    wanted = {
        *kernel_specs.needed_by_some("float32"),
        *kernel_specs.needed("float32", "bfloat16"),
        *kernel_specs.needed("float32", "bfloat16", "int8", activations, "int8", "experts"),
    }
    assembly: Any = compiler.machine_code  # which gives text, as replaced above
    for spec, kind in sorted(wanted, key=str):
        calls, text, size = assembly(spec, kind)
        found = {"name": spec.name, "kind": kind, "bytes": size, "calls": calls}
        counts = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("fmla", "sdot")}
        print(json.dumps({**found, **counts}))


if __name__ == "__main__":
    main(sys.argv[1])

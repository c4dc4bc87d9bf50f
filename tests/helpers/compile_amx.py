"""Compiles the CPU kernels that are made of tiles for a processor with AMX, on any processor.

Run as a program, in a process of its own: kernels settle at their import what they are emitted for. Prints a line of
JSON per kernel: its size, what it calls, and how often each instruction of tiles comes, in all and between
the labels of its innermost loops.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

TRIPLE, PROCESSOR = "x86_64-unknown-linux-gnu", "sapphirerapids"
FEATURES = "+amx-tile,+amx-bf16,+amx-int8,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+avx512bf16"
INSTRUCTIONS = (
    "tdpbf16ps",
    "tdpbsud",
    "tileloadd",
    "tilestored",
    "tilezero",
    "ldtilecfg",
    "tilerelease",
    "vpdpbusd",
    "vdpbf16ps",
)
KERNELS = {
    "MATMUL_BF16": "bfloat16",
    "MATMUL_BF16_UNPACKED": "bfloat16",
    "MATMUL_INT8": "bfloat16",
    "ATTENTION": "bf16_tiles",
}


def loops(text: str) -> list[dict[str, int]]:
    """How often each instruction comes in the loops that multiply tiles and hold no other loop, and all of theirs."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line[:-1].split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.\w+:", line)}
    found = []
    for i, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.\w+)", line)
        if jump and (start := labels.get(jump[1], i)) < i:
            body = [word for word in (part.split()[:1] for part in lines[start:i]) if word]
            names = [word[0] for word in body if not word[0].endswith(":") and not word[0].startswith(("#", "."))]
            if any(name.startswith("tdp") for name in names) and not any(name.startswith("j") for name in names):
                found.append({"all": len(names)} | {name: names.count(name) for name in INSTRUCTIONS if name in names})
    return found


def main() -> None:
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = PROCESSOR, FEATURES
    from llvmlite import binding
    from numba.core.codegen import JITCodeLibrary

    from batchgen.kernels import processor
    from batchgen.kernels.cpu import compiler, kernel_specs

    setattr(processor, "tiles_obstacle", lambda: "")  # noqa: B010 - who compiles needs no permission
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(TRIPLE)
    machine = target.create_target_machine(cpu=PROCESSOR, features=FEATURES, opt=3, reloc="default")

    optimize: Any = JITCodeLibrary._optimize_final_module

    def assembly(self: Any) -> tuple[list[str], str]:
        self.finalize()
        optimize(self)
        module = self._final_module
        called = [found.name for found in module.functions if found.is_declaration]
        return [name for name in called if not name.startswith("llvm.")], machine.emit_assembly(module)

    setattr(compiler._Translation, "machine_code", assembly)  # noqa: B010 - mypy refuses to assign to a method
    code_of: Any = compiler.machine_code  # which gives more, as replaced above
    for name, kind in KERNELS.items():
        calls, text = code_of(getattr(kernel_specs, name), kind)
        counts = {instruction: len(re.findall(rf"\b{instruction}\b", text)) for instruction in INSTRUCTIONS}
        print(json.dumps({"name": name, "calls": calls, "loops": loops(text), **counts}))


if __name__ == "__main__":
    main()

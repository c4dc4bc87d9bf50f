"""What the inner products of linears become on processors other than this one: the instruction that they are made for.

Each case is a process of its own, since kernels settle at their import what they are emitted for.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repeats import slow

EMIT = """
import sys
from llvmlite import binding, ir
from batchgen.kernels.cpu.compiled import int8, matmul_tiles
from batchgen.kernels.cpu.compiled.emit import VECTOR, number

triple, cpu, product = sys.argv[1:]
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
LONG, FLOAT, HALF, BYTE = ir.IntType(64), ir.FloatType(), ir.IntType(16), ir.IntType(8)
x_type, weight_type = {
    "integers": (None, BYTE), "bf16": (HALF, HALF), "f32_of_bf16": (FLOAT, HALF), "bf16_of_int8": (HALF, BYTE)
}[product]
x_types = [BYTE, FLOAT, ir.IntType(32)] if x_type is None else [x_type]
module = ir.Module()
module.triple = triple
pointers = [kind.as_pointer() for kind in (*x_types, weight_type, VECTOR)]
function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*pointers, LONG]), "tile")
builder = ir.IRBuilder(function.append_basic_block())
*x, weight, out, count = function.args
rows = 2
totals = {(r, 0): builder.alloca(VECTOR) for r in range(rows)}
for total in totals.values():
    builder.store(ir.Constant(VECTOR, None), total)
if x_type is None:
    int8.emit_integer_sums(builder, totals, x, number(0), [weight], count, count, lambda index: None)
else:
    matmul_tiles._emit_sums(builder, totals, x[0], number(0), count, weight, [weight], count, lambda index: None)
for (r, _), total in totals.items():
    builder.store(builder.load(total), builder.gep(out, [number(r)]), align=4)
builder.ret_void()
features = ",".join(item for item in sys.argv[4:] if item)
machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
print(machine.emit_assembly(binding.parse_assembly(str(module))))
"""
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = "+avx2,+fma"
WIDE = "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "product", "instruction"),
    [
        (X86, "znver4", f"{WIDE},+avx512bf16", "integers", "vpdpbusd"),
        slow(X86, "znver4", f"{WIDE},+avx512bf16", "bf16", "vdpbf16ps"),
        slow(X86, "znver4", f"{WIDE},+avx512bf16", "bf16_of_int8", "vdpbf16ps"),
        slow(X86, "icelake-server", WIDE, "integers", "vpdpbusd"),
        slow(X86, "icelake-server", WIDE, "f32_of_bf16", "vfmadd"),
        slow(X86, "sapphirerapids", f"{WIDE},+avx512bf16", "integers", "vpdpbusd"),
        slow(X86, "alderlake", f"{AVX2},+avxvnni", "integers", "{vex} vpdpbusd"),
        slow(X86, "skylake-avx512", WIDE.removesuffix(",+avx512vnni"), "integers", "vpmaddwd"),
        (X86, "znver3", AVX2, "integers", "vpmaddwd"),
        slow(X86, "znver3", AVX2, "f32_of_bf16", "vfmadd"),
        slow(X86, "znver3", AVX2, "bf16_of_int8", "vfmadd"),
        (ARM, "neoverse-n1", "+neon,+dotprod", "integers", "sdot"),
        slow(ARM, "neoverse-n1", "+neon,+dotprod", "f32_of_bf16", "fmla"),
    ],
)
def test_a_tile_is_made_of_the_instruction_that_it_is_meant_to_be(
    triple: str, cpu: str, features: str, product: str, instruction: str
) -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", EMIT, triple, cpu, product]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert sum(line.startswith(instruction) for line in lines) >= 2  # one for each row, at least
    assert not any(line.startswith(("call", "bl ")) for line in lines), "no operation becomes a call"

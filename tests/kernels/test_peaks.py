"""The loops that measure a processor's peak hold the instructions that they are named for, and do all the work."""

from __future__ import annotations

import re

import pytest
import torch
from llvmlite import binding, ir

from batchgen.kernels.cpu import kernel_specs, peaks
from batchgen.kernels.cpu.compiled import int8
from batchgen.kernels.cpu.compiled.peaks import emit_products

ELEMENTS = {"float32": ir.FloatType(), "bfloat16": ir.IntType(16), "int8": ir.IntType(8)}


def assembly(cpu: str, kind: str, num_totals: int) -> str:
    """The loop of products as compiled for a processor, which need not be this one."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, opt=3)
    module = ir.Module("peak")
    module.triple = "x86_64-unknown-linux-gnu"
    signature = ir.FunctionType(ir.VoidType(), [ELEMENTS[kind].as_pointer(), ir.IntType(64)])
    function = ir.Function(module, signature, "peak")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_products(builder, *function.args, num_totals)
    builder.ret_void()
    compiled = binding.parse_assembly(str(module))
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(compiled, passes)
    return str(machine.emit_assembly(compiled))


@pytest.mark.parametrize(
    ("cpu", "kind", "instruction", "register", "num_totals"),
    [
        ("haswell", "float32", "vfmadd...ps", "ymm", 6),
        ("znver3", "float32", "vfmadd...ps", "ymm", 6),
        ("skylake-avx512", "float32", "vfmadd...ps", "zmm", 12),
        ("znver4", "float32", "vfmadd...ps", "zmm", 12),
        ("znver4", "bfloat16", "vdpbf16ps", "zmm", 12),
        ("cooperlake", "bfloat16", "vdpbf16ps", "zmm", 12),
        ("znver4", "int8", "vpdpbusd", "zmm", 12),
        ("icelake-server", "int8", "vpdpbusd", "zmm", 12),
    ],
)
def test_the_loop_holds_one_instruction_for_each_product_and_no_memory(
    monkeypatch: pytest.MonkeyPatch, cpu: str, kind: str, instruction: str, register: str, num_totals: int
) -> None:
    monkeypatch.setattr(int8, "cpu_features", lambda: {"avx512vnni"})
    lines = [line.strip() for line in assembly(cpu, kind, num_totals).splitlines()]
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    backward = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := re.match(r"j\w+\s+(\.\w+)", line))]
    loops = [lines[start + 1 : end] for start, end in backward if start < end]
    body = next(loop for loop in loops if any(re.match(instruction, line) for line in loop))
    found = [line for line in body if re.match(instruction, line)]
    registers_per_product = {"ymm": 2, "zmm": 1}[register]
    repeats, rest = divmod(len(found), num_totals * registers_per_product)
    assert repeats >= 1
    assert rest == 0, "no product was found to be superfluous"
    assert all(register in line for line in found)
    assert not any("(" in line for line in body if not line.startswith("#")), "nothing is loaded or spilled"


@pytest.mark.parametrize("cpu", ["haswell", "znver3"])
def test_no_product_of_bytes_is_taken_out_of_the_loop_where_it_takes_several_instructions(
    monkeypatch: pytest.MonkeyPatch, cpu: str
) -> None:
    monkeypatch.setattr(int8, "cpu_features", lambda: {"avx2"})
    lines = [line.strip() for line in assembly(cpu, "int8", 6).splitlines()]
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.endswith(":")}
    backward = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := re.match(r"j\w+\s+(\.\w+)", line))]
    body = max((lines[start + 1 : end] for start, end in backward if start < end), key=len)
    found = sum(line.startswith("vpmaddwd") for line in body)
    assert found > 0 == found % (6 * 2), "six totals of two registers"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_every_product_is_added(name: str, threads: int) -> None:
    if name not in peaks.kinds_of_products():
        pytest.skip("this processor does not multiply them")
    torch.set_num_threads(threads)
    kind, flop = peaks.kinds_of_products()[name]
    memory, items, rounds = peaks.totals_of(threads), 5, 7
    before = memory.clone()
    peaks.MULTIPLY.launch(kind, items, memory.data_ptr(), peaks.OWN_BYTES, rounds)
    totals = slice(0, kernel_specs.PEAK_TOTALS)
    product = 0.25
    if name == "int8":
        memory, before = (x.view(torch.int32) for x in (memory, before))
        # Of the four bytes of 0.5 one is not zero, 63; of their two halves one, and the sum keeps its lowest 32 bits.
        product = 63 * 63 if int8.adds_up() else (63 << 8) ** 2
    added = (memory - before)[:, totals].sum(0)
    assert ((added - items * rounds * product) % 2**32 == 0).all()
    assert torch.equal(memory[:, kernel_specs.PEAK_TOTALS :], before[:, kernel_specs.PEAK_TOTALS :])
    work, whole = peaks.products(rounds)[name]
    assert whole == flop * added.shape[0] * rounds * 16 * threads
    work()


@pytest.mark.parametrize("threads", [1, 2])
def test_all_of_a_buffer_is_read(threads: int) -> None:
    torch.set_num_threads(threads)
    buffer, sums = torch.ones(3 * peaks.ITEM_FLOATS + 100), peaks.totals_of(threads).zero_()
    peaks.READ.launch("any", 3, sums.data_ptr(), peaks.OWN_BYTES, buffer.data_ptr(), peaks.ITEM_FLOATS)
    assert sums.sum() == 3 * peaks.ITEM_FLOATS
    work, num_bytes = peaks.reads(buffer)
    assert num_bytes == 3 * peaks.ITEM_FLOATS * 4
    work()

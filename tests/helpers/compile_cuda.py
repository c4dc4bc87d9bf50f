"""Compiles every CUDA kernel as a real step would launch it, for a GPU that need not be there.

Run as a program: arguments are the compute capability and dtypes, before them ``once`` for one binary per kernel, or
``head_dim=N`` for the mixers alone, with other heads. Prints a line of JSON per binary: registers of a thread, bytes of
stack (registers spilled to memory) and of shared memory, and how many matrix instructions and wide asynchronous copies
it has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from tiny_model import ragged_input
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from batchgen.kernels.cuda.backend import CudaKernels
from batchgen.kernels.inputs import ConvState, KVCache
from batchgen.kernels.interface import Heads, Routing, SamplingRows

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FF, VOCAB, BLOCK_SIZE = 16, 8, 64, 1024, 4608, 65536, 64  # LFM2-350M


class NoDriver:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_instead_of_launching(*, once: bool) -> dict[str, tuple[str, Any]]:
    """Make launches compile only; (name, binary) by hash, filled as kernels are called."""
    run, found = jit.JITFunction.run, dict[str, tuple[str, Any]]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if once and self.__name__ in (name for name, _ in found.values()):
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[kernel.hash] = (self.__name__, kernel)
        return kernel

    jit.JITFunction.run = compile_only
    return found


def call_everything(kernels: CudaKernels, dtype: torch.dtype, pieces: list[tuple[int, int]]) -> None:
    tokens = sum(count for _, count in pieces)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for residual in (None, zeros(tokens, HIDDEN)):
        kernels.rms_norm(zeros(tokens, HIDDEN), zeros(HIDDEN), 1e-5, residual)
    kernels.swiglu(zeros(tokens, 2 * FF))
    for bias in (None, zeros(HIDDEN)):
        linear = kernels.linear(zeros(HIDDEN, HIDDEN), bias)
        for rows in (tokens, 300, 3000):
            linear(zeros(rows, HIDDEN))
        for post in (None, zeros(HIDDEN)):
            kernels.add_and_norm(linear, zeros(tokens, HIDDEN), zeros(tokens, HIDDEN), zeros(HIDDEN), 1e-5, post)
    experts = kernels.experts((zeros(64, HIDDEN), zeros(64, HIDDEN), zeros(HIDDEN, 64)) for _ in range(4))
    route = kernels.router(Routing(zeros(4, HIDDEN, dtype=torch.float32), None, 2, is_softmax=True))
    x, gated = zeros(tokens, HIDDEN), kernels.gated_linear(zeros(FF, HIDDEN), zeros(FF, HIDDEN))
    experts(x, *route(x), x)
    for taken in (x, zeros(300, HIDDEN)):
        gated(taken)
    call_mixers(kernels, dtype, pieces)
    logits = zeros(2, VOCAB)
    kernels.logsumexp(logits)
    kernels.mask(logits, zeros(2, dtype=torch.int64), zeros(2, VOCAB // 32, dtype=torch.int32))
    types = (torch.float32, torch.float32, torch.int64, torch.float64, torch.float64)
    kernels.sample(logits, SamplingRows(*(zeros(2, dtype=t) for t in types)))


def call_mixers(
    kernels: CudaKernels, dtype: torch.dtype, pieces: list[tuple[int, int]], head_dim: int = HEAD_DIM
) -> None:
    """What is computed between the projections of a layer."""
    inputs, num_blocks = ragged_input(pieces, BLOCK_SIZE)
    tokens, slots = inputs.num_tokens, inputs.num_seqs

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    rotary = zeros(2, 1024, head_dim // 2, dtype=torch.float32)
    for cached, (norm, window, gates) in product((dtype, torch.int8), ((zeros(head_dim), 0, 0), (None, 256, HEADS))):
        keys = zeros(num_blocks + 1, KV_HEADS, 1, BLOCK_SIZE, head_dim, dtype=cached)
        values = zeros(num_blocks, KV_HEADS, BLOCK_SIZE, head_dim, dtype=cached)
        scales = zeros(num_blocks, KV_HEADS, 2, BLOCK_SIZE, dtype=torch.float32) if cached is torch.int8 else None
        cache = KVCache(keys, values, BLOCK_SIZE, scales)
        qkv = zeros(tokens, (HEADS + 2 * KV_HEADS) * head_dim + gates)
        heads = Heads(HEADS, head_dim, norm, norm, 1e-5, window, is_gated=gates > 0)
        q = kernels.rope_and_cache(qkv, heads, rotary, inputs, cache)
        kernels.attention(q, qkv, heads, inputs, cache)
    state = ConvState(zeros(slots, 2, HIDDEN), zeros(num_blocks, 2, HIDDEN), BLOCK_SIZE)
    weight, bias = zeros(3, HIDDEN, dtype=torch.float32), zeros(HIDDEN, dtype=torch.float32)
    kernels.short_conv(zeros(tokens, 3 * HIDDEN), weight, bias, state, inputs)


def report(name: str, kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    assert registers is not None, usage
    assert stack is not None, usage
    return {
        "name": name,
        "registers": int(registers[1]),
        "stack_bytes": int(stack[1]),
        "shared_bytes": kernel.metadata.shared,
        "fused": kernel.asm["ptx"].count("fma.rn.f32"),
        "matrix": len(re.findall(r"\bHG?MMA", code)),
        "wide_copies": len(re.findall(r"LDGSTS\S*\.128", code)),
    }


def main(capability: str, *arguments: str) -> None:
    driver.set_active(NoDriver(int(capability)))
    found = compile_instead_of_launching(once="once" in arguments)
    call: Any = call_everything
    for dtype in arguments:
        if dtype == "once":
            continue
        if dtype.startswith("head_dim="):
            call = partial(call_mixers, head_dim=int(dtype.removeprefix("head_dim=")))
            continue
        for batch_invariant in (False, True):
            kernels = CudaKernels(batch_invariant=batch_invariant)
            call(kernels, getattr(torch, dtype), [(5, 1), (600, 1), (9, 1)])
            call(kernels, getattr(torch, dtype), [(0, 40), (600, 1), (3, 20)])
    for name, kernel in found.values():
        print(json.dumps(report(name, kernel)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Digests of all that the CPU kernels compute in some runs: what two ways of compiling them are compared by.

Run as a program, it prints the digest of a model (its number) for kernels that numba has compiled by itself.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from typing import Any

import torch
from tiny_model import CPU, STD, engine_for, random_requests, raw_config, tokens_of
from torch import Tensor

from batchgen.core.records import SamplingParams
from batchgen.kernels.cpu import backend, build, compiler
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.weights import RandomTensors

PAIRED = backend._ATTENTION_KINDS[torch.bfloat16, torch.bfloat16, False]
# dtype, dtype of the weights, kind of the attention, weights, activations, type of keys and values
MODELS: list[tuple[torch.dtype, torch.dtype, str, str, str, str]] = [
    (torch.float32, torch.float32, "float32", "auto", "auto", "auto"),
    (torch.float32, torch.bfloat16, "float32", "int8", "auto", "bfloat16"),
    (torch.float32, torch.bfloat16, "float32", "auto", "int8", "int8"),
    (torch.float32, torch.bfloat16, "float32", "auto", "auto", "auto"),
    (torch.bfloat16, torch.bfloat16, "bfloat16", "int8", "auto", "auto"),
    (torch.bfloat16, torch.bfloat16, PAIRED, "auto", "int8", "int8"),
    (torch.bfloat16, torch.bfloat16, PAIRED, "auto", "auto", "auto"),
]
PARAMS = (
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=1),
    SamplingParams(temperature=0.3, min_p=0.1, repetition_penalty=1.05, seed=2),
    SamplingParams(repetition_penalty=1.1),
)


class Hashed:
    """Kernels whose results are hashed. No ``CpuKernels``, so nothing is recorded and runs after its call."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.digest = hashlib.sha256()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.kernels, name)
        if not callable(found) or name in ("linear", "gated_linear"):
            return found

        def hashed(*arguments: Any, **named: Any) -> Any:
            result = found(*arguments, **named)
            if isinstance(result, Tensor):
                self.digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
            return result

        return hashed


def digest_of(number: int) -> str:
    """Of one of ``MODELS``: long and short prompts, whole and in chunks, and each way to choose a token."""
    torch.set_num_threads(1)
    dtype, stored, attention, weights, activations, kv_cache_dtype = MODELS[number]
    backend._ATTENTION_KINDS[dtype, dtype, False] = attention
    kernels: Any = Hashed(CpuKernels(dtype, weights=weights, activations=activations))
    with torch.inference_mode():
        source = RandomTensors(dtype, CPU, std=STD, saved=stored)
        model = Decoder(parse_config(raw_config(), "tiny"), source, kernels)
    rows = random_requests(8, seed=1, prompt=(1, 40), output=(4, 8)) + random_requests(2, seed=2, prompt=(300, 400))
    requests = [replace(row, key=key) for key, row in enumerate(rows)]
    for params in PARAMS:
        chosen = [replace(row, params=replace(params, max_tokens=row.params.max_tokens)) for row in requests]
        engine = engine_for(
            model, num_blocks=200, block_size=32, max_num_batched_tokens=96, kv_cache_dtype=kv_cache_dtype
        )
        kernels.digest.update(repr(sorted(tokens_of(engine.run(chosen)).items())).encode())
    return str(kernels.digest.hexdigest())


if __name__ == "__main__":
    build.address = compiler.compile_plainly
    print(digest_of(int(sys.argv[1])))

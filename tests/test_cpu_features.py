"""What the CPU can do: one answer for all who ask, and numba's override counts for all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchgen import cpu_features

ASK = """
import torch
from batchgen import plan_kv
from batchgen.kernels.cpu.vector_ir import HAS_BF16
from batchgen.kernels.cpu.matmul import can_multiply
from batchgen.model import load_config, loading
from batchgen.spec_load import load_job

flags = {"model": {"path": "dummy:LFM2-350M", "device": "cpu"}, "input": {"path": ["a"], "prompt": "{a}"}}
spec, config = load_job(None, {**flags, "output": {"path": "b"}}), load_config("dummy:LFM2-350M")
print(HAS_BF16, can_multiply(torch.ones(2, 2, dtype=torch.bfloat16)))
print(str(loading.resolve_dtype("auto", config, torch.device("cpu"))).removeprefix("torch."))
print(plan_kv._guessed_dtype(spec, config))
"""


@pytest.mark.parametrize(
    ("features", "pairs", "matrix", "products"),
    [
        ("+avx2,+fma,-avx512bf16", False, False, False),
        ("+avx512f,+avx512bf16", True, False, True),
        ("+avx512f,+avx512bf16,+amx-bf16", True, True, True),
        ("", False, False, False),
    ],
)
def test_what_numba_is_told_to_compile_for_counts(
    monkeypatch: pytest.MonkeyPatch, features: str, pairs: bool, matrix: bool, products: bool
) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    monkeypatch.setattr(cpu_features, "cpu_features", cpu_features.cpu_features.__wrapped__)
    assert cpu_features.has_bfloat16_pairs() is pairs
    assert cpu_features.has_matrix_unit() is matrix
    assert cpu_features.multiplies_bfloat16() is products


@pytest.mark.parametrize(
    ("features", "found"),
    [("+avx2,+fma", "False False float32 float32"), ("+avx512f,+avx512bf16", "True True bfloat16 bfloat16")],
)
def test_kernels_loader_and_plan_agree_on_the_cpu(features: str, found: str) -> None:
    environment = {**os.environ, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split()) == found

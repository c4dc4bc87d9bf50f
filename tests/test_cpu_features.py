"""What the CPU can do: one answer for all who ask, and numba's override counts for all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
import torch
from batchgen import cpu_features, plan_kv
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
    ("features", "pairs", "panels", "dtype"),
    [
        ("+avx2,+fma,-avx512bf16", False, False, "float32"),
        ("+avx512f,+avx512bf16", True, True, "bfloat16"),
        ("+avx512f,+avx512bf16,+amx-bf16", True, False, "bfloat16"),
        ("", False, False, "float32"),
    ],
)
def test_kernels_loader_and_plan_take_the_cpu_for_what_numba_compiles_for(
    features: str, pairs: bool, panels: bool, dtype: str
) -> None:
    environment = {**os.environ, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(pairs), str(panels), dtype, dtype]

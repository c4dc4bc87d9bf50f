"""What the interpreter cannot show: that the kernels compile for real GPUs, and into what one would write by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repeats import slow

# Looked for, not imported: the other tests need it imported in another mode.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the CUDA kernels are written in Triton, which is not installed"
)

TESTS = Path(__file__).parent.parent
HOPPER_SHARED_BYTES = 227 * 1024  # most that one block may take
SHARED_BYTES = 99 * 1024  # the least that this is on any generation: of smaller cards, 86, 89 and 120
KERNELS = {
    *("add_and_norm", "attend_one_token", "attend_tile", "grouped_matmul", "logsumexp", "mask", "matmul"),
    *("matmul_in_parts", "rms_norm", "rope_and_cache", "sample", "short_conv", "swiglu"),
}
HEAVY = {
    "attend_one_token",
    "attend_tile",
    "grouped_matmul",
    "matmul",
    "matmul_in_parts",
}


def compiled(capability: int, *arguments: str, cache: Path) -> list[dict[str, Any]]:
    """In a process of its own: this one may have Triton set to interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "helpers" / "compile_cuda.py"), str(capability), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "how", [slow(("once", "bfloat16")), pytest.param(("bfloat16",), marks=pytest.mark.nightly)], ids=len
)
def test_every_kernel_compiles_for_hopper_into_matrix_instructions_and_wide_copies(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    binaries = compiled(90, *how, cache=tmp_path)
    assert {b["name"] for b in binaries} == KERNELS
    assert max(b["shared_bytes"] for b in binaries) <= HOPPER_SHARED_BYTES
    assert max(b["stack_bytes"] for b in binaries) <= 32, "registers are not spilled, but for a few"
    heavy = [b for b in binaries if b["name"] in HEAVY]
    assert all(b["wide_copies"] for b in heavy)
    assert {b["name"] for b in heavy if not b["matrix"]} <= {"matmul_in_parts"}, "but for the router's, in float32"


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_kernel_compiles_for_every_dtype_and_generation(capability: int, tmp_path: Path) -> None:
    binaries = compiled(capability, "bfloat16", "float16", "float32", cache=tmp_path)
    assert {b["name"] for b in binaries} == KERNELS
    assert max(b["shared_bytes"] for b in binaries) <= SHARED_BYTES
    fused = {b["fused"] for b in binaries if b["name"] == "rms_norm"}
    assert len(fused) == 1, "a norm is rounded before its residual is added, in every dtype"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [
        *((c, 256, "bfloat16") for c in (86, 89, 90, 100, 120)),
        *((c, 128, "bfloat16") for c in (86, 89, 100, 120)),
        (89, 256, "float32"),
    ],
)
def test_attention_of_wide_heads_fits_in_shared_memory(
    capability: int, head_dim: int, dtype: str, tmp_path: Path
) -> None:
    binaries = compiled(capability, f"head_dim={head_dim}", dtype, cache=tmp_path)
    assert {"attend_one_token", "attend_tile"} <= {b["name"] for b in binaries}
    most = HOPPER_SHARED_BYTES if capability in (90, 100) else SHARED_BYTES
    assert max(b["shared_bytes"] for b in binaries) <= most

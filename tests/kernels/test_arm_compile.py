"""The CPU kernels compile for 64-bit Arm: what can be shown of it on another processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from batchgen.kernels.cpu import kernel_specs

PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_arm.py"
FEATURES = "+neon,+fp-armv8,+lse,+crc"
RESOLVED = {"sqrtf"}  # what the C library of every Linux has


def has_target() -> bool:
    binding.initialize_all_targets()
    try:
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        return False
    return True


def compiled(features: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), features]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.nightly
@pytest.mark.skipif(not has_target(), reason="this LLVM has no target for 64-bit Arm")
@pytest.mark.parametrize(
    ("features", "has_byte_products"),
    [(f"{FEATURES},+dotprod", True), (FEATURES, False)],
    ids=["dotprod", "no dotprod"],
)
def test_every_kernel_compiles_for_64_bit_arm(features: str, has_byte_products: bool) -> None:
    kernels = compiled(features)
    names = {spec.name for spec in vars(kernel_specs).values() if isinstance(spec, kernel_specs.KernelSpec)}
    assert {kernel["name"] for kernel in kernels} == names - (set() if has_byte_products else {"matmul_integers"})
    assert {name for kernel in kernels for name in kernel["calls"]} <= RESOLVED
    products = [kernel for kernel in kernels if "matmul" in kernel["name"]]
    assert all(kernel["fmla"] or kernel["sdot"] for kernel in products)
    assert any(kernel["sdot"] for kernel in kernels) == has_byte_products

"""CPU kernels compiled for processors that need not be here: one with AMX, by tiles, and 64-bit Arm."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from batchgen.kernels.cpu import kernel_specs

FEATURES = "+neon,+fp-armv8,+lse,+crc"
RESOLVED = {"sqrtf"}  # what the C library of every Linux has


def compiled(program: str, *arguments: str) -> list[dict[str, Any]]:
    """What one of the programs among the helpers says of each kernel."""
    path = Path(__file__).parents[1] / "helpers" / f"{program}.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    """The kernels that are made of tiles, for AMX."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this is no x86")
    return {line["name"]: line for line in compiled("compile_amx")}


def test_every_kernel_configures_its_tiles_and_releases_them(kernels: dict[str, dict[str, Any]]) -> None:
    assert kernels.keys() == {"MATMUL_BF16", "MATMUL_BF16_UNPACKED", "MATMUL_INT8", "ATTENTION"}
    for name, kernel in kernels.items():
        assert kernel["calls"] == (["sqrtf"] if name == "ATTENTION" else [])
        assert kernel["ldtilecfg"] >= 1
        assert kernel["tilerelease"] >= 1
        assert kernel["tilezero"] > 0


def test_products_are_made_of_the_instruction_of_their_type(kernels: dict[str, dict[str, Any]]) -> None:
    for name, used, other in (
        ("MATMUL_BF16", "tdpbf16ps", "tdpbsud"),
        ("MATMUL_BF16_UNPACKED", "tdpbf16ps", "tdpbsud"),
        ("MATMUL_INT8", "tdpbsud", "tdpbf16ps"),
        ("ATTENTION", "tdpbf16ps", "vdpbf16ps"),
    ):
        assert kernels[name][used] >= 4
        assert kernels[name][other] == 0
    assert kernels["MATMUL_INT8"]["vpdpbusd"] > 0, "a few rows are multiplied by vectors"


def test_a_loop_over_tiles_holds_little_else_than_their_products(kernels: dict[str, dict[str, Any]]) -> None:
    """For each product of two strips one tile of weights and half a tile of rows is loaded; of four, a quarter."""
    for loop in kernels["MATMUL_BF16"]["loops"]:
        assert loop["tileloadd"] <= 1.5 * loop["tdpbf16ps"]
        assert loop["all"] <= 4.5 * loop["tdpbf16ps"]


def has_target() -> bool:
    binding.initialize_all_targets()
    try:
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        return False
    return True


@pytest.mark.nightly
@pytest.mark.skipif(not has_target(), reason="this LLVM has no target for 64-bit Arm")
@pytest.mark.parametrize(
    ("features", "has_byte_products"),
    [(f"{FEATURES},+dotprod", True), (FEATURES, False)],
    ids=["dotprod", "no dotprod"],
)
def test_every_kernel_compiles_for_64_bit_arm(features: str, has_byte_products: bool) -> None:
    kernels = compiled("compile_arm", features)
    names = {spec.name for spec in vars(kernel_specs).values() if isinstance(spec, kernel_specs.KernelSpec)}
    assert {kernel["name"] for kernel in kernels} == names - (set() if has_byte_products else {"matmul_integers"})
    assert {name for kernel in kernels for name in kernel["calls"]} <= RESOLVED
    products = [kernel for kernel in kernels if "matmul" in kernel["name"]]
    assert all(kernel["fmla"] or kernel["sdot"] for kernel in products)
    assert any(kernel["sdot"] for kernel in kernels) == has_byte_products

"""The CPU kernels that are made of tiles compile for AMX: what can be shown of them on a processor without it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "compile_amx.py"


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this is no x86")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


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

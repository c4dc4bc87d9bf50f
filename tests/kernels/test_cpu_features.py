"""What the CPU can do: one answer for all who ask, and numba's settings count for all of them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from llvmlite import binding
from repeats import slow

from batchgen.core.errors import ModelError
from batchgen.kernels import processor
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.kernel_specs import attention_kind
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.processor import processor_variant
from batchgen.model import load as loading
from batchgen.model.load import load_model

ASK = """
import torch
from batchgen.kernels.cpu.compiled.emit import HAS_BF16
from batchgen.model import load
from batchgen.model.registry import load_config

config = load_config("dummy:LFM2-350M")
print(HAS_BF16)
print(str(load.resolve_dtype("auto", config, torch.device("cpu"))).removeprefix("torch."))
print(config.auto_dtype(is_cpu=True))
"""
MULTIPLY = """
import torch
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.kernel_specs import attention_kind

kernels = CpuKernels()
x = torch.ones(4, 8, dtype=torch.bfloat16)
print(float(kernels.linear(torch.ones(8, 8, dtype=torch.bfloat16))(x)[3, 7]))
"""


ALL = "+avx512f,+avx512bf16,+amx-tile,+amx-bf16"


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are kept for the process otherwise."""
    monkeypatch.setattr(processor, "cpu_features", processor.cpu_features.__wrapped__)
    monkeypatch.setattr(processor, "target", processor.target.__wrapped__)
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("features", "pairs", "matrix", "products"),
    [
        ("+avx2,+fma,-avx512bf16", False, False, False),
        ("+avx512f,+avx512bf16", True, False, True),
        (ALL, True, True, True),
        ("", False, False, False),
    ],
)
def test_what_numba_is_told_to_compile_for_counts(
    monkeypatch: pytest.MonkeyPatch, features: str, pairs: bool, matrix: bool, products: bool
) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    monkeypatch.setattr(processor, "tiles_obstacle", lambda: "")
    assert processor.has_bfloat16_pairs() is pairs
    assert processor.has_matrix_unit("bf16") is matrix
    assert not processor.has_matrix_unit("int8")
    assert processor.multiplies_bfloat16() is products


@pytest.mark.parametrize(
    ("machine", "features", "activations", "why"),
    [
        ("x86_64", "+sse2,+avx", "auto", r"\(FMA\).*; unset NUMBA_CPU_FEATURES$"),
        ("x86_64", "+fma", "int8", "cannot multiply bytes.*omit it"),
        ("aarch64", "", "int8", "cannot multiply bytes"),
        ("x86_64", "+fma", "auto", ""),
        ("arm64", "", "auto", ""),
    ],
)
def test_a_processor_that_kernels_cannot_run_on_is_refused_in_a_line(
    machine: str, features: str, activations: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "Decoder", lambda *_: None)
    monkeypatch.setattr(loading.build, "start", lambda *_: None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    quantization = "w8a8" if activations == "int8" else "none"
    with pytest.raises(ModelError, match=why) if why else nullcontext():
        load_model("dummy:LFM2-350M", dtype="float32", quantization=quantization)


def test_vectors_that_numba_is_told_to_leave_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def host() -> binding.FeatureMap:
        return binding.FeatureMap({"avx2": True, "avx512bf16": True, "sse2": True, "fma": False})

    monkeypatch.setattr(binding, "get_host_cpu_features", host)
    monkeypatch.setenv("NUMBA_ENABLE_AVX", "1")
    assert processor.cpu_features() == {"avx2", "avx512bf16", "sse2"}
    monkeypatch.setenv("NUMBA_ENABLE_AVX", "0")
    assert processor.cpu_features() == {"sse2"}


def test_a_system_whose_cpu_llvm_cannot_tell_has_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> binding.FeatureMap:
        raise RuntimeError("getHostCPUFeatures() failed")

    monkeypatch.setattr(binding, "get_host_cpu_features", fail)
    assert processor.cpu_features() == frozenset()
    assert processor_variant()


def printed(code: str, **settings: str) -> str:
    """The words that a program prints under such settings."""
    command, environment = [sys.executable, "-c", code], {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    return " ".join(done.stdout.split())


AS_NUMBA = """
from batchgen.kernels.processor import target
ours = target()
import sys
assert "numba" not in sys.modules, "found without numba"
from numba.core import registry
codegen = registry.cpu_target.target_context.codegen()
assert ours == (codegen._get_host_cpu_name(), codegen._get_host_cpu_features()), ours
"""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        slow({"NUMBA_CPU_NAME": "generic"}),
        slow({"NUMBA_CPU_NAME": "haswell"}),
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
        slow({"NUMBA_CPU_NAME": "sandybridge"}),
        {"NUMBA_ENABLE_AVX": "0"},
    ],
)
def test_kernels_are_compiled_for_what_numba_would_compile_for(settings: dict[str, str]) -> None:
    assert printed(AS_NUMBA, **settings) == ""


@pytest.mark.parametrize(
    ("cpu", "features", "units", "attention"),
    [
        ("sapphirerapids", ALL, "-bf16-intel-amx-attention", "bf16_tiles"),
        ("cooperlake", "+avx512f,+avx512bf16", "-bf16-intel", "bfloat16"),
        ("znver4", "+avx512f,+avx512bf16", "-bf16", "bf16_pairs"),
        ("znver3", "+sse2,+avx2", "", "bfloat16"),
        ("generic", "", "", "bfloat16"),
    ],
)
def test_the_variant_names_the_units_that_kernels_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch, cpu: str, features: str, units: str, attention: str
) -> None:
    """Attention multiplies pairs of bfloat16 only where that is faster."""
    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    monkeypatch.setattr(processor, "tiles_obstacle", lambda: "")
    vectors = torch.backends.cpu.get_cpu_capability().lower()
    assert processor_variant().endswith(f"{vectors}{units}")
    assert attention_kind("bfloat16", "auto", is_whole=True) == attention
    assert attention_kind("bfloat16", "auto", is_whole=False) == attention.replace("bf16_tiles", "bfloat16")


def test_the_variant_of_plain_torch_names_gpu_and_cublas_only_where_the_model_runs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    assert PlainKernels().variant == PlainKernels(torch.device("cpu")).variant == processor_variant("padded")
    on_gpu = PlainKernels(torch.device("cuda", 0)).variant
    assert on_gpu == f"{processor_variant('padded')}-cublas-NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"NUMBA_CPU_FEATURES": "+avx2,+fma"}, "False float32 float32"),
        slow({"NUMBA_CPU_FEATURES": "+avx512f,+avx512bf16"}, "True bfloat16 bfloat16"),
        slow({"NUMBA_CPU_NAME": "generic"}, "False float32 float32"),
    ],
)
def test_kernels_loader_and_plan_agree_on_the_cpu(settings: dict[str, str], found: str) -> None:
    assert printed(ASK, **settings) == found


@pytest.mark.parametrize("setting", ["NUMBA_CPU_FEATURES=+avx2,+fma", slow("NUMBA_ENABLE_AVX=0")])
def test_kernels_compile_for_less_than_the_cpu_can_do(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    assert printed(MULTIPLY, **{name: value}, XDG_CACHE_HOME=str(tmp_path)) == "8.0"


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (0, ""),
        (errno.EINVAL, "older than 5.16"),
        (errno.ENOSPC, "signal stack is too small"),
        (errno.EPERM, "allow arch_prctl in the container"),
        (errno.ENOSYS, "allow arch_prctl in the container"),
    ],
)
def test_a_matrix_unit_that_linux_refuses_is_left_with_a_line(
    number: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    class Library:
        """The C library of a system that answers with an error's number."""

        def syscall(self, *words: int) -> int:
            asked.append(words)
            ctypes.set_errno(number)
            return -1 if number else 0

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    monkeypatch.setattr(processor, "tiles_obstacle", lru_cache(processor.tiles_obstacle.__wrapped__))
    monkeypatch.setenv("NUMBA_CPU_FEATURES", ALL)
    assert processor.has_matrix_unit("bf16") is (number == 0)
    assert why in processor.matrix_unit_note()
    assert bool(CpuKernels(torch.bfloat16).notes) is (number != 0)
    assert asked == [(158, 0x1023, 18)], "once for a process"


def test_a_processor_without_a_matrix_unit_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma")
    monkeypatch.setattr(processor, "tiles_obstacle", lambda: pytest.fail("it asked"))
    assert processor.matrix_unit_note() == ""
    assert not processor.has_matrix_unit("bf16")

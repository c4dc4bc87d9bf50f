"""The short way to compile gives the same bits as numba's own, is taken, and is left where numba is another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_bits
import numpy as np
import pytest
import torch
from numba.core.codegen import JITCodeLibrary

from batchgen.kernels.cpu import backend, build, compiler, object_cache
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.compiled.entry import kernel
from batchgen.kernels.cpu.kernel_specs import ARGMAX, ATTENTION, KernelSpec
from batchgen.kernels.cpu.parallel import Kernel


@kernel(out=np.float64)
def draw(item: Any, out: Any) -> None:
    """Calls a function of numba's own, which kernels do not."""
    out[item] = 2.0 + np.random.random()


DRAW = KernelSpec(__name__, "draw", {"any": ()})


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_addresses", {})
    return tmp_path


def greatest(kernel: Kernel) -> list[int]:
    x, out = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64)
    kernel.launch(torch.float32, 1, x.data_ptr(), out.data_ptr(), 3)
    return out.tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(kernel_bits.MODELS)))
def test_the_short_way_gives_the_bits_of_numbas_own(
    number: int, threads_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_ATTENTION_KINDS", {**backend._ATTENTION_KINDS})
    command = [sys.executable, kernel_bits.__file__, str(number)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    plainly = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert plainly.stdout.strip() == kernel_bits.digest_of(number)


@pytest.mark.slow
def test_the_short_way_gives_small_kernels_the_bits_of_numbas_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.linspace(-3, 5, 900).sin().view(9, 100), []
    for address in (build.address, compiler.compile_plainly):
        monkeypatch.setattr(build, "address", address)
        for name in ("_RMS_NORM", "_LOGSUMEXP", "_ARGMAX"):
            monkeypatch.setattr(backend, name, Kernel(getattr(backend, name)._spec))
        kernels = CpuKernels(torch.float32)
        found.append([kernels.rms_norm(x, x[0], 1e-5), kernels.logsumexp(x), kernels.argmax(x)])
    assert all(map(torch.equal, *found))


def test_inner_functions_get_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("numba makes machine code of a part")

    compiler.prepare([ATTENTION.module])
    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", refuse)
    assert compiler.machine_code(ATTENTION, "float32")


def test_another_numba_compiles_in_its_own_way(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    def changed(*_: object) -> bytes:
        raise AttributeError("'CPUContext' object has no attribute '_internal_codegen'")

    monkeypatch.setattr(compiler, "machine_code", changed)
    assert greatest(Kernel(ARGMAX)) == [1]
    assert not list(empty_cache.rglob("*.o")), "what needs numba is not kept"


def test_after_an_error_numba_compiles_as_before() -> None:
    with pytest.raises(Exception, match="no attribute"):
        compiler.machine_code(KernelSpec(ARGMAX.module, "none", {"any": ()}), "any")
    compiler.compile_plainly(ARGMAX, "float32")
    assert greatest(Kernel(ARGMAX)) == [1]


@pytest.mark.slow
def test_a_kernel_that_needs_numba_to_run_is_not_kept(empty_cache: Path) -> None:
    with pytest.raises(NotImplementedError, match="calls of numba_"):
        compiler.machine_code(DRAW, "any")
    out = torch.zeros(1, dtype=torch.float64)
    Kernel(DRAW).launch("any", 1, out.data_ptr())
    assert 2.0 <= out.item() < 3.0
    assert not list(empty_cache.rglob("*.o"))


@pytest.mark.slow
def test_kernels_and_code_of_others_that_numba_compiles_do_not_disturb_each_other() -> None:
    from numba import njit

    def longest(a: float, b: float) -> float:
        return max(a, b) + max(len(range(3)), 2)

    assert njit(longest)(np.float32(1.0), np.float32(2.0)) == 5.0
    assert object_cache.load(compiler.machine_code(ARGMAX, "float32"))
    assert njit(lambda a, b: max(a, b) * 2)(np.float32(1.0), np.float32(2.0)) == 4.0
    assert greatest(Kernel(ARGMAX)) == [1]

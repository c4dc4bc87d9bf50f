"""The short way to compile gives the same bits as numba's own, is taken, and is left where numba is another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.codegen import JITCodeLibrary
from tiny_model import CPU, STD, engine_for, random_requests, raw_config

from batchgen.core.records import SamplingParams
from batchgen.engine.invariants import LogitsRecorder, Trace
from batchgen.kernels.cpu import backend, build, compiler, experts, linear, object_cache
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.compiled.entry import kernel
from batchgen.kernels.cpu.kernel_specs import ARGMAX, RMS_NORM, KernelSpec
from batchgen.kernels.cpu.parallel import Kernel
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.weights import RandomTensors


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


def traced(dtype: torch.dtype, stored: torch.dtype, weights: str, activations: str, kv_cache_dtype: str) -> Trace:
    """Tokens and logits of long and short prompts, whole and in chunks, and each way to choose a token."""
    kernels = CpuKernels(dtype, weights=weights, activations=activations)
    with torch.inference_mode():
        model = Decoder(parse_config(raw_config(), "tiny"), RandomTensors(dtype, CPU, std=STD, saved=stored), kernels)
    rows = random_requests(8, seed=1, prompt=(1, 40), output=(4, 8)) + random_requests(2, seed=2, prompt=(300, 400))
    sizes = {"num_blocks": 200, "block_size": 32, "max_num_batched_tokens": 96, "kv_cache_dtype": kv_cache_dtype}
    trace = Trace()
    for number, params in enumerate(PARAMS):
        chosen = [
            replace(row, key=100 * number + key, params=replace(params, max_tokens=row.params.max_tokens))
            for key, row in enumerate(rows)
        ]
        trace.add(engine_for(model, parts={"sampler": LogitsRecorder}, **sizes), chosen)
    return trace


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twice: with kernels that are compiled the short way, then with those that numba compiles by itself."""

    def ways() -> Iterator[None]:
        kernels = [value for room in (backend, experts, linear) for value in vars(room).values()]
        for address in (build.address, compiler.compile_plainly):
            monkeypatch.setattr(build, "address", address)
            for each in (*kernels, *linear._TILED.values()):
                if isinstance(each, Kernel):
                    monkeypatch.setattr(each, "_addresses", {})
            yield

    return ways()


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_short_way_gives_the_bits_of_numbas_own(
    model: tuple[Any, ...], both_ways: Iterator[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, stored, attention, *forms = model
    monkeypatch.setitem(backend._ATTENTION_KINDS, (dtype, dtype, False), attention)
    short, plain = (traced(dtype, stored, *forms) for _ in both_ways)
    assert (short.tokens, short.digest) == (plain.tokens, plain.digest)


@pytest.mark.slow
def test_the_short_way_gives_small_kernels_the_bits_of_numbas_own(both_ways: Iterator[None]) -> None:
    x, kernels = torch.linspace(-3, 5, 900).sin().view(9, 100), CpuKernels(torch.float32)
    found = [[kernels.rms_norm(x, x[0], 1e-5), kernels.logsumexp(x), kernels.argmax(x)] for _ in both_ways]
    assert all(map(torch.equal, *found))


def test_inner_functions_get_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("numba makes machine code of a part")

    compiler.prepare([RMS_NORM.module])
    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", refuse)
    assert compiler.machine_code(RMS_NORM, "float32")


def test_no_float_operation_may_be_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(JITCodeLibrary, "_optimize_final_module", lambda self: written.append(str(self._final_module)))
    compiler.machine_code(RMS_NORM, "float32")
    assert "fadd " in written[-1] and " fast " not in written[-1]


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
    assert not list(empty_cache.rglob("draw*.o"))


@pytest.mark.slow
def test_kernels_and_code_of_others_that_numba_compiles_do_not_disturb_each_other() -> None:
    from numba import njit

    def longest(a: float, b: float) -> float:
        return max(a, b) + max(len(range(3)), 2)

    assert njit(longest)(np.float32(1.0), np.float32(2.0)) == 5.0
    assert object_cache.load(compiler.machine_code(ARGMAX, "float32"))
    assert njit(lambda a, b: max(a, b) * 2)(np.float32(1.0), np.float32(2.0)) == 4.0
    assert greatest(Kernel(ARGMAX)) == [1]

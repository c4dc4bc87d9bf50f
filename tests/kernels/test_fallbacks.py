"""What stands in where a machine lacks something: torch's OpenMP, packed linears."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import onednn_linear
from tiny_model import DTYPES, engine_for, random_requests, solo, tiny_model, tokens_of

from batchgen.kernels.cpu import backend, parallel
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.cpu.linear import OneDnnLinear
from batchgen.kernels.reference import ReferenceKernels
from batchgen.kernels.select import select


@pytest.fixture
def without_openmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parallel._Torch, "multiplies", True)
    monkeypatch.setattr(parallel, "openmp", lambda: None)
    parallel._launcher.cache_clear()
    torch.set_num_threads(2)
    yield
    monkeypatch.undo()
    parallel._launcher.cache_clear()


@pytest.mark.usefixtures("without_openmp")
def test_a_pool_gives_the_same_bits_as_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(100, 40), torch.randn(40)
    by_pool = [CpuKernels().rms_norm(x, weight, 1e-5) for _ in range(20)]
    monkeypatch.undo()
    parallel._Torch.multiplies = True
    parallel._launcher.cache_clear()
    by_openmp = CpuKernels().rms_norm(x, weight, 1e-5)
    parallel._Torch.multiplies = False
    assert all(torch.equal(y, by_openmp) for y in by_pool)


@pytest.mark.usefixtures("without_openmp")
def test_an_error_free_run_without_openmp_gives_the_same_tokens() -> None:
    model, requests = tiny_model(), random_requests(4, seed=1)
    engine = engine_for(model, num_blocks=30, block_size=7, max_num_batched_tokens=12)
    assert tokens_of(engine.run(requests)) == solo(model, requests)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_of_onednn_batch_as_they_run_alone(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_linear(torch.zeros(16, 16, dtype=DTYPES[dtype]))
    monkeypatch.setattr(backend, "leaves_products_to_onednn", lambda *_: True)
    model, requests = tiny_model(DTYPES[dtype]), random_requests(8, seed=1)
    assert isinstance(model.lm_head, OneDnnLinear)
    engine = engine_for(model, num_blocks=30, block_size=5, max_num_batched_tokens=23, max_num_seqs=6)
    assert tokens_of(engine.run(requests)) == solo(model, requests)


def test_the_fast_back_end_is_chosen_where_it_runs() -> None:
    cpu = torch.device("cpu")
    assert isinstance(select(cpu, torch.bfloat16), CpuKernels)
    assert isinstance(select(cpu, torch.float32), CpuKernels)
    assert isinstance(select(cpu, torch.float16), ReferenceKernels)
    assert isinstance(select(torch.device("meta"), torch.bfloat16), ReferenceKernels)


def test_float16_runs_on_the_reference_kernels() -> None:
    model, requests = tiny_model(torch.float16), random_requests(3, seed=1)
    assert isinstance(model.kernels, ReferenceKernels)
    assert tokens_of(engine_for(model, num_blocks=60, block_size=8).run(requests)) == solo(model, requests)


@pytest.mark.parametrize("dtype", DTYPES)  # bfloat16 may run recorded steps
def test_engines_in_two_threads_do_not_disturb_each_other(dtype: str) -> None:
    model, requests = tiny_model(DTYPES[dtype]), random_requests(8, seed=2)
    expected = solo(model, requests)
    found: list[dict[int, tuple[int, ...]]] = []

    def run() -> None:
        for _ in range(3):
            engine = engine_for(model, num_blocks=60, block_size=8, max_num_batched_tokens=24)
            found.append(tokens_of(engine.run(requests)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6

"""The choice of a back end, and engines that share it."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_model import DTYPES, engine_for, random_requests, solo, tiny_model, tokens_of

from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.select import select


def test_the_fast_back_end_is_chosen_where_it_runs() -> None:
    cpu = torch.device("cpu")
    assert isinstance(select(cpu, torch.bfloat16), CpuKernels)
    assert isinstance(select(cpu, torch.float32), CpuKernels)
    assert isinstance(select(torch.device("meta"), torch.bfloat16), PlainKernels)


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

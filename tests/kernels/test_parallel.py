"""Work is shared out so that every item is done once, whoever does it and however it is cut into ranges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels.cpu import parallel
from batchgen.kernels.cpu.compiled import simd
from batchgen.kernels.cpu.compiled.work import next_item, worker_number
from batchgen.kernels.cpu.layout import ARGS, NUM_ITEMS
from batchgen.kernels.cpu.parallel import Kernel
from batchgen.kernels.cpu.sources import Source

pytestmark = pytest.mark.usefixtures("threads_as_before")


@simd.jit
def count(words: Any) -> None:
    """Counts, for each item and for each worker, how often it came."""
    worker = worker_number(words)
    done, workers = simd.pointer(words[ARGS], simd.F32), simd.pointer(words[ARGS + 1], simd.F32)
    workers[worker] += 1
    item = next_item(words, worker)
    while item < words[NUM_ITEMS]:
        done[item] += 1
        item = next_item(words, worker)


COUNT = Kernel(Source(__name__, "count", {"float32": ()}))


@pytest.mark.parametrize("by_python", [False, True])
@settings(max_examples=60, deadline=None)
@given(items=st.integers(0, 40), threads=st.integers(1, 4), ranges=st.none() | st.integers(1, 7))
def test_every_item_is_done_once_and_workers_have_numbers_of_their_own(
    by_python: bool, items: int, threads: int, ranges: int | None
) -> None:
    torch.set_num_threads(threads)
    done, workers = torch.zeros(41), torch.zeros(5)
    with pytest.MonkeyPatch.context() as patch:
        if by_python:
            plain = parallel._python_launch(), 0
            patch.setattr(parallel, "_launcher", lambda: plain)
        COUNT.launch(torch.float32, items, done.data_ptr(), workers.data_ptr(), num_ranges=ranges)
    assert done[:items].eq(1).all()
    assert not done[items:].any()
    num_workers = min(items, threads)
    assert workers[:num_workers].eq(1).all()


def test_threads_that_ask_at_once_are_given_the_same_scratch() -> None:
    sizes = range(1000, 1200)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [parallel.scratch(size) for size in sizes], range(4)))
    assert all(each == found[0] for each in found)
    assert found[0] == [parallel.scratch(size) for size in sizes], "what was given out once stays there"

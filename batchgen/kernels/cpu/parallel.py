"""Runs kernels on every thread of torch's own OpenMP pool, and records their launches.

Torch's linears and these kernels alternate many hundred times per step. A second thread pool (numba's own)
would fight torch's spinning workers for the same cores, so kernels are started through ``GOMP_parallel`` of
the very OpenMP runtime that torch has loaded: the workers are already awake and no core is shared.
Without that symbol, plain Python threads run them; ctypes releases the GIL.

A kernel is a C function of one pointer to int64 words, which ``Kernel.launch`` lays out: from ``ARGS`` on they are
addresses and sizes as the kernel defines them. Its items are cut into ranges, and a worker begins with its own: where
items are rows, or in their order, that is the same part of them in one kernel after the other, and what a worker wrote
is in its own cache. Then it helps the others.
Work is taken item by item, so no result may depend on which worker computes it.

Between two kernels that stream weights through every cache, each launch costs Python some 20 microseconds, over a
hundred times per step: a seventh of the time of a single sequence. Where a step does what an earlier one did (every
sequence has one token, and there are as many), a ``Recorder`` repeats the launches on the same memory without Python.
Launches run in order, so memory that one no longer needs serves a later one at once, as Python's references tell while
recording; replays then do the same.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from batchgen.kernels.cpu import build
from batchgen.kernels.cpu.layout import RANGES
from batchgen.kernels.cpu.sources import Source

LAUNCHING = threading.Lock()  # engines in several threads share the workers and their scratch memory

Launch = Callable[[int, int, int], None]
Kind = torch.dtype | str  # of a kernel: the dtype that names it, or another name in ``Source.kinds``


def address(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory."""
    assert tensor.is_contiguous(), "kernels read memory in order"
    return tensor.data_ptr()


_SCRATCH: dict[int, torch.Tensor] = {}


def scratch(num_floats: int) -> int:
    """Address of scratch memory for all workers, which is never freed (kernels run one at a time)."""
    found = _SCRATCH.get(num_floats)
    if found is None:  # two threads may come here at once: setdefault gives both the same
        found = _SCRATCH.setdefault(num_floats, torch.empty(num_floats))
    return found.data_ptr()


Launched = tuple[int, "array[int]", int]  # function, words, number of workers


class Allocator(Protocol):
    """Where results lie while a step is recorded."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""


class CaptureHook(threading.local):
    """Takes the calling thread's launches and allocates their results while a step is recorded.

    Per thread, not an argument: the model is called between the recorder and a launch, and knows of neither.
    """

    launches: list[Launched] | None = None  # None: launches run at once
    memory: Allocator | None = None


CAPTURE = CaptureHook()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel's result."""
    memory = CAPTURE.memory
    return torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)


class Kernel:
    """A kernel in its kinds, each compiled before its first launch, unless an earlier process has done so."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._addresses: dict[Kind, int] = {}

    def address(self, kind: Kind) -> int:
        """The address of its function."""
        if kind not in self._addresses:
            self._addresses[kind] = build.address(self._source, str(kind).removeprefix("torch."))
        return self._addresses[kind]

    def launch(self, kind: Kind, num_items: int, *arguments: int, num_ranges: int | None = None) -> None:
        """Run all items, on torch's number of threads; returns when the last is done (or ``CaptureHook`` has them).

        Items are cut into as many ranges as there are workers, or ``num_ranges``. A step launches a hundred times,
        with the interpreter out of all caches: every line here counts.
        """
        if not num_items:
            return
        workers = min(num_items, torch.get_num_threads())
        ranges = num_ranges or workers
        launch, numbering = _launcher()
        words = array("q", (0, numbering, num_items, workers, ranges, 0, *arguments, *(0,) * ranges))
        at, size = words.buffer_info()
        words[RANGES] = at + (size - ranges) * words.itemsize
        code = self._addresses.get(kind) or self.address(kind)
        if CAPTURE.launches is not None:
            CAPTURE.launches.append((code, words, workers))
            return
        with LAUNCHING:
            launch(code, at, workers)


@lru_cache(maxsize=1)
def _launcher() -> tuple[Launch, int]:
    """How to run ``(function, data, threads)``, and the address of the function that numbers the threads, or 0."""
    found = openmp()
    if found is None:
        return _python_launch(), 0
    start = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(found[0])
    return lambda function, data, threads: start(function, data, threads, 0), found[1]


@lru_cache(maxsize=1)
def openmp() -> tuple[int, int] | None:
    """Addresses of ``GOMP_parallel`` and ``omp_get_thread_num`` of torch's OpenMP runtime; None where it has none."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    for name in [*map(str, bundled), None]:
        try:
            library = ctypes.CDLL(name)
            found = library.GOMP_parallel, library.omp_get_thread_num
        except (OSError, AttributeError, TypeError):
            continue
        start, numbering = (ctypes.cast(function, ctypes.c_void_p).value for function in found)
        if start and numbering:
            return start, numbering
    return None


def _python_launch() -> Launch:
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="batchgen-kernel")
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def launch(function: int, data: int, threads: int) -> None:
        call = prototype(function)
        pending = [pool.submit(call, data) for _ in range(threads - 1)]
        call(data)
        for future in pending:
            future.result()

    return launch

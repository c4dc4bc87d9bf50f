"""Compiles kernels on first use, runs them on every thread of torch's own OpenMP pool, and records their launches.

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
import hashlib
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import cfunc, types

from batchgen.kernels.cpu.simd import call, call_with, fetch_add, jit, pointer

# Words before a kernel's own arguments: a counter of workers, the address of the runtime's function that numbers them
# (0 without one: then they count), the number of items, of workers and of ranges, the address of the ranges' counters.
_COUNTER, _NUMBERING, NUM_ITEMS, NUM_WORKERS, _NUM_RANGES, _RANGES = range(6)
ARGS = 6  # index of a kernel's first own argument
SIGNATURE = types.void(types.CPointer(types.int64))

LAUNCHING = threading.Lock()  # engines in several threads share the workers and their scratch memory

Launch = Callable[[int, int, int], None]


@jit
def next_item(words, worker):
    """Take the next work item, from the worker's own range while there are any; ``NUM_ITEMS`` when none is left."""
    num_items, num_ranges = words[NUM_ITEMS], words[_NUM_RANGES]
    taken = pointer(words[_RANGES], np.int64)
    for other in range(num_ranges):
        place = (worker * num_ranges // words[NUM_WORKERS] + other) % num_ranges
        first, end = place * num_items // num_ranges, (place + 1) * num_items // num_ranges
        if first + taken[place] < end:
            item = first + fetch_add(taken, place, 1)
            if item < end:
                return item
    return num_items


@jit
def worker_number(words):
    """The calling worker's number, from 0: the key to its own scratch memory and its range."""
    return call(words[_NUMBERING]) if words[_NUMBERING] else fetch_add(words, _COUNTER, 1)


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


class CaptureHook(threading.local):
    """Takes the calling thread's launches and allocates their results while a step is recorded.

    Per thread, not an argument: the model is called between the recorder and a launch, and knows of neither.
    """

    launches: list[Launched] | None = None  # None: launches run at once
    memory: Memory | None = None


_CAPTURE = CaptureHook()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel's result."""
    memory = _CAPTURE.memory
    return torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)


class Kernel:
    """A kernel in its element types, each compiled when first launched and cached on disk."""

    def __init__(self, *, bf16: Callable[..., None], f32: Callable[..., None] | None = None) -> None:
        self._sources = {torch.bfloat16: bf16} | ({torch.float32: f32} if f32 else {})
        self._compiled: dict[torch.dtype, Any] = {}
        self._addresses: dict[torch.dtype, int] = {}

    def compile(self, dtype: torch.dtype) -> Any:
        if dtype not in self._compiled:
            with _cache_folder() as usable:
                self._compiled[dtype] = self._compile(dtype, cache=usable)
            self._addresses[dtype] = self._compiled[dtype].address
        return self._compiled[dtype]

    def _compile(self, dtype: torch.dtype, *, cache: bool) -> Any:
        try:
            return cfunc(SIGNATURE, cache=cache)(self._sources[dtype])
        except OSError:
            if not cache:
                raise
            return self._compile(dtype, cache=False)  # such as a full disk, which must not stop a run

    def launch(self, dtype: torch.dtype, num_items: int, *arguments: int, num_ranges: int | None = None) -> None:
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
        words[_RANGES] = at + (size - ranges) * words.itemsize
        code = self._addresses.get(dtype) or self.compile(dtype).address
        if _CAPTURE.launches is not None:
            _CAPTURE.launches.append((code, words, workers))
            return
        with LAUNCHING:
            launch(code, at, workers)


def keeps_kernels() -> bool:
    """Whether compiled kernels can be written to disk for the next process."""
    with _cache_folder() as usable:
        return usable


@contextmanager
def _cache_folder() -> Iterator[bool]:
    """Point numba's disk cache at the user's cache folder; yields whether it can be written.

    Numba keys a cached function on its own file alone, so a change in a module it calls would go unseen:
    the folder is named after the content of all modules here.
    """
    settings: Any = numba.config
    before = settings.CACHE_DIR
    try:
        folder = _source_keyed_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        yield False
        return
    settings.CACHE_DIR = str(folder)
    try:
        yield os.access(folder, os.W_OK)
    finally:
        settings.CACHE_DIR = before


@lru_cache(maxsize=1)
def _source_keyed_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return root / "batchgen" / f"kernels-{digest.hexdigest()[:16]}"


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


def _run_all(words: Any) -> None:
    """Compiled: arguments are the address of ``GOMP_parallel``, a count, and as many (function, words, workers)."""
    for i in range(words[1]):
        call_with(words[0], words[2 + 3 * i], words[3 + 3 * i], words[4 + 3 * i])


_LEAST_BYTES = 1 << 16  # of a buffer: sizes vary from step to step, and few buffers are to serve them all
_RUN_ALL = Kernel(bf16=_run_all)


class Memory:
    """Buffers for results; each belongs to a tensor until that is dropped."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, Callable[[], object]]] = []  # with a weak reference to its tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape. It must not be dropped while a view of it is still to be read."""
        size = torch.Size(shape).numel() * dtype.itemsize
        free = [i for i, (buffer, user) in enumerate(self._buffers) if user() is None and len(buffer) >= size]
        if not free:
            free = [len(self._buffers)]
            capacity = 1 << max(size - 1, _LEAST_BYTES - 1).bit_length()
            self._buffers.append((torch.empty(capacity, dtype=torch.uint8), lambda: None))
        best = min(free, key=lambda i: len(self._buffers[i][0]))
        buffer = self._buffers[best][0]
        tensor = buffer[:size].view(dtype).view(*shape)
        self._buffers[best] = buffer, weakref.ref(tensor)
        return tensor

    def holding(self, at: int) -> torch.Tensor:
        """The buffer that begins at an address."""
        return next(buffer for buffer, _ in self._buffers if buffer.data_ptr() == at)


class Program:
    """Launches to repeat by ``GOMP_parallel`` (its address is ``start``): only the contents of memory change."""

    def __init__(self, launches: Sequence[Launched], start: int) -> None:
        self._fresh = np.concatenate([np.asarray(words) for _, words, _ in launches])
        self._words = np.empty_like(self._fresh)
        table, at = [start, len(launches)], 0
        for code, words, workers in launches:
            address = self._words.ctypes.data + at * words.itemsize
            self._fresh[at + _RANGES] = address + (len(words) - words[_NUM_RANGES]) * words.itemsize
            table += [code, address, workers]
            at += len(words)
        self._table = array("q", table)
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_RUN_ALL.compile(torch.bfloat16).address)

    def run(self) -> None:
        with LAUNCHING:
            self._words[:] = self._fresh  # kernels count in them
            self._run(self._table.buffer_info()[0])


class Recorder:
    """``kernels.interface.Recorder`` of launches; ``start`` is the address of ``GOMP_parallel``."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._memory = Memory()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        launches: list[Launched] = []
        _CAPTURE.launches, _CAPTURE.memory = launches, self._memory
        try:
            result = work()
        finally:
            _CAPTURE.launches = _CAPTURE.memory = None
        program, shape, dtype = Program(launches, self._start), result.shape, result.dtype
        # Not the result itself: its memory may serve later recordings too, since a replay writes it anew.
        memory = self._memory.holding(result.data_ptr())[: result.nbytes]
        program.run()

        def replay() -> torch.Tensor:
            program.run()
            return memory.view(dtype).view(shape)

        return result, replay

"""Compiles kernels on first use and runs them on every thread of torch's own OpenMP pool.

Torch's linears and these kernels alternate many hundred times a step. A second thread pool (numba's own)
would fight torch's spinning workers for the same cores, so kernels are started through ``GOMP_parallel`` of
the very OpenMP runtime that torch has loaded: the workers are already awake and no core is shared.
Where that symbol is not to be had, plain Python threads do it; ctypes releases the GIL.

A kernel is a C function of one pointer to int64 words: word 0 is the next work item (taken atomically), word 1
hands out worker numbers, word 2 is the number of items, and from ``ARGS`` on stand addresses and sizes as the
kernel defines them. Work is taken item by item, so no result may depend on which worker computes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import torch
from numba import cfunc, types

from batchgen.kernels.cpu.simd import fetch_add, jit

ARGS = 3  # index of a kernel's first own argument
SIGNATURE = types.void(types.CPointer(types.int64))

_LAUNCHING = threading.Lock()  # engines in several threads share the workers and their scratch memory

Launch = Callable[[int, int, int], None]


@jit
def next_item(words):
    """Take the next work item; at or past ``words[2]`` there is none left."""
    return fetch_add(words, 0, 1)


@jit
def worker_number(words):
    """The calling worker's number, from 0: the key to its own scratch memory."""
    return fetch_add(words, 1, 1)


@lru_cache(maxsize=8)
def scratch(num_floats: int) -> torch.Tensor:
    """Scratch memory for all workers, kept between launches (kernels run one at a time)."""
    return torch.empty(num_floats, dtype=torch.float32)


class Kernel:
    """A kernel in its element types, each compiled when first launched and cached on disk."""

    def __init__(self, *, bf16: Callable[..., None], f32: Callable[..., None] | None = None) -> None:
        self._sources = {torch.bfloat16: bf16} | ({torch.float32: f32} if f32 else {})
        self._compiled: dict[torch.dtype, Any] = {}

    def compile(self, dtype: torch.dtype) -> Any:
        """The C function for ``dtype``."""
        if dtype not in self._compiled:
            with _cache_folder() as usable:
                self._compiled[dtype] = cfunc(SIGNATURE, cache=usable)(self._sources[dtype])
        return self._compiled[dtype]

    def launch(self, dtype: torch.dtype, num_items: int, *arguments: int) -> None:
        """Run all items, on torch's number of threads; returns when the last is done."""
        words = array("q", (0, 0, num_items, *arguments))
        threads = min(num_items, torch.get_num_threads())
        address = self.compile(dtype).address
        with _LAUNCHING:
            _launcher()(address, words.buffer_info()[0], threads)


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
def _launcher() -> Launch:
    return _openmp_launch() or _python_launch()


def _openmp_launch() -> Launch | None:
    """``(function, data, threads)`` through torch's OpenMP runtime; None where it lacks libgomp's interface."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    for name in [*map(str, bundled), None]:
        try:
            start = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return lambda function, data, threads: start(function, data, threads, 0)
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

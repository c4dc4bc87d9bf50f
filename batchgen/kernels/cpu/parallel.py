"""Launches kernels on threads, or lets a ``CaptureHook`` record their launches.

It does not use OpenMP, whose launches wait for all threads: if another process is busy, they take many times longer.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from batchgen.core.machine import num_usable_cpus
from batchgen.kernels.cpu import build, kernel_specs
from batchgen.kernels.cpu.kernel_specs import KernelSpec
from batchgen.kernels.cpu.layout import (
    FUTEX,
    IS_GROWING,
    LAUNCHES,
    MAX_WORKERS,
    NUM_LAUNCHES,
    POOL,
    POOL_WORDS,
    PROGRAM_WORDS,
    PROGRESS,
    RANGES,
    SELF,
    SLEEP,
    WAKE,
    WORKER_BITS,
)

LAUNCHING = threading.RLock()  # engines in several threads share the workers and their scratch memory

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # of Linux
_NAP_US = 50  # of waiting threads on systems where they cannot wake each other
_MAX_LAUNCHES = 4096  # of a program that grows; then another program begins
_LAUNCHES_AT_ONCE = 4  # added to such a program: this takes less time than a thread spins before it sleeps
Kind = torch.dtype | str  # of a kernel: the dtype that names it, or another name in ``KernelSpec.kinds``


def address(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory."""
    assert tensor.is_contiguous(), "kernels read memory in order"
    return tensor.data_ptr()


_SCRATCH: dict[int, torch.Tensor] = {}


def scratch(floats: int) -> tuple[int, int]:
    """Scratch memory of ``floats`` float32 per worker: its address, and the bytes of a worker's part (``entry.Own``).

    Parts begin at multiples of 64 bytes if ``floats`` is a multiple of 16. Kernels run one at a time, so all share this
    memory; it is never freed.
    """
    num_floats = floats * torch.get_num_threads()
    memory = _SCRATCH.get(num_floats)
    if memory is None:  # two threads may come here at once: setdefault gives both the same
        memory = _SCRATCH.setdefault(num_floats, torch.empty(num_floats))
    return memory.data_ptr(), 4 * floats


Launched = tuple[int, "array[int]", int]  # function, words, number of workers
Launches = Sequence[tuple[int, int]]  # the addresses of their functions and words


class Allocator(Protocol):
    """Memory for results while a step is recorded or runs as a ``GrowingProgram``."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""


class CaptureHook(threading.local):
    """Collects the calling thread's launches and allocates their results, for a recording or a ``GrowingProgram``.

    It is a thread-local variable, so that the model, which makes the launches, need not know it. A launch costs Python
    20 microseconds, over a hundred times per step; half as much if it is collected while other threads run it.
    """

    launches: list[Launched] | GrowingProgram | None = None  # None: launches run at once
    memory: Allocator | None = None


CAPTURE = CaptureHook()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a kernel's result."""
    memory = CAPTURE.memory
    return torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)


class Kernel:
    """A kernel of several kinds, each compiled before its first launch, unless an earlier process has done so.

    It is a C function of int64 words; its addresses and sizes start at word ``ARGS``. A worker begins with one range of
    items, the same in all kernels so that its cache has the rows, then helps others: workers must not affect results.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._addresses: dict[Kind, int] = {}

    def address(self, kind: Kind) -> int:
        if kind not in self._addresses:
            self._addresses[kind] = build.address(self._spec, str(kind).removeprefix("torch."))
        return self._addresses[kind]

    def launch(self, kind: Kind, num_items: int, *arguments: int, num_ranges: int | None = None) -> None:
        """Run all items, on torch's number of threads; returns when they are done, or recorded by ``CaptureHook``.

        Items are cut into as many ranges as there are workers, or ``num_ranges``. A step launches a hundred kernels,
        each time with the interpreter out of all caches, so every line here counts.
        """
        if not num_items:
            return
        workers = min(num_items, torch.get_num_threads())
        ranges = num_ranges or workers
        words = array("q", (*pool().numbering, num_items, workers, ranges, 0, *arguments, *(0,) * ranges))
        at, size = words.buffer_info()
        words[RANGES] = at + (size - ranges) * words.itemsize
        code = self._addresses.get(kind) or self.address(kind)
        if CAPTURE.launches is not None:
            CAPTURE.launches.append((code, words, workers))
            return
        pool().run(pool().program([(code, at)], workers))


class GrowingProgram:
    """A program to which launches are added while it runs."""

    def __init__(self, pool: Pool, num_workers: int) -> None:
        self._pool = pool
        self._words = array("q", bytes(8 * (PROGRAM_WORDS + 2 * _MAX_LAUNCHES)))
        self._at = self._words.buffer_info()[0]
        for word, value in ((POOL, pool.at), (MAX_WORKERS, num_workers), (LAUNCHES, self._at + 8 * PROGRAM_WORDS)):
            self._words[word] = value
        self._added: list[array[int]] = []  # words of its launches, to be kept until they are done

    def append(self, launched: Launched) -> None:
        """Add a launch, whose inputs are in memory or results of earlier launches."""
        code, words, _ = launched
        if len(self._added) == _MAX_LAUNCHES:
            self.end()
        at = PROGRAM_WORDS + 2 * len(self._added)
        self._words[at], self._words[at + 1] = code, words.buffer_info()[0]
        self._added.append(words)
        if len(self._added) % _LAUNCHES_AT_ONCE == 0:
            self._words[NUM_LAUNCHES], self._words[IS_GROWING] = len(self._added), 1
            self._pool.publish(self._at)

    def end(self) -> None:
        """Take part in the unfinished launches; returns when the last one is done."""
        if self._added:
            self._words[NUM_LAUNCHES], self._words[IS_GROWING] = len(self._added), 0
            self._pool.run_all(self._at)
            self._added.clear()


class Pool:
    """Threads of this process that run programs of launches; they start when first needed and end with the process."""

    def __init__(self) -> None:
        self._words = array("q", [0] * (POOL_WORDS + 7))  # 7 more, so that the words can begin at a cache line
        self._start = (-self._words.buffer_info()[0] % 64) // 8
        self.at = self._words.buffer_info()[0] + 8 * self._start
        library, key = ctypes.CDLL(None), ctypes.c_ulong()  # as wide as on macOS; Linux writes the low half
        library.pthread_key_create(ctypes.byref(key), None)
        self.numbering = _address(library.pthread_getspecific), key.value  # 0 in all threads but the pool's
        futex = _FUTEX_CALLS.get(platform.machine()) if platform.system() == "Linux" else None
        sleep, wake = ("syscall", "syscall") if futex else ("usleep", "sched_yield")
        addresses = {SELF: self.at, FUTEX: futex or _NAP_US}
        addresses |= {SLEEP: _address(library[sleep]), WAKE: _address(library[wake])}
        for word, value in addresses.items():
            self._words[self._start + word] = value
        self._library, self._key = library, key
        self._num_workers = 1
        self.run_all = _function(kernel_specs.RUN_ALL)
        self.publish = _function(kernel_specs.RUN_ALL, ctypes.PYFUNCTYPE)  # too short to release the GIL

    def program(self, launches: Launches, num_workers: int) -> array[int]:
        """The words of a program for ``run``, as in ``layout``."""
        words = array("q", (self.at, len(launches), num_workers, 0, 0, 0, *chain.from_iterable(launches)))
        words[LAUNCHES] = words.buffer_info()[0] + PROGRAM_WORDS * words.itemsize
        return words

    def run(self, program: array[int]) -> None:
        """Run the launches of a program in order; returns when the last is done."""
        with LAUNCHING:
            self._start_threads(program[MAX_WORKERS])
            self.run_all(program.buffer_info()[0])

    def run_growing(self, work: Callable[[GrowingProgram], torch.Tensor]) -> torch.Tensor:
        """The result of ``work``, whose launches other threads run meanwhile; this thread joins them at the end.

        It is not a context manager: after a Ctrl-C between the manager and its caller, neither would end the program.
        """
        with LAUNCHING:
            num_workers = torch.get_num_threads()
            self._start_threads(num_workers)
            program = GrowingProgram(self, num_workers)
            try:
                try:
                    return work(program)
                finally:
                    program.end()
            finally:
                program.end()  # again, if Ctrl-C interrupted the first: kernels write memory that may be freed now

    def _start_threads(self, num_workers: int) -> None:
        """Start the threads that ``num_workers`` workers need, but not more than there are CPUs."""
        if num_workers > self._num_workers:
            for number in range(self._num_workers, min(num_workers, num_usable_cpus())):
                self._num_workers = number + 1  # set first, as Ctrl-C may interrupt the start: numbers are unique
                try:
                    threading.Thread(target=self._serve, args=(number,), daemon=True).start()
                except RuntimeError:  # the system allows no more: this launch can do without
                    self._num_workers = number
                    break
            else:
                self._num_workers = num_workers

    @property
    def num_launches(self) -> int:
        """Launches that have ended; any thread may ask, also while a program runs."""
        return self._words[self._start + PROGRESS] >> WORKER_BITS

    def forget_threads(self) -> None:
        """Reset the pool in a copy of the process, which lacks its threads; it keeps the memory that programs use."""
        for word in range(SELF):
            self._words[self._start + word] = 0
        self._num_workers = 1

    def _serve(self, number: int) -> None:
        self._library.pthread_setspecific(self._key, ctypes.c_void_p(number))
        words = array("q", (self.at, number))
        _function(kernel_specs.SERVE)(words.buffer_info()[0])


def _function(spec: KernelSpec, kind: Any = ctypes.CFUNCTYPE) -> Callable[[int], None]:
    function: Callable[[int], None] = kind(None, ctypes.c_void_p)(build.address(spec, "any"))
    return function


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # any foreign function
    assert address, "a function of the C library"
    return address


_POOL: dict[None, Pool] = {}


def pool() -> Pool:
    """The only pool of this process; a thread's number is stored under a key that belongs to its pool."""
    pool = _POOL.get(None)
    return pool if pool is not None else _POOL.setdefault(None, Pool())  # as in ``scratch``


def num_launches() -> int:
    """Launches that this process's pool has ended, which shows progress within a long step."""
    return _POOL[None].num_launches if None in _POOL else 0


def _begin_copy() -> None:
    """Reset lock and pool in a fork of the process, which has no copy of the pool's threads or the lock's holder."""
    global LAUNCHING  # noqa: PLW0603 - the lock may be held for ever by a thread that was not copied
    LAUNCHING = threading.RLock()
    for copied in _POOL.values():
        copied.forget_threads()


def _end() -> None:
    """End the program under way and refuse new ones: daemon threads would use memory that is freed at exit."""
    LAUNCHING.acquire()  # this thread may still launch, from other callbacks


os.register_at_fork(after_in_child=_begin_copy)
atexit.register(_end)  # once all threads but daemons have ended

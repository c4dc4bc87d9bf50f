"""A step's launches, recorded once and run again on the same memory without Python in between.

Between two kernels that stream weights through every cache, each launch costs Python some 20 microseconds, over a
hundred times a step: a seventh of the time of a single sequence. Where a step does what an earlier one did (every
sequence has one token, and there are as many), it is enough to change what its inputs hold and run the same launches.

Results of recorded launches lie in a ``Memory``. Launches run in order, so what one no longer needs is given to a
later one at once, as Python's references tell while recording; replays then do the same.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.cpu.parallel import LAUNCHING, Kernel, diverted, place_ranges
from batchgen.kernels.cpu.simd import call_with


def _run_all(words: Any) -> None:
    """Compiled: arguments are the address of ``GOMP_parallel``, a count, and as many (function, words, workers)."""
    for i in range(words[1]):
        call_with(words[0], words[2 + 3 * i], words[3 + 3 * i], words[4 + 3 * i])


_LEAST_BYTES = 1 << 16  # of a buffer: sizes vary from step to step, and few buffers are to serve them all
_RUN_ALL = Kernel(bf16=_run_all)


class Memory:
    """Buffers for results; each belongs to a tensor until that is dropped."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Callable[[], object]]] = []  # with a weak reference to its tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
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

    def holding(self, at: int) -> Tensor:
        """The buffer that begins at an address."""
        return next(buffer for buffer, _ in self._buffers if buffer.data_ptr() == at)


class Program:
    """Launches that can be repeated: everything but the contents of memory stays as it was."""

    def __init__(self, launches: Sequence[tuple[int, array[int], int]], start: int) -> None:
        """``start`` is the address of ``GOMP_parallel``."""
        self._fresh = np.concatenate([np.asarray(words) for _, words, _ in launches])
        self._words = np.empty_like(self._fresh)
        table, at = [start, len(launches)], 0
        for code, words, workers in launches:
            address = self._words.ctypes.data + at * words.itemsize
            place_ranges(self._fresh[at : at + len(words)], address)
            table += [code, address, workers]
            at += len(words)
        self._table = array("q", table)
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_RUN_ALL.compile(torch.bfloat16).address)

    def run(self) -> None:
        """Run all launches, one after the other."""
        with LAUNCHING:
            self._words[:] = self._fresh  # kernels count in them
            self._run(self._table.buffer_info()[0])


class Recorder:
    """See ``batchgen.kernels.Recorder``."""

    def __init__(self, start: int) -> None:
        """``start`` is the address of ``GOMP_parallel``."""
        self._start = start
        self._memory = Memory()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """See ``batchgen.kernels.Recorder.record``."""
        launches: list[tuple[int, array[int], int]] = []
        with diverted(lambda code, words, workers: launches.append((code, words, workers)), self._memory.empty):
            result = work()
        program, shape, dtype = Program(launches, self._start), result.shape, result.dtype
        # Not the result itself: its memory may serve later recordings too, since a replay writes it anew.
        memory = self._memory.holding(result.data_ptr())[: result.nbytes]
        program.run()

        def replay() -> Tensor:
            program.run()
            return memory.view(dtype).view(shape)

        return result, replay

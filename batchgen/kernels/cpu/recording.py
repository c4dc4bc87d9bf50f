"""Records the launches of kernels, and repeats them without Python on the same memory."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchgen.kernels.cpu.layout import LAUNCHES, NUM_RANGES, RANGES
from batchgen.kernels.cpu.parallel import CAPTURE, Launched, pool

_LEAST_BYTES = 1 << 16  # of a buffer: sizes vary from step to step, and few buffers are to serve them all


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
    """Launches to repeat: only the contents of memory change."""

    def __init__(self, launches: Sequence[Launched]) -> None:
        self._fresh = np.concatenate([np.asarray(words) for _, words, _ in launches])
        self._words = np.empty_like(self._fresh)
        self._pool, self._num_workers = pool(), max(workers for _, _, workers in launches)
        table, at = [self._pool.at, len(launches), self._num_workers, 0], 0
        for code, words, _ in launches:
            address = self._words.ctypes.data + at * words.itemsize
            self._fresh[at + RANGES] = address + (len(words) - words[NUM_RANGES]) * words.itemsize
            table += [code, address]
            at += len(words)
        self._table = array("q", table)
        self._table[LAUNCHES] = self._table.buffer_info()[0] + (LAUNCHES + 1) * self._table.itemsize

    def run(self) -> None:
        self._words[:] = self._fresh  # kernels count in them
        self._pool.run(self._table.buffer_info()[0], self._num_workers)


class Recorder:
    """``kernels.interface.Recorder`` of launches."""

    def __init__(self) -> None:
        self._memory = Memory()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        launches: list[Launched] = []
        CAPTURE.launches, CAPTURE.memory = launches, self._memory
        try:
            result = work()
        finally:
            CAPTURE.launches = CAPTURE.memory = None
        program, shape, dtype = Program(launches), result.shape, result.dtype
        # Not the result itself: its memory may serve later recordings too, since a replay writes it anew.
        memory = self._memory.holding(result.data_ptr())[: result.nbytes]
        program.run()

        def replay() -> torch.Tensor:
            program.run()
            return memory.view(dtype).view(shape)

        return result, replay

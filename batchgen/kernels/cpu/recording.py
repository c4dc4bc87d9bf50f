"""Records the launches of kernels, runs them in one piece, and repeats them without Python on the same memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchgen.kernels.cpu.layout import NUM_RANGES, RANGES
from batchgen.kernels.cpu.parallel import CAPTURE, Launched, pool

_LEAST_BYTES = 1 << 16  # of a buffer: sizes vary from step to step, and few buffers are to serve them all


class Memory:
    """Buffers for results; each belongs to a tensor until that is dropped."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, torch.Tensor, Callable[[], object]]] = []  # with a weak reference to its tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape. It must not be dropped while a view of it is still to be read."""
        size = math.prod(shape) * dtype.itemsize
        free = [(of[0], i) for i, of in enumerate(self._buffers) if of[0] >= size and of[2]() is None]
        if free:
            capacity, best = min(free)
            buffer = self._buffers[best][1]
        else:
            capacity, best = 1 << max(size - 1, _LEAST_BYTES - 1).bit_length(), len(self._buffers)
            buffer = torch.empty(capacity, dtype=torch.uint8)
            self._buffers.append((capacity, buffer, lambda: None))
        tensor = buffer[:size].view(dtype).view(shape)
        self._buffers[best] = capacity, buffer, weakref.ref(tensor)
        return tensor

    def holding(self, at: int) -> torch.Tensor:
        """The buffer that begins at an address."""
        return next(buffer for _, buffer, _ in self._buffers if buffer.data_ptr() == at)


class Program:
    """Launches to repeat: only the contents of memory change."""

    def __init__(self, launches: Sequence[Launched]) -> None:
        self._fresh = np.concatenate([np.asarray(words) for _, words, _ in launches])
        self._words = np.empty_like(self._fresh)
        table, at = list[tuple[int, int]](), 0
        for code, words, _ in launches:
            address = self._words.ctypes.data + at * words.itemsize
            self._fresh[at + RANGES] = address + (len(words) - words[NUM_RANGES]) * words.itemsize
            table.append((code, address))
            at += len(words)
        self._table = pool().program(table, _most_workers(launches))

    def run(self) -> None:
        self._words[:] = self._fresh  # kernels count in them
        pool().run(self._table)


class Recorder:
    """``kernels.interface.LaunchRecorder`` of this back end."""

    def __init__(self) -> None:
        self._memory = Memory()

    def run(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        memory = Memory()  # of its own, until the kernels have run: that of a large step is not kept
        result, launches = _recorded(work, memory)
        table = [(code, words.buffer_info()[0]) for code, words, _ in launches]
        pool().run(pool().program(table, _most_workers(launches)))
        return result

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        result, launches = _recorded(work, self._memory)
        program, shape, dtype = Program(launches), result.shape, result.dtype
        # Not the result itself: its memory may serve later recordings too, since a replay writes it anew.
        memory = self._memory.holding(result.data_ptr())[: result.nbytes]
        program.run()

        def replay() -> torch.Tensor:
            program.run()
            return memory.view(dtype).view(shape)

        return result, replay


def _recorded(work: Callable[[], torch.Tensor], memory: Memory) -> tuple[torch.Tensor, list[Launched]]:
    """The result of ``work``, in ``memory``, and the launches that are to compute it."""
    launches: list[Launched] = []
    CAPTURE.launches, CAPTURE.memory = launches, memory
    try:
        return work(), launches
    finally:
        CAPTURE.launches = CAPTURE.memory = None


def _most_workers(launches: Sequence[Launched]) -> int:
    return max((workers for _, _, workers in launches), default=1)

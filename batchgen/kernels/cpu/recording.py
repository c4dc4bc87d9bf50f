"""Runs kernels while Python launches more of them, or records their launches to repeat them without Python."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchgen.kernels.cpu.layout import NUM_RANGES, RANGES
from batchgen.kernels.cpu.parallel import CAPTURE, GrowingProgram, Launched, pool

_MIN_BYTES = 1 << 16  # of a buffer: sizes vary from step to step, and a few buffers should serve all of them


class Memory:
    """Buffers for results; each belongs to a tensor until the tensor is dropped.

    Launches run in order, both when recorded and in each replay, so a later launch may use dropped memory at once.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[int, torch.Tensor, Callable[[], object]]] = []  # with a weak reference to its tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape. Keep it as long as a view of it may be read."""
        size = math.prod(shape) * dtype.itemsize
        free = [(of[0], i) for i, of in enumerate(self._buffers) if of[0] >= size and of[2]() is None]
        if free:
            capacity, best = min(free)
            buffer = self._buffers[best][1]
        else:
            capacity, best = 1 << max(size - 1, _MIN_BYTES - 1).bit_length(), len(self._buffers)
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
        self._table = pool().program(table, max((workers for _, _, workers in launches), default=1))

    def run(self) -> None:
        self._words[:] = self._fresh  # kernels count in them
        pool().run(self._table)


class Recorder:
    """``interface.Recorder`` of CPU kernels, which also runs launches while later ones are prepared.

    ``run`` is for work that is done once: other threads run its kernels while it launches more.
    """

    def __init__(self) -> None:
        self._memory = Memory()

    def run(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        memory = Memory()  # only until the kernels have run, so that a large step's memory is not kept
        return pool().run_growing(lambda launches: _recorded(work, memory, launches))

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        launches: list[Launched] = []
        result = _recorded(work, self._memory, launches)
        program, shape, dtype = Program(launches), result.shape, result.dtype
        # Not the result itself: its memory may serve later recordings too, since a replay writes it again.
        memory = self._memory.holding(result.data_ptr())[: result.nbytes]
        program.run()

        def replay() -> torch.Tensor:
            program.run()
            return memory.view(dtype).view(shape)

        return result, replay


def _recorded(
    work: Callable[[], torch.Tensor], memory: Memory, launches: list[Launched] | GrowingProgram
) -> torch.Tensor:
    """The result of ``work``, in ``memory``; its kernels are added to ``launches``."""
    CAPTURE.launches, CAPTURE.memory = launches, memory
    try:
        return work()
    finally:
        CAPTURE.launches = CAPTURE.memory = None

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


class Repeated:
    """Launches to repeat: only the contents of memory change."""

    def __init__(self, launches: Sequence[Launched]) -> None:
        self._fresh = np.concatenate([np.asarray(words) for _, words, _ in launches])
        self._words = np.empty_like(self._fresh)
        self._num_workers = max(workers for _, _, workers in launches)
        self._program, at = list[tuple[int, int]](), 0
        for code, words, _ in launches:
            address, end = self._words.ctypes.data + at * words.itemsize, len(words) - words[NUM_RANGES]
            self._fresh[at + RANGES] = address + end * words.itemsize
            self._fresh[at + end : at + len(words)] = 0
            self._program.append((code, address))
            at += len(words)

    def run(self) -> None:
        self._words[:] = self._fresh  # kernels count in them
        pool().run(self._program, self._num_workers)


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
        program = [(code, words.buffer_info()[0]) for code, words, _ in launches]
        pool().run(program, max((workers for _, _, workers in launches), default=1))
        # Not the result itself: its memory may serve later recordings too, since a replay writes it anew.
        at, num_bytes, shape, dtype = result.data_ptr(), result.nbytes, result.shape, result.dtype
        repeated: list[Repeated] = []  # made when it is first asked for: most recordings are run once

        def replay() -> torch.Tensor:
            if not repeated:
                repeated.append(Repeated(launches))
                launches.clear()
            repeated[0].run()
            return self._memory.holding(at)[:num_bytes].view(dtype).view(shape)

        return result, replay

"""Kernels that measure their own time: the same operations, with seconds summed by kind of work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.interface import Embedding, Kernels, Linear, Recorder

_MAKERS = ("linear", "gated_linear", "router", "experts")  # what they make is timed


class TimedKernels:
    """Wraps a CPU's ``Kernels`` and adds the wall time of each operation to ``seconds``, by its name.

    On an asynchronous device this would measure launches. While ``is_timing``, engines get no recorder, because the
    kernels of a recording run in one piece and would not be timed. What is several operations is timed as these.
    """

    add_and_norm = Kernels.add_and_norm

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_timing = False

    def recorder(self) -> Recorder | None:
        return None if self.is_timing else self._kernels.recorder()

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        embedding, head = self._kernels.tied_embedding(table, dtype)
        return self._timed("take_rows", embedding), self._timed("linear", head)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        if name in _MAKERS:
            return lambda *arguments: self._timed(name, value(*arguments))
        return self._timed(name, value) if callable(value) else value

    def _timed(self, kind: str, work: Callable[..., Any]) -> Any:
        return _Timed(kind, work, self.seconds)


class _Timed:
    """An operation whose calls are timed; its attributes are its own, as the ``linear`` of a ``GatedLinear``."""

    def __init__(self, kind: str, work: Callable[..., Any], seconds: dict[str, float]) -> None:
        self._kind, self._work, self._seconds = kind, work, seconds

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._work(*arguments)
        self._seconds[self._kind] += time.perf_counter() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

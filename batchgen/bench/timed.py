"""Kernels that keep time: the same operations, with seconds summed by kind of work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from batchgen.kernels.interface import GatedLinear, Kernels, Linear, Recorder


class TimedKernels:
    """Forwards every operation of ``Kernels`` and adds its wall time to ``seconds``.

    On an asynchronous device this would time launches, so it is for the CPU. ``is_timing`` says whether an engine is
    to run every kernel by itself, so that all are timed; without it, work may be recorded and run again in one piece.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.name = kernels.name
        self.seconds: dict[str, float] = {}
        self.is_timing = False

    @property
    def variant(self) -> str:
        """That of the kernels."""
        return self._kernels.variant

    def recorder(self) -> Recorder | None:
        """That of the kernels, which passes the timing by."""
        return None if self.is_timing else self._kernels.recorder()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear whose calls are timed."""
        return self._timed("linear", self._kernels.linear(weight, bias))

    def gated_linear(self, gate: Tensor, up: Tensor) -> GatedLinear:
        """A gated linear whose calls are timed; its plain ``linear`` is not."""
        return _TimedGatedLinear(self._kernels.gated_linear(gate, up), self._timed)

    def __getattr__(self, name: str) -> Any:
        timed = self._timed(name, getattr(self._kernels, name))
        setattr(self, name, timed)
        return timed

    def _timed(self, kind: str, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            start = time.perf_counter()
            result = work(*arguments)
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start
            return result

        return call


class _TimedGatedLinear:
    """See ``GatedLinear``."""

    def __init__(self, gated: GatedLinear, timed: Callable[..., Callable[..., Tensor]]) -> None:
        self.linear = gated.linear
        self._call = timed("gated_linear", gated)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedLinear``."""
        return self._call(x)

"""Kernels that measure their own time: the same operations, with seconds summed by kind of work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.interface import (
    Embedding,
    GatedLinear,
    Kernels,
    Linear,
    Recorder,
    Router,
    Routing,
    SparseFeedForward,
)


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

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._timed("linear", self._kernels.linear(weight, bias))

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        embedding, head = self._kernels.tied_embedding(table, dtype)
        return self._timed("take_rows", embedding), self._timed("linear", head)

    def gated_linear(self, gate: Tensor, up: Tensor) -> GatedLinear:
        gated = self._kernels.gated_linear(gate, up)
        return _TimedGatedLinear(gated.linear, self._timed("gated_linear", gated))

    def router(self, routing: Routing) -> Router:
        return self._timed("router", self._kernels.router(routing))

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        experts = self._kernels.experts(weights)
        return _TimedExperts(experts.linears, self._timed("experts", experts))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        return self._timed(name, value) if callable(value) else value

    def _timed(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments)
            self.seconds[kind] += time.perf_counter() - start
            return result

        return call


@dataclass(slots=True)
class _TimedGatedLinear:
    """A ``GatedLinear`` whose calls are timed; its plain ``linear`` is not."""

    linear: Linear
    call: Callable[..., Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.call(x)


@dataclass(slots=True)
class _TimedExperts:
    """A ``SparseFeedForward`` whose calls are timed; its plain ``linears`` are not."""

    linears: list[tuple[Linear, Linear]]
    call: Callable[..., Tensor]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        return self.call(x, ids, weights, residual)

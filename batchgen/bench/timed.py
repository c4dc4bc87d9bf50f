"""Kernels that measure their own time and count their own work: the same operations, summed by kind."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.inputs import KVCache
from batchgen.kernels.interface import (
    Embedding,
    GatedLinear,
    Kernels,
    LaunchRecorder,
    Linear,
    Router,
    Routing,
    SparseFeedForward,
)
from batchgen.model.roofline import Ceilings, Work

_Count = Callable[[tuple[Any, ...], Any], tuple[float, float]]  # FLOP and bytes of a call's arguments and result


class TimedKernels:
    """Wraps a CPU's ``Kernels`` and adds the wall time of each operation to ``seconds``, by its name.

    On an asynchronous device this would measure launches. While ``is_timing``, engines get no recorder, because
    kernels would run apart from their launches and would not be timed, and the least work of each operation is added to
    ``work`` as [FLOP, bytes]; that takes ``counting_s``. What is several operations is timed as these.
    """

    add_and_norm = Kernels.add_and_norm

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.weight_bytes = 0.0  # of one weight in memory
        self.is_timing = False
        self.clear()

    def clear(self) -> None:
        """Forget all times and counts."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.counting_s = 0.0

    def floors_s(self, ceilings: Ceilings) -> dict[str, float]:
        """The least seconds of each kind of work on a machine with these ceilings."""
        return {kind: Work(*counts).floor_s(ceilings) for kind, counts in self.work.items()}

    def recorder(self) -> LaunchRecorder | None:
        return None if self.is_timing else self._kernels.recorder()

    def tied_embedding(self, table: Tensor, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        embedding, head = self._kernels.tied_embedding(table, dtype)
        return self._timed("take_rows", embedding), self._timed("linear", head, self._product(table))

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        timed: Linear = self._timed("linear", self._kernels.linear(weight, bias), self._product(weight))
        return timed

    def gated_linear(self, gate: Tensor, up: Tensor, is_gelu: bool = False) -> GatedLinear:
        product = self._kernels.gated_linear(gate, up, is_gelu)
        timed: GatedLinear = self._timed("gated_linear", product, self._product(gate, up))
        return timed

    def router(self, routing: Routing) -> Router:
        timed: Router = self._timed("router", self._kernels.router(routing), self._product(routing.weight))
        return timed

    def experts(self, weights: Iterable[tuple[Tensor, Tensor, Tensor]]) -> SparseFeedForward:
        sizes: list[int] = []

        def noted() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for expert in weights:
                sizes.append(sum(part.numel() for part in expert))
                yield expert

        def met(given: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
            """Each row meets its experts, and those that any row meets are read once."""
            ids = given[1]
            return 2.0 * sizes[0] * ids.numel(), self.weight_bytes * sizes[0] * len(ids.unique())

        timed: SparseFeedForward = self._timed("experts", self._kernels.experts(noted()), met)
        return timed

    def attend(self, *given: Any, **named: Any) -> Tensor:
        """The operations that the wrapped kernels make of it, each timed."""
        result: Tensor = type(self._kernels).attend(self, *given, **named)
        return result

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        return self._timed(name, value) if callable(value) else value

    def _timed(self, kind: str, work: Callable[..., Any], count: _Count | None = None) -> Any:
        return _Timed(self, kind, work, count or _COUNTS.get(kind, _moved))

    def _product(self, *weights: Tensor) -> _Count:
        size = sum(weight.numel() for weight in weights)
        return lambda given, result: (2.0 * size * len(given[0]), self.weight_bytes * size)


class _Timed:
    """An operation whose calls are timed; its attributes are its own, as the ``linear`` of a ``GatedLinear``."""

    def __init__(self, kernels: TimedKernels, kind: str, work: Callable[..., Any], count: _Count) -> None:
        self._kernels, self._kind, self._work, self._count = kernels, kind, work, count

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._work(*arguments)
        end = time.perf_counter()
        self._kernels.seconds[self._kind] += end - start
        if self._kernels.is_timing:
            counts = self._kernels.work[self._kind]
            for place, count in enumerate(self._count(arguments, result)):
                counts[place] += count
            self._kernels.counting_s += time.perf_counter() - end
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _moved(given: tuple[Any, ...], result: Any) -> tuple[float, float]:
    """What is read and written, once each; the arithmetic is of no weight."""
    return 0.0, float(sum(part.nbytes for part in (*given, result) if isinstance(part, Tensor)))


def _looked_up(given: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
    return 0.0, 2.0 * result.nbytes


def _attended(given: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
    """Four FLOP per head dimension and position attended to; each sequence's keys and values are read once.

    Queries are read; of tokens that come as products, these are, and their keys and values are written.
    """
    q, cache, inputs, head_dim = given[:4]
    window, alone = given[5] if len(given) > 5 else 0, given[7] if len(given) > 7 else None
    positions = inputs.positions.long() + 1
    if not inputs.is_causal:
        blocks = inputs.query_blocks.long()
        positions = blocks[:, 5].repeat_interleave(blocks[:, 2])
    lasts = positions[inputs.cu_seqlens[1:].long() - 1]
    if window:
        positions, lasts = positions.clamp(max=window), lasts.clamp(max=window)
    num_bytes = int(lasts.sum()) * _position_bytes(cache, head_dim) + q.nbytes + result.nbytes
    if alone is not None:
        num_bytes += inputs.num_alone * (alone.qkv[0].nbytes + _position_bytes(cache, head_dim))
    return 4.0 * q.shape[1] * head_dim * int(positions.sum()), float(num_bytes)


def _cached(given: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
    """Products are read; queries, keys and values are written."""
    qkv, heads, _, _, cache, first, *_ = (*given, 0)
    num_bytes = qkv[0].nbytes + heads.num_heads * cache.width * 4 + _position_bytes(cache, heads.head_dim)
    return 0.0, float(num_bytes * (len(qkv) - first))


def _position_bytes(cache: KVCache, head_dim: int) -> int:
    """Bytes of one position's keys and values in one layer, without padding."""
    return 2 * cache.values.shape[1] * (head_dim * cache.values.itemsize + (4 if cache.scales is not None else 0))


_COUNTS: dict[str, _Count] = {"take_rows": _looked_up, "attention": _attended, "rope_and_cache": _cached}

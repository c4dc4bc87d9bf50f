"""Time of a CPU's kernels by kind, each beside the least that the machine allows, for those who write kernels.

    python tests/tools/time_kernels.py --model dummy:LFM2-350M --num-requests 64 --input-len 100 --output-len 100

The kernels measure their own time and count their own work. That slows a run down, so ``batchgen bench`` does without.
What a kernel finds in the processor's cache may take it above 100 % of its roofline.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from batchgen.bench.workload import LengthRange, Shape
from batchgen.config.load import load_job
from batchgen.core.records import Request
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.load import load_weights
from batchgen.engine.sizes import use_threads
from batchgen.kernels.inputs import KVCache
from batchgen.kernels.interface import (
    Embedding,
    GatedLinear,
    Kernels,
    Linear,
    Router,
    Routing,
    SparseFeedForward,
)
from batchgen.kernels.select import select
from batchgen.model.load import resolve_device, resolve_dtype
from batchgen.model.rates import measure, weight_bytes
from batchgen.model.registry import load_config
from batchgen.model.roofline import Ceilings, Work

_Count = Callable[[tuple[Any, ...], Any], tuple[float, float]]  # FLOP and bytes of a call's arguments and result


class TimedKernels:
    """Wraps a CPU's ``Kernels`` and adds the wall time of each operation to ``seconds``, by its name.

    No ``CpuKernels``: engines record their launches, and recorded kernels would not be timed. The least
    work of each operation is added to ``work`` as [FLOP, bytes]; that takes ``counting_s``. What is several operations
    is timed as these.
    """

    add_and_norm = Kernels.add_and_norm

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.weight_bytes = 0.0  # of one weight in memory
        self.clear()

    def clear(self) -> None:
        """Forget all times and counts."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.counting_s = 0.0

    def floors_s(self, ceilings: Ceilings) -> dict[str, float]:
        """The least seconds of each kind of work on a machine with these ceilings."""
        return {kind: Work(*counts).floor_s(ceilings) for kind, counts in self.work.items()}

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
    q, _, heads, inputs, cache, alone = (*given, None)[:6]
    positions = inputs.positions.long() + 1
    if not inputs.is_causal:
        blocks = inputs.query_blocks.long()
        positions = blocks[:, 5].repeat_interleave(blocks[:, 2])
    lasts = positions[inputs.cu_seqlens[1:].long() - 1]
    if heads.window:
        positions, lasts = positions.clamp(max=heads.window), lasts.clamp(max=heads.window)
    num_bytes = int(lasts.sum()) * _position_bytes(cache, heads.head_dim) + q.nbytes + result.nbytes
    if alone is not None:
        num_bytes += inputs.num_alone * (alone.qkv[0].nbytes + _position_bytes(cache, heads.head_dim))
    return 4.0 * q.shape[1] * heads.head_dim * int(positions.sum()), float(num_bytes)


def _cached(given: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
    """Products are read; queries, keys and values are written."""
    qkv, heads, _, _, cache, first, *_ = (*given, 0)
    num_bytes = qkv[0].nbytes + heads.num_heads * cache.width * 4 + _position_bytes(cache, heads.head_dim)
    return 0.0, float(num_bytes * (len(qkv) - first))


def _position_bytes(cache: KVCache, head_dim: int) -> int:
    """Bytes of one position's keys and values in one layer, without padding."""
    return 2 * cache.values.shape[1] * (head_dim * cache.values.itemsize + (4 if cache.scales is not None else 0))


_COUNTS: dict[str, _Count] = {"take_rows": _looked_up, "attention": _attended, "rope_and_cache": _cached}


def main(arguments: list[str] | None = None) -> None:
    """Print the time of each kind of kernel, most first, and of the host between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-requests", type=int, default=64)
    for flag in ("--input-len", "--output-len"):
        parser.add_argument(
            flag, type=lambda text: LengthRange.parse(text, "the length"), default=LengthRange(100, 100)
        )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    model = {"path": options.model, "device": "cpu", "dtype": options.dtype, "quantization": options.quantization}
    where = load_job(None, {"model": model}, needs=("model",)).model
    config = load_config(where.path, where.revision)
    use_threads(options.threads, config)
    device = resolve_device(where.device)
    dtype = resolve_dtype(where.dtype, config, device)
    kernels = TimedKernels(select(device, dtype, weights=where.weights, activations=where.activations))
    decoder = load_weights(where, kernels)
    kernels.weight_bytes = weight_bytes(decoder)
    requests = Shape(options.num_requests, options.input_len, options.output_len).requests(config.vocab_size)
    _run(Engine(decoder, EngineConfig()), requests[:8])  # compiles what is not compiled yet
    ceilings = measure(decoder)
    kernels.clear()
    wall_s = _run(Engine(decoder, EngineConfig()), requests)
    seconds = {**kernels.seconds, "host": wall_s - sum(kernels.seconds.values()) - kernels.counting_s}
    floors = kernels.floors_s(ceilings)
    for kind, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        share = f"   {floors[kind] / spent:6.1%} of its roofline" if floors.get(kind) and spent else ""
        print(f"{kind:<15}{spent:8.2f} s  {spent / sum(seconds.values()):6.1%}{share}")


def _run(engine: Engine, requests: list[Request]) -> float:
    start = time.perf_counter()
    for result in engine.run(requests):
        assert result.error is None, result.error
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

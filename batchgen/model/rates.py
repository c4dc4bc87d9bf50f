"""Measurement of the ceilings of ``roofline``, in the process that runs the model.

FLOP/s are measured on the model's own linears, all layers in turn, so that weights come from memory as in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from batchgen.core.machine import UNTRIED_DEVICES
from batchgen.model.decoder import Decoder
from batchgen.model.roofline import Ceilings


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """Time and memory that a measurement may take.

    The linears run at each of ``row_counts``, for at least ``sustained_s`` seconds and ``repeats`` passes;
    ``buffer_bytes``, far beyond any cache, are read for the bandwidth.
    """

    row_counts: tuple[int, ...]
    repeats: int
    sustained_s: float
    buffer_bytes: int

    def on(self, device: torch.device) -> MeasureConfig:
        """The settings for a device: on a GPU, few rows would measure launches, and a small buffer the cache."""
        if device.type != "cuda":
            return self
        rows = tuple(_GPU_ROWS * count for count in self.row_counts)
        return replace(self, row_counts=rows, buffer_bytes=_GPU_BUFFER_BYTES)


_GPU_ROWS = 16  # times as many rows as on a CPU
_GPU_BUFFER_BYTES = 1 << 32
THOROUGH = MeasureConfig((128, 256, 512), repeats=5, sustained_s=1.0, buffer_bytes=1 << 28)


def measure(model: Decoder, config: MeasureConfig = THOROUGH) -> Ceilings:
    """Both ceilings: the median rate of passes at the best row count, and the best bandwidth."""
    config = config.on(model.device)
    linear_rate = max(_linear_rate(model, rows, config) for rows in config.row_counts)
    buffer = torch.ones(config.buffer_bytes // 4, dtype=torch.float32, device=model.device)
    source, target = buffer.chunk(2)
    copied = _rate(lambda: target.copy_(source), buffer.nbytes, model.device, config)
    summed = _rate(buffer.sum, buffer.nbytes, model.device, config)
    return Ceilings(linear_rate, max(copied, summed))


def weight_bytes(model: Decoder) -> float:
    """Bytes of memory per weight of a model's linears."""
    kernels, is_cpu = model.kernels, model.device.type == "cpu"
    return model.config.weight_bytes(model.numerics["dtype"], kernels.weights, kernels.activations, is_cpu=is_cpu)


def _rate(work: Callable[[], object], amount: float, device: torch.device, config: MeasureConfig) -> float:
    """The best rate of several calls of ``work``: ``amount``, what one call does, per second."""
    return amount / min(_times_s(work, device, config.repeats, 0.0))


def _times_s(work: Callable[[], object], device: torch.device, repeats: int, min_s: float) -> list[float]:
    """Durations of at least ``repeats`` calls, which take at least ``min_s`` together, after a warm-up call."""
    work()
    time_once = _device_s if device.type == "cuda" else partial(_host_s, device)
    times: list[float] = []
    while len(times) < repeats or sum(times) < min_s:
        times.append(time_once(work))
    return times


def _host_s(device: torch.device, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if device.type in UNTRIED_DEVICES:
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def _device_s(work: Callable[[], object]) -> float:
    """Seconds between two events on the GPU, without the host's part."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@torch.inference_mode()
def _linear_rate(model: Decoder, rows: int, config: MeasureConfig) -> float:
    """FLOP/s of one pass over every layer's linears at ``rows`` rows."""
    linears = [linear for layer in model.layers for linear in layer.linears]
    widths = {width for _, width in linears}
    x = {width: torch.randn(rows, width).to(model.device, model.dtype) for width in widths}

    def one_pass() -> None:
        for linear, width in linears:
            linear(x[width])

    pass_s = statistics.median(_times_s(one_pass, model.device, config.repeats, config.sustained_s))
    return 2.0 * model.config.linear_params_per_token * rows / pass_s

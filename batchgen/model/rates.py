"""The rates that bound this machine, measured, never assumed: the ceilings of ``report_roofline``.

Two are measured in the process that runs the model: the sustained rate of the model's own linears (all layers in
turn, so that weights come from memory as in a real step, at the best of several row counts), and memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchgen.model.decoder import Decoder
from batchgen.model.roofline import Ceilings


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time and memory a measurement may take.

    ``row_counts`` are those tried for the linears, each for ``sustained_s`` seconds and ``repeats`` passes at least;
    ``buffer_bytes`` is what is read for the bandwidth, which must be far beyond any cache.
    """

    row_counts: tuple[int, ...]
    repeats: int
    sustained_s: float
    buffer_bytes: int


THOROUGH = Effort((128, 256, 512), repeats=5, sustained_s=1.0, buffer_bytes=1 << 28)  # sustained, not a lucky moment
QUICK = Effort((512,), repeats=2, sustained_s=0.0, buffer_bytes=1 << 27)


def measure(model: Decoder, effort: Effort = THOROUGH) -> Ceilings:
    """Both ceilings: the median rate of passes at the best row count, and the best bandwidth."""
    return Ceilings(max(_linear_rate(model, rows, effort) for rows in effort.row_counts), _bandwidth(model, effort))


def _times_s(work: Callable[[], object], device: torch.device, repeats: int, least_s: float) -> list[float]:
    """Durations of repeated calls, until there are ``repeats`` of them that took ``least_s`` together."""
    work()
    times: list[float] = []
    while len(times) < repeats or sum(times) < least_s:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times


@torch.inference_mode()
def _linear_rate(model: Decoder, rows: int, effort: Effort) -> float:
    """FLOP/s of one pass over every layer's linears at ``rows`` rows."""
    linears = [linear for layer in model.layers for linear in layer.linears]
    x = {width: torch.randn(rows, width).to(model.device, model.dtype) for width in {width for _, width in linears}}

    def one_pass() -> None:
        for linear, width in linears:
            linear(x[width])

    pass_s = statistics.median(_times_s(one_pass, model.device, effort.repeats, effort.sustained_s))
    return 2.0 * model.config.linear_params_per_token * rows / pass_s


def _bandwidth(model: Decoder, effort: Effort) -> float:
    """Bytes per second, the better of a large copy (read and written bytes) and a large sum (read only)."""
    buffer = torch.ones(effort.buffer_bytes // 4, dtype=torch.float32, device=model.device)
    source, target = buffer.chunk(2)
    copied = effort.buffer_bytes / min(_times_s(lambda: target.copy_(source), model.device, effort.repeats, 0.0))
    summed = effort.buffer_bytes / min(_times_s(buffer.sum, model.device, effort.repeats, 0.0))
    return max(copied, summed)

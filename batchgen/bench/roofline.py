"""The fastest this machine could run a workload, measured and computed, never assumed.

Two ceilings are measured in the process that runs the benchmark: the sustained rate of the model's own linears
(all layers in turn, so that weights come from memory as in a real step, at the best of several row counts), and
memory bandwidth. What the workload must compute and move is counted from the steps that were run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchgen.engine.stats import EngineStats
from batchgen.model.config import ModelConfig
from batchgen.model.lfm2 import Attention, Lfm2Model

_ROW_COUNTS = (128, 256, 512)
_COPY_BYTES = 1 << 28  # far beyond any cache
_REPEATS = 5
_SUSTAINED_S = 1.0  # a rate is what holds that long, not a lucky moment


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of this machine."""

    flops_per_s: float
    memory_bytes_per_s: float

    def mean(self, other: Ceilings) -> Ceilings:
        """Halfway between two measurements, for a run that lay between them."""
        return Ceilings(
            (self.flops_per_s + other.flops_per_s) / 2, (self.memory_bytes_per_s + other.memory_bytes_per_s) / 2
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a run had to compute and to move through memory at least."""

    flops: float
    num_bytes: float

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds below which no implementation can get on a machine with these ceilings."""
        return max(self.flops / ceilings.flops_per_s, self.num_bytes / ceilings.memory_bytes_per_s)


def measure(model: Lfm2Model) -> Ceilings:
    """Both ceilings: the rate sustained over a second of passes at the best row count, and the best bandwidth."""
    return Ceilings(max(_linear_rate(model, rows) for rows in _ROW_COUNTS), _bandwidth(model.device))


def count(stats: EngineStats, config: ModelConfig, itemsize: int) -> Work:
    """FLOP and bytes of the steps in ``stats``.

    FLOP: two for each weight a token meets, four for each head dimension and position it attends to. Bytes: every
    weight once a step, and the keys and values each sequence has so far once a step.
    """
    tokens = stats.num_prefill_tokens + stats.num_decode_tokens
    per_position = 4 * config.num_heads * config.head_dim * config.num_attention_layers
    flops = (
        2.0 * config.linear_params_per_token * tokens
        + 2.0 * config.logits_params_per_token * stats.num_output_tokens
        + float(per_position) * stats.num_attended
    )
    weights = (config.linear_params_per_token + config.logits_params_per_token) * itemsize
    kv = 2 * config.num_kv_heads * config.head_dim * config.num_attention_layers * itemsize
    return Work(flops, float(weights) * stats.num_steps + float(kv) * stats.num_kv_read)


def _times_s(work: Callable[[], object], device: torch.device, least_s: float) -> list[float]:
    """Durations of repeated calls, until there are ``_REPEATS`` of them that took ``least_s`` together."""
    work()
    times: list[float] = []
    while len(times) < _REPEATS or sum(times) < least_s:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times


@torch.inference_mode()
def _linear_rate(model: Lfm2Model, rows: int) -> float:
    """FLOP/s of one pass over every layer's linears at ``rows`` rows."""
    config = model.config
    widths = {config.hidden_size, config.ff_dim, config.num_heads * config.head_dim}
    x = {width: torch.randn(rows, width).to(model.device, model.dtype) for width in widths}
    attended = config.num_heads * config.head_dim

    def one_pass() -> None:
        for layer in model.layers:
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                mixer.qkv(x[config.hidden_size])
                mixer.out_proj(x[attended])
            else:
                mixer.in_proj(x[config.hidden_size])
                mixer.out_proj(x[config.hidden_size])
            layer.feed_forward.gate_up(x[config.hidden_size])
            layer.feed_forward.down(x[config.ff_dim])

    sustained_s = statistics.median(_times_s(one_pass, model.device, _SUSTAINED_S))
    return 2.0 * config.linear_params_per_token * rows / sustained_s


def _bandwidth(device: torch.device) -> float:
    """Bytes per second, the better of a large copy (read and written bytes) and a large sum (read only)."""
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * _COPY_BYTES / min(_times_s(lambda: target.copy_(source), device, 0.0))
    summed = _COPY_BYTES / min(_times_s(source.sum, device, 0.0))
    return max(copied, summed)

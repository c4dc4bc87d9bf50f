"""Roofline of a run: the least work that its steps need, over the measured ceilings of its machine.

The engine counts the work, ``rates`` measures FLOP/s and bytes/s. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.model.config import ATTENTION, ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates that this machine was measured to sustain."""

    flops_per_s: float
    memory_bytes_per_s: float

    def mean(self, other: Ceilings) -> Ceilings:
        """The mean of two measurements, for a run between them."""
        return Ceilings(
            (self.flops_per_s + other.flops_per_s) / 2,
            (self.memory_bytes_per_s + other.memory_bytes_per_s) / 2,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a run has to compute and to move through memory."""

    flops: float
    num_bytes: float

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds that any implementation takes at least on a machine with these ceilings."""
        return max(self.flops / ceilings.flops_per_s, self.num_bytes / ceilings.memory_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Costs:
    """FLOP and bytes per unit of each thing that the engine counts.

    FLOP: two per weight that a token uses, four per head dimension and position that it attends to. All work after the
    last attention's keys and values is counted with the logits; one token per sequence and step attends there. Bytes:
    per step every weight (the expected share of experts) and each sequence's keys and values. Layers with a window
    count at most that many positions. Counts assume a causal model: in others each of n tokens attends to n positions,
    not (n + 1) / 2.
    """

    flops_per_token: int
    flops_per_logits: int
    flops_per_attended: int
    bytes_per_step: int
    bytes_per_kv_read: int
    flops_per_kv_read: int
    flops_per_window_attended: int
    flops_per_window_read: int
    bytes_per_window_read: int
    bytes_of_experts: int

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int, weight_bytes: float, kv_cache_dtype: str = "auto") -> Costs:
        """Costs of a model with ``weight_bytes`` per weight; cached numbers of "auto" have ``itemsize`` bytes."""
        tail, windows = config.tail_params_per_token, [bool(s.window) for s in config.layers if s.mixer == ATTENTION]
        attended, read = 4 * config.num_heads * config.head_dim, config.kv_position_bytes(itemsize, kv_cache_dtype)
        read //= max(len(windows), 1)  # in one layer
        inner, last = windows[:-1], windows[-1:]
        ahead = 0 if config.is_causal else attended * len(inner)
        return cls(
            flops_per_token=2 * (config.linear_params_per_token - tail) - ahead,
            flops_per_logits=2 * (config.logits_params_per_token + tail),
            flops_per_attended=attended * inner.count(False) + ahead,
            bytes_per_step=round(
                (config.linear_params - config.expert_params + config.logits_params_per_token) * weight_bytes
            ),
            bytes_per_kv_read=read * windows.count(False),
            flops_per_kv_read=attended * last.count(False),
            flops_per_window_attended=attended * inner.count(True),
            flops_per_window_read=attended * last.count(True),
            bytes_per_window_read=read * windows.count(True),
            bytes_of_experts=round(config.expert_params * weight_bytes),
        )

    def work(self, counts: Mapping[str, Any]) -> Work:
        """The work done, from the counts of ``EngineStats``."""
        tokens = counts["num_prefill_tokens"] + counts["num_decode_tokens"]
        flops = (
            self.flops_per_token * tokens
            + self.flops_per_logits * counts["num_logits"]
            + self.flops_per_attended * counts["num_attended"]
            + self.flops_per_kv_read * counts["num_kv_read"]
            + self.flops_per_window_attended * counts["num_window_attended"]
            + self.flops_per_window_read * counts["num_window_read"]
        )
        num_bytes = (
            self.bytes_per_step * counts["num_steps"]
            + self.bytes_of_experts * counts["sum_experts"]
            + self.bytes_per_kv_read * counts["num_kv_read"]
            + self.bytes_per_window_read * counts["num_window_read"]
        )
        return Work(float(flops), float(num_bytes))


def excess_reason(share: float | None) -> str:
    """The reason why a share of the roofline is above one; "" if it is not."""
    over = "above 100%: weights were in the processor's cache, or rates measured under load"
    return over if share is not None and share > 1 else ""

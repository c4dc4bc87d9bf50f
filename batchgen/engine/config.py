"""How large a step and its state may be. Frozen; knows no torch, so the scheduler's tests need none."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchgen.core.errors import UsageError
from batchgen.core.units import shown

_MOST = {"max_num_batched_tokens": 1 << 20, "max_num_seqs": 1 << 16, "block_size": 1 << 16}  # far beyond any use


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user may set; None means "chosen for the machine".

    Attributes:
        max_num_batched_tokens: the token budget, most tokens a step computes.
        max_num_seqs: most RUNNING sequences.
        block_size: tokens per KV block.
        kv_memory: bytes of KV blocks.
        max_model_len: longest prompt plus output, in tokens.
        look_ahead: most requests pulled from the input but not yet admitted.
        threads: CPU threads of a step.
        prefix_caching: whether equal beginnings of prompts are computed once.
        share_duplicates: whether identical greedy requests are computed once.
        longest_first: whether the longest expected are admitted first, not those that came first.
        forecast_memory: whether admission looks at the memory that running sequences will still need.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_memory: int | None = None
    max_model_len: int | None = None
    look_ahead: int | None = None
    threads: int | None = None
    prefix_caching: bool = True
    share_duplicates: bool = True
    longest_first: bool = True
    forecast_memory: bool = True

    def __post_init__(self) -> None:
        """Refuse values below 1, and above what the host has memory to keep track of.

        Raises:
            UsageError: names the value.
        """
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool) and value < 1:
                raise UsageError(f"{name} {value}: must be at least 1")
            if value is not None and value > _MOST.get(name, value):
                raise UsageError(f"{name} {shown(value)}: must be at most {_MOST[name]}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes the scheduler works with, all resolved and positive, and its policies; see ``EngineConfig``."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_caching: bool = True
    longest_first: bool = True
    forecast_memory: bool = True

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of one sequence whose state can be held at once."""
        return self.num_blocks * self.block_size

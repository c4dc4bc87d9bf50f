"""Sizes of the engine once they are resolved. Knows no torch, so the scheduler's tests need none.

``EngineConfig`` is what the user may set; ``engine.sizes`` turns it into a ``SchedulerConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config.job import EngineConfig

__all__ = ["EngineConfig", "SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes the scheduler works with, all resolved and positive, and its policies; see ``EngineConfig``.

    ``kv_dtype`` is "auto" where keys and values are kept in the type in which they are computed; ``max_drafts`` are the
    most drafts of a sequence in a step; ``admits_in_batches`` is for devices that run single tokens far cheaper than
    steps with prompts.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    prefix_caching: bool = True
    longest_first: bool = True
    forecast_memory: bool = True
    kv_dtype: str = "auto"
    max_drafts: int = 0
    admits_in_batches: bool = False

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of one sequence whose state can be held at once."""
        return self.num_blocks * self.block_size

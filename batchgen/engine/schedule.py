"""One step's work, decided by the scheduler and read by all later parts of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import ge
from typing import TYPE_CHECKING

from batchgen.engine.sequence import Sequence

if TYPE_CHECKING:  # a schedule is made without torch
    from batchgen.kernels.inputs import PendingTokens


def _attended(count: int, window: int) -> int:
    """Positions that the first ``count`` tokens of a sequence attend to, each to at most ``window``."""
    growing = min(count, window)
    return growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True)
class Schedule:
    """One step's work. Cached properties keep the value of their first read; the others are computed at each read.

    Attributes:
        entries: num_scheduled_tokens, at least 1, by sequence, in order.
        resumed: sequences that start after a cached prefix; its last block brings their convolution state.
        pending: ids of tokens that only the device knows, or None.
    """

    entries: dict[Sequence, int]
    resumed: tuple[Sequence, ...] = ()
    pending: PendingTokens | None = None

    @cached_property
    def sequences(self) -> list[Sequence]:
        return list(self.entries)

    @cached_property
    def counts(self) -> list[int]:
        return list(self.entries.values())

    @cached_property
    def starts(self) -> list[int]:
        """The first position that each sequence computes. Read before ``Scheduler.on_launched``."""
        return [s.num_computed_tokens for s in self.sequences]

    @cached_property
    def watched(self) -> list[Sequence]:
        """The sequences that may need more than a draw, or may end for other reasons than an end token."""
        return [s for s in self.entries if not s.generation.fast_path_until]

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @cached_property
    def is_single(self) -> bool:
        return self.num_tokens == len(self.entries)

    def num_attended(self, window: int = 0) -> int:
        """Positions attended to, summed over the step's tokens: all up to its own, or the last ``window``.

        Call before ``Scheduler.on_launched``.
        """
        if not window:
            own = self.counts if self.is_single else [n * (n + 1) // 2 for n in self.counts]
            return sum([start * n for start, n in zip(self.starts, self.counts, strict=True)], sum(own))
        spans = zip(self.starts, self.counts, strict=True)
        return sum(_attended(start + n, window) - _attended(start, window) for start, n in spans)

    def num_decoded(self) -> int:
        """Generated tokens of this run that the step computes for the first time. Call before ``on_launched``."""
        firsts = [s.decoded_from for s in self.sequences]
        if all(map(ge, self.starts, firsts)):
            return self.num_tokens
        rows = zip(self.starts, self.counts, firsts, strict=True)
        return sum(min(n, max(0, start + n - first)) for start, n, first in rows)

    @cached_property
    def completing(self) -> list[Sequence]:
        """The sequences that do not owe tokens after the step, so that their next token can be sampled."""
        # ``Sequence.completes``, without a call for each
        return [s for s, n in self.entries.items() if s.generates and s.num_computed_tokens + n == len(s.token_ids)]

    @property
    def needs_host(self) -> bool:
        """Whether ``Generation.needs_host`` of a sequence is true."""
        return any(s.generation.needs_host for s in self.watched)

    @property
    def has_masks(self) -> bool:
        """Whether some tokens may be forbidden to a sequence once it is sampled."""
        generations = [s.generation for s in self.watched]
        return any(g.constraint is not None or g.rules is not None or g.closing is not None for g in generations)

    @cached_property
    def scored(self) -> list[tuple[Sequence, range]]:
        """The indexes of the tokens that this step's logits score, by sequence."""
        wanted = [s for s in self.watched if s.generation.is_scored]
        return [(s, indexes) for s in wanted if (indexes := s.scored_in(self.entries[s]))]

"""One step's work, as the scheduler decides it and all that follows reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from operator import ge

from batchgen.engine.sequence import Sequence


def _attended(count: int, window: int) -> int:
    """Positions that the first ``count`` tokens of a sequence attend to, each to at most ``window``."""
    growing = min(count, window)
    return growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True)
class Schedule:
    """One step's work; what is derived from it is that of the moment when it was first asked for.

    Attributes:
        entries: ordered (sequence, num_scheduled_tokens), every count at least 1.
        resumed: sequences that start behind a cached prefix, whose convolution state comes with its last block.
        drafts: tokens to be computed behind all that a sequence owes, beside those counted.
        num_steps: decode steps that are launched one behind the other and counted as one schedule. Each computes one
            token of each sequence, which the step before has sampled; one that has fewer tokens left is computed in
            vain once it is at its end.
    """

    entries: tuple[tuple[Sequence, int], ...]
    resumed: tuple[Sequence, ...] = ()
    drafts: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)
    num_steps: int = 1

    @cached_property
    def sequences(self) -> list[Sequence]:
        return [s for s, _ in self.entries]

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each sequence, without drafts."""
        return [count for _, count in self.entries]

    @cached_property
    def starts(self) -> list[int]:
        """The first position that each sequence computes. Ask before booking."""
        return [s.num_computed_tokens for s in self.sequences]

    @cached_property
    def pending(self) -> list[int]:
        """``num_pending`` of each sequence; one that has any is scheduled for that token alone."""
        return [s.num_pending for s in self.sequences]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed in all steps."""
        return sum(self.counts)

    @property
    def num_drafts(self) -> int:
        """Drafts computed in the step."""
        return sum(map(len, self.drafts.values()))

    @cached_property
    def is_single(self) -> bool:
        """Whether each sequence has one token in each step, beside drafts."""
        return self.num_steps > 1 or self.num_tokens == len(self.entries)

    @property
    def unended(self) -> Schedule:
        """The schedule without the sequences that have ended since it was made."""
        entries = tuple([entry for entry in self.entries if entry[0].finished_at is None])
        return self if len(entries) == len(self.entries) else replace(self, entries=entries)

    def num_attended(self, window: int = 0) -> int:
        """Positions that the step's tokens attend to: each to itself and all before it, or ``window`` of these.

        Ask before booking.
        """
        if not window:
            own = [n * (n + 1) // 2 for n in self.counts] if self.num_tokens > len(self.entries) else self.counts
            return sum([start * n for start, n in zip(self.starts, self.counts, strict=True)], sum(own))
        spans = zip(self.starts, self.counts, strict=True)
        return sum(_attended(start + n, window) - _attended(start, window) for start, n in spans)

    def num_decoded(self) -> int:
        """How many of the step's tokens this run generated and has not computed before. Ask before booking."""
        firsts = [s.decoded_from for s in self.sequences]
        if all(map(ge, self.starts, firsts)):
            return self.num_tokens
        rows = zip(self.starts, self.counts, firsts, strict=True)
        return sum(min(n, max(0, start + n - first)) for start, n, first in rows)

    @cached_property
    def completing(self) -> list[Sequence]:
        """The sequences that will owe nothing after the step, so that their next token can be sampled."""
        if self.num_steps > 1:
            return self.sequences
        return [s for s, n in self.entries if s.num_pending or s.completes(n)]  # a pending token is all that it owes

    @property
    def sampling(self) -> Iterable[tuple[Sequence, int]]:
        """``completing``, with how many tokens are sampled for each."""
        return self.entries if self.num_steps > 1 else zip(self.completing, repeat(1))

    @cached_property
    def scored(self) -> list[tuple[Sequence, range]]:
        """The tokens (indexes) that this step's logits score, by sequence."""
        unscored = [(s, count) for s, count in self.entries if s.next_scored < s.end_scored]
        return [(s, found) for s, count in unscored if (found := s.scored_in(count))]

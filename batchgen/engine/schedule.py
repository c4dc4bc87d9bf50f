"""One step's work, as the scheduler decides it and all that follows reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from operator import ge

from batchgen.engine.sequence import Sequence


def _attended(count: int, window: int) -> int:
    """Positions that the first ``count`` tokens of a sequence attend to, each to at most ``window``."""
    growing = min(count, window)
    return growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True)
class Schedule:
    """One step's work. Cached properties keep what they were when first read; the others look anew.

    Attributes:
        entries: ordered (sequence, num_scheduled_tokens), every count at least 1.
        resumed: sequences that start behind a cached prefix, whose convolution state comes with its last block.
    """

    entries: tuple[tuple[Sequence, int], ...]
    resumed: tuple[Sequence, ...] = ()

    @cached_property
    def sequences(self) -> list[Sequence]:
        return [s for s, _ in self.entries]

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of each sequence."""
        return [count for _, count in self.entries]

    @cached_property
    def starts(self) -> list[int]:
        """The first position that each sequence computes. Ask before booking."""
        return [s.num_computed_tokens for s in self.sequences]

    @cached_property
    def pending(self) -> list[int]:
        """``num_in_flight`` of each sequence; one that has any is scheduled for that token alone."""
        return [s.num_in_flight for s in self.sequences]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.counts)

    @cached_property
    def is_single(self) -> bool:
        """Whether each sequence has one token."""
        return self.num_tokens == len(self.entries)

    @property
    def without_finished(self) -> Schedule:
        """The schedule without the sequences that have ended since it was made."""
        entries = tuple([entry for entry in self.entries if entry[0].generation.finished_at is None])
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
        # A pending token is all that its sequence owes; the rest is ``Sequence.completes``, without a call for each.
        return [
            s
            for s, n in self.entries
            if s.num_in_flight or (s.generates and s.num_computed_tokens + n == len(s.token_ids))
        ]

    @property
    def needs_host(self) -> bool:
        """Whether a sequence needs tokens of the step before on the host, or gives more than a token id."""
        return any(s.generation.needs_host for s, _ in self.entries if not s.generation.unwatched_until)

    @property
    def has_masks(self) -> bool:
        """Whether some tokens may be forbidden to a sequence that is sampled."""
        watched = [s.generation for s in self.completing if not s.generation.unwatched_until]
        return any(g.constraint is not None or g.rules is not None for g in watched)

    @cached_property
    def scored(self) -> list[tuple[Sequence, range]]:
        """The tokens (indexes) that this step's logits score, by sequence."""
        wanted = [e for e in self.entries if not (own := e[0].generation).unwatched_until and own.is_scored]
        return [(s, found) for s, count in wanted if (found := s.scored_in(count))]

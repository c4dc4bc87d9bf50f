"""What the scheduler decided for a step: the one thing that travels from it to the model and the sampler."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work.

    Attributes:
        entries: ordered (sequence, num_scheduled_tokens), every count at least 1.
        resumed: sequences that start behind a cached prefix, whose convolution state comes with its last block.
    """

    entries: tuple[tuple[Sequence, int], ...]
    resumed: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(count for _, count in self.entries)

    @property
    def completing(self) -> list[Sequence]:
        """The sequences that will owe nothing after the step, so that their next token can be sampled."""
        return [s for s, count in self.entries if s.completes(count)]

    @property
    def scored(self) -> list[tuple[Sequence, range]]:
        """The tokens (indexes) that this step's logits score, by sequence."""
        return [(s, found) for s, count in self.entries if (found := s.scored_in(count))]

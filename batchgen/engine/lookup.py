"""Where the last tokens of a sequence have come before, and what followed them there."""

from __future__ import annotations

from dataclasses import dataclass

_SIZES = (3, 2)  # of the runs of tokens that are looked up, the longest first
_TOKEN_BITS = 32
_LEAST_HITS = 0.2  # share of drafts accepted below which a sequence pauses
_PAUSE = 32  # tokens
_WEIGHT = 0.25  # of the newest in moving averages


class NGrams:
    """The latest continuation of each run of two or three of ``tokens``, a list that only grows.

    A run is taken in once it is asked for one, so that nothing is spent where drafts are of no use; it costs a
    microsecond and some 200 bytes a token.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._places: dict[int, int] = {}
        self._num_seen = 0

    def find(self, last: list[int]) -> int | None:
        """The index in ``tokens`` at which ``last``, the end of some text, was continued, by its longest known run."""
        for index in range(self._num_seen, len(self.tokens)):
            for size in _SIZES:
                if index >= size:
                    self._places[_run(self.tokens[index - size : index])] = index
        self._num_seen = len(self.tokens)
        found = (self._places.get(_run(last[-size:])) for size in _SIZES if len(last) >= size)
        return next((place for place in found if place is not None), None)


def _run(tokens: list[int]) -> int:
    """A number for a run of tokens, which needs less memory than a tuple."""
    run = len(tokens)
    for token in tokens:
        run = run << _TOKEN_BITS | token
    return run


@dataclass(slots=True)
class Lookup:
    """What one sequence has to look up, and how it has fared."""

    grams: NGrams
    hits: float = 0.5  # moving average of the share of drafts that were accepted
    accepted: float = 2.0  # moving average of their number
    pauses_until: int = 0  # tokens of the sequence

    def book(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """Learn from a step's drafts; the sequence has ``num_tokens`` now."""
        self.hits += _WEIGHT * (num_accepted / num_drafted - self.hits)
        self.accepted += _WEIGHT * (num_accepted - self.accepted)
        if self.hits < _LEAST_HITS:
            self.pauses_until, self.hits = num_tokens + _PAUSE, 2 * _LEAST_HITS

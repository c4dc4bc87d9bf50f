"""Strikes against rows that were in flight when a worker was lost: which are suspects, and which did it.

A row that ends its worker each time would end them all. Only one that was alone at losses is convicted, as workers also
go by chance. Where they go often, more is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView
from dataclasses import dataclass

_SUSPECT_AT = 2  # losses
_CONVICTED_AT = 2  # losses alone
# Losses more that are asked for where workers go by chance: to run alone costs little, to be convicted all.
_MAX_DOUBT = 2
_MAX_DOUBT_OF_GUILT = 6


@dataclass(slots=True)
class Strike:
    """Losses at which a row was in flight, those at which it was ``alone``, and the number of the first."""

    first: int
    num_losses: int = 0
    num_alone: int = 0


class Strikes:
    """Open rows that were in flight at a loss; ``num_losses`` are those that no convicted row explains."""

    def __init__(self) -> None:
        self.num_losses = 0
        self._by_key: dict[int, Strike] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    @property
    def keys(self) -> KeysView[int]:
        """The rows with a strike."""
        return self._by_key.keys()

    def add(self, keys: Collection[int], *, is_alone: bool) -> None:
        """Book the loss of a worker with these rows in flight; ``is_alone``: there was one, in quarantine."""
        self.num_losses += bool(keys)
        for key in keys:
            strike = self._by_key.setdefault(key, Strike(self.num_losses))
            strike.num_losses += 1
            strike.num_alone += is_alone

    def forget(self, key: int) -> None:
        """The row is answered."""
        self._by_key.pop(key, None)

    def convict(self, key: int) -> None:
        """The row is answered, and the losses that it saw alone were its own doing, which casts no doubt on others."""
        self.num_losses -= self._by_key.pop(key).num_alone

    def is_suspect(self, key: int) -> bool:
        """Whether the row must run alone."""
        strike = self._by_key.get(key)
        return strike is not None and strike.num_losses >= _SUSPECT_AT + min(_MAX_DOUBT, self._num_others(strike))

    def is_convicted(self, key: int) -> bool:
        """Whether the row is taken to be what ended its workers."""
        strike = self._by_key[key]
        return strike.num_alone >= _CONVICTED_AT + min(_MAX_DOUBT_OF_GUILT, self._num_others(strike))

    def _num_others(self, strike: Strike) -> int:
        """Losses after the row's first one at which it was not there."""
        return max(0, self.num_losses - strike.first + 1 - strike.num_losses)

"""Poison rows: which rows were in flight when workers were lost, which must run alone, and which ended them.

A row that ends its worker each time would end them all. Only one that was alone at losses is poison, as workers also
go by chance. Where they go often, more losses are asked for. A row that hangs its workers is poison only if other rows
finish meanwhile: where none does, the machine hangs.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView
from dataclasses import dataclass

_ALONE_AFTER = 2  # losses
_POISON_AFTER = 2  # losses alone
# Losses more that are asked for where workers go by chance: to run alone costs little, to be taken for poison all.
_MAX_MORE_ALONE = 2
_MAX_MORE_POISON = 6


@dataclass(slots=True)
class RowLosses:
    """Losses at which a row was in flight, those at which it was ``alone``, and the number of the first.

    ``num_finished`` rows had been finished by then.
    """

    first: int
    num_finished: int
    num_losses: int = 0
    num_alone: int = 0


class PoisonRows:
    """Open rows that were in flight at a loss; ``num_losses`` are those that no poison row explains.

    ``num_finished`` counts the answers of workers, to any row.
    """

    def __init__(self) -> None:
        self.num_losses = self.num_finished = 0
        self._by_key: dict[int, RowLosses] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    @property
    def keys(self) -> KeysView[int]:
        """The rows that were in flight at a loss."""
        return self._by_key.keys()

    def add(self, keys: Collection[int], *, is_alone: bool) -> None:
        """Book the loss of a worker with these rows in flight; ``is_alone``: its one row was isolated."""
        self.num_losses += bool(keys)
        for key in keys:
            losses = self._by_key.setdefault(key, RowLosses(self.num_losses, self.num_finished))
            losses.num_losses += 1
            losses.num_alone += is_alone

    def forget(self, key: int) -> None:
        """The row is answered."""
        self._by_key.pop(key, None)

    def blame(self, key: int) -> None:
        """The row is answered as poison: the losses that it saw alone were its own doing, and clear the others."""
        self.num_losses -= self._by_key.pop(key).num_alone

    def must_run_alone(self, key: int) -> bool:
        """Whether the row is to be isolated."""
        losses = self._by_key.get(key)
        return losses is not None and losses.num_losses >= _ALONE_AFTER + min(_MAX_MORE_ALONE, self._num_others(losses))

    def is_poison(self, key: int) -> bool:
        """Whether the row is taken to be the cause of its workers' ends."""
        losses = self._by_key[key]
        return losses.num_alone >= _POISON_AFTER + min(_MAX_MORE_POISON, self._num_others(losses))

    def others_go_on(self, key: int) -> bool:
        """Whether other rows were finished since the first loss with the row."""
        return self.num_finished > self._by_key[key].num_finished

    def _num_others(self, losses: RowLosses) -> int:
        """Losses after the row's first one at which it was not there."""
        return max(0, self.num_losses - losses.first + 1 - losses.num_losses)

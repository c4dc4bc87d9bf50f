"""Which rows are finished and where the journal holds them: eight bytes a row, whatever the row's size.

A million rows take 8 MB and a lookup is an array access. It never touches a file; the journal gives meaning to places.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

_ABSENT = -1
_OFFSET_BITS = 40  # a segment is rotated long before 1 TiB; this leaves 22 bits for its number


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finished row's record starts, and whether it is an error."""

    segment: int
    offset: int
    is_error: bool


class DoneSet:
    """The finished rows of one shard, by index: ``index in done``, ``len(done)``, ``done.first_gap``.

    Shard ``(i, n)`` holds the rows with ``index % n == i - 1``; a row of another shard is never in the set.
    """

    def __init__(self, shard: tuple[int, int] = (1, 1)) -> None:
        number, self._step = shard
        self._first = number - 1
        self._packed = array("q")
        self._gap = 0  # all positions before it are filled
        self.num_results = 0
        self.num_errors = 0

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int):
            return False
        position, rest = divmod(index - self._first, self._step)
        return not rest and 0 <= position < len(self._packed) and self._packed[position] != _ABSENT

    def __len__(self) -> int:
        return self.num_results + self.num_errors

    def __iter__(self) -> Iterator[int]:
        """Indexes in ascending order."""
        return (self._first + at * self._step for at, packed in enumerate(self._packed) if packed != _ABSENT)

    def indexes(self, *, errors: bool) -> Iterator[int]:
        """Indexes of the rows that ended in an error, or of those that ended in a result, in ascending order."""
        found = enumerate(self._packed)
        return (self._first + at * self._step for at, packed in found if packed != _ABSENT and packed & 1 == errors)

    @property
    def first_gap(self) -> int:
        """The smallest index of the shard that is not finished; amortised over all calls it costs one pass."""
        packed = self._packed
        while self._gap < len(packed) and packed[self._gap] != _ABSENT:
            self._gap += 1
        return self._first + self._gap * self._step

    @property
    def num_passed(self) -> int:
        """How many rows of the shard there are up to the last finished one, finished or not."""
        return len(self._packed)

    def is_ours(self, index: int) -> bool:
        """Whether the row belongs to this shard, finished or not."""
        return index >= 0 and index % self._step == self._first

    def covers(self, num_rows: int) -> bool:
        """Whether these are exactly the shard's rows of an input of ``num_rows`` rows."""
        return self.first_gap >= num_rows and len(self) == len(range(self._first, num_rows, self._step))

    def add(self, index: int, segment: int, offset: int, is_error: bool) -> None:
        """Note where a row's record lies, in place of an earlier one. Raises ValueError for a row of another shard."""
        if not self.is_ours(index):
            raise ValueError(f"row {index} is not in this shard")
        packed, position = self._packed, (index - self._first) // self._step
        if position >= len(packed):
            packed.extend([_ABSENT] * (position + 1 - len(packed)))
        elif packed[position] != _ABSENT:
            self._count(packed[position] & 1, -1)
        packed[position] = (segment << _OFFSET_BITS | offset) << 1 | is_error
        self._count(is_error, 1)

    def place(self, index: int) -> Place:
        """Where the record of a finished row lies. Raises KeyError for a row that is not finished."""
        if index not in self:
            raise KeyError(index)
        packed = self._packed[(index - self._first) // self._step]
        segment, offset = divmod(packed >> 1, 1 << _OFFSET_BITS)
        return Place(segment, offset, bool(packed & 1))

    def previous(self, index: int) -> int | None:
        """The index of the shard's row before ``index``, or None for its first row."""
        return index - self._step if index - self._step >= 0 else None

    def _count(self, is_error: int, change: int) -> None:
        if is_error:
            self.num_errors += change
        else:
            self.num_results += change

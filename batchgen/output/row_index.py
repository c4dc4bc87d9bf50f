"""Index of the finished rows: the place of each in the journal, in eight bytes per row.

A million rows take 8 MB, and a lookup is an array access. It does not access files.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from batchgen.core.shard import WHOLE, Shard

_ABSENT = -1
_OFFSET_BITS = 40  # a segment is rotated long before 1 TiB; this leaves 22 bits for its number


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Place of a finished row's record: its segment, the offset of its line, and its kind."""

    segment: int
    offset: int
    is_error: bool


class RowIndex:
    """The finished rows of one shard, by index: ``index in done``, ``len(done)``, ``done.first_gap``.

    A row of another shard is never in the set.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self._rows = shard.rows(sys.maxsize)  # the index of each position in _packed
        self._packed = array("q")
        self._gap = 0  # all positions before it are filled
        self.num_results = 0
        self.num_errors = 0

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int) or index not in self._rows:
            return False
        position = self._rows.index(index)
        return position < len(self._packed) and self._packed[position] != _ABSENT

    def __len__(self) -> int:
        return self.num_results + self.num_errors

    def __iter__(self) -> Iterator[int]:
        return (index for index, _ in self._finished())

    def indexes(self, *, errors: bool) -> Iterator[int]:
        """Ascending indexes of the rows that ended in an error, or in a result."""
        return (index for index, packed in self._finished() if packed & 1 == errors)

    @property
    def first_gap(self) -> int:
        """The smallest unfinished index of the shard; all calls together cost one pass."""
        packed = self._packed
        while self._gap < len(packed) and packed[self._gap] != _ABSENT:
            self._gap += 1
        return self._rows[self._gap]

    @property
    def num_passed(self) -> int:
        """Number of the shard's rows up to the last finished one, finished or not."""
        return len(self._packed)

    def num_below(self, index: int) -> int:
        """Number of the shard's rows before ``index``, finished or not."""
        return len(range(self._rows.start, index, self._rows.step))

    def covers(self, num_rows: int) -> bool:
        """Whether these are exactly the shard's rows of an input of ``num_rows`` rows."""
        return self.first_gap >= num_rows and len(self) == self.num_below(num_rows)

    def add(self, index: int, segment: int, offset: int, is_error: bool) -> None:
        """Store where a row's record is, replacing an earlier one. Raises ValueError for a row of another shard."""
        if index not in self._rows:
            raise ValueError(f"row {index} is not in this shard")
        packed, position = self._packed, self._rows.index(index)
        if position >= len(packed):
            packed.extend([_ABSENT] * (position + 1 - len(packed)))
        elif packed[position] != _ABSENT:
            self._count(packed[position] & 1, -1)
        packed[position] = (segment << _OFFSET_BITS | offset) << 1 | is_error
        self._count(is_error, 1)

    def location(self, index: int) -> RowLocation:
        """The location of a finished row's record. Raises KeyError for a row that is not finished."""
        if index not in self:
            raise KeyError(index)
        packed = self._packed[self._rows.index(index)]
        segment, offset = divmod(packed >> 1, 1 << _OFFSET_BITS)
        return RowLocation(segment, offset, bool(packed & 1))

    def previous(self, index: int) -> int | None:
        """The index of the shard's row before ``index``, or None for its first row."""
        position = self._rows.index(index)
        return self._rows[position - 1] if position else None

    def _finished(self) -> Iterator[tuple[int, int]]:
        rows = zip(self._rows, self._packed, strict=False)
        return ((index, packed) for index, packed in rows if packed != _ABSENT)

    def _count(self, is_error: int, change: int) -> None:
        self.num_errors += change * is_error
        self.num_results += change * (1 - is_error)

"""The rows of the input that one invocation runs: those of its shard that are not finished yet.

Finished rows are passed over without being parsed. It does not judge rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from batchgen.core.records import BadRow, Cursor, Record, Shard
from batchgen.input.source import Reading, Source

COUNT_BYTES = 4 << 30  # larger inputs are not counted beforehand: it would take too long


class RowRange:
    """The rows of ``shard`` that are not ``done``; all rows before the cursor ``start`` are.

    ``num_rows`` is the number of rows of the input, all shards', once they were read to the end.

    Where rows have ids, those of other shards are read too, for their ids alone: the first of two rows with one id
    stays, in whichever shard it is.
    """

    def __init__(
        self,
        source: Source,
        shard: Shard,
        done: Collection[int] = (),
        start: Cursor | None = None,
        *,
        has_ids: bool = False,
    ) -> None:
        self._source = source
        self._shard = shard
        self._done = done
        self._start = start
        self._reads_others = has_ids and shard.count > 1
        self.num_rows = 0

    def read(self) -> Iterator[Record | BadRow]:
        """The rows, from the first unfinished one on."""
        self.num_rows = yield from self._source.read(self._start, self._is_wanted)

    def count(self) -> int | None:
        """How many rows the shard has in all; None where finding out would take too long."""
        total = self._source.num_rows()
        if total is None:
            size = self._source.num_bytes()
            if size is None or size > COUNT_BYTES:
                return None
            total = self.pass_over()
        return len(self._shard.rows(total))

    def pass_over(self) -> int:
        """The number of rows of the input, found by reading to its end without parsing any."""
        reading = Reading(self._source.read(None, lambda index: False))
        for _ in reading:
            pass
        return reading.end

    def _is_wanted(self, index: int) -> bool:
        return index not in self._done if self._shard.owns(index) else self._reads_others

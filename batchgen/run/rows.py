"""Which rows of the input this invocation is about: those of its shard that are not finished yet.

It asks the source for no more than that, so finished rows are passed over unread; it judges rows only for --strict.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.data.journal import Journal
from batchgen.data.reader import Source
from batchgen.errors import UsageError
from batchgen.records import BadRow, Record
from batchgen.run.feed import Builder, Screen, chunked
from batchgen.run.unique_ids import UniqueIds
from batchgen.spec import InputSpec

COUNT_BYTES = 4 << 30  # larger inputs are not counted beforehand: it would take too long
_SHOWN_BAD_ROWS = 5


class RowRange:
    """The rows of shard ``(i, n)`` that ``journal`` does not hold; ``num_seen`` counts the rows passed, all shards'."""

    def __init__(self, source: Source, shard: tuple[int, int], journal: Journal | None = None) -> None:
        self._source = source
        self._first, self._step = shard[0] - 1, shard[1]
        self._journal = journal
        self.num_seen = 0

    def read(self) -> Iterator[Record | BadRow]:
        """The rows, from the first unfinished one on."""
        start = self._journal.resume_cursor if self._journal else None
        self.num_seen = start.index if start else 0
        return self._source.read(start, self._is_wanted)

    def count(self) -> int | None:
        """How many rows the shard has in all; None where finding out would take too long."""
        total = self._source.num_rows()
        if total is None:
            size = self._source.num_bytes()
            if size is None or size > COUNT_BYTES:
                return None
            total = RowRange(self._source, (1, 1)).pass_over()
        return len(range(self._first, total, self._step))

    def pass_over(self) -> int:
        """The number of rows of the input, found by reading to its end without parsing any."""

        def is_wanted(index: int) -> bool:
            self.num_seen = max(self.num_seen, index + 1)
            return False

        for _ in self._source.read(None, is_wanted):
            pass
        return self.num_seen

    def _is_wanted(self, index: int) -> bool:
        self.num_seen = max(self.num_seen, index + 1)
        if index % self._step != self._first:
            return False
        return self._journal is None or index not in self._journal.done


def refuse_bad_rows(rows: RowRange, builder: Builder, spec: InputSpec) -> None:
    """Read and check every row, generating nothing. Raises UsageError that names the first bad ones."""
    ids = UniqueIds(None)
    screen = Screen(spec, builder, ids)
    bad: list[BadRow] = []
    num_bad = 0
    try:
        for chunk in chunked(rows.read()):
            found = [answer for answer in screen.screen(chunk) if isinstance(answer, BadRow)]
            num_bad += len(found)
            bad += found[: _SHOWN_BAD_ROWS - len(bad)]
    finally:
        ids.close()
    if num_bad:
        shown = "".join(f"\n  {row.source}:{row.line}: {row.error.code}: {row.error.message}" for row in bad)
        more = f"\n  and {num_bad - len(bad):,} more" if num_bad > len(bad) else ""
        raise UsageError(f"--strict: {num_bad:,} bad rows, nothing was run:{shown}{more}")

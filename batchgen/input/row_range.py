"""Which rows of the input this invocation is about: those of its shard that are not finished yet.

It asks the source for no more than that, so finished rows are passed over unread; it judges rows only for --strict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Protocol

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import BadRow, Cursor, Record
from batchgen.core.units import counted
from batchgen.input.ids import UniqueIds
from batchgen.input.rows import chunked
from batchgen.input.source import Reading, Source
from batchgen.input.validator import Builder, Screen

COUNT_BYTES = 4 << 30  # larger inputs are not counted beforehand: it would take too long
_SHOWN_BAD_ROWS = 5


class Finished(Protocol):
    """What is asked of a journal: which rows it holds, and where the first other one can be read from."""

    @property
    def done(self) -> Collection[int]:
        """Indexes of finished rows."""

    @property
    def resume_cursor(self) -> Cursor | None:
        """Where reading starts; None is the start of the input."""


class RowRange:
    """The rows of shard ``(i, n)`` that are not finished.

    ``num_rows`` is the number of rows of the input, all shards', once they were read to the end.

    Where rows have ids, those of other shards are read too, for their ids alone: the first of two rows with one id
    stays, in whichever shard it is.
    """

    def __init__(
        self, source: Source, shard: tuple[int, int], finished: Finished | None = None, *, has_ids: bool = False
    ) -> None:
        self._source = source
        self._reads_others = has_ids and shard[1] > 1
        self._first, self._step = shard[0] - 1, shard[1]
        self._finished = finished
        self.num_rows = 0

    def read(self) -> Iterator[Record | BadRow]:
        """The rows, from the first unfinished one on."""
        start = self._finished.resume_cursor if self._finished else None
        self.num_rows = yield from self._source.read(start, self._is_wanted)

    def is_ours(self, index: int) -> bool:
        """Whether a row is of this shard."""
        return index % self._step == self._first

    def num_ours_until(self, index: int) -> int:
        """How many rows up to and including this one are of this shard."""
        return len(range(self._first, index + 1, self._step))

    def count(self) -> int | None:
        """How many rows the shard has in all; None where finding out would take too long."""
        total = self._source.num_rows()
        if total is None:
            size = self._source.num_bytes()
            if size is None or size > COUNT_BYTES:
                return None
            total = self.pass_over()
        return self.num_ours_until(total - 1)

    def pass_over(self) -> int:
        """The number of rows of the input, found by reading to its end without parsing any."""
        reading = Reading(self._source.read(None, lambda index: False))
        for _ in reading:
            pass
        return reading.end

    def _is_wanted(self, index: int) -> bool:
        if not self.is_ours(index):
            return self._reads_others
        return self._finished is None or index not in self._finished.done


def may_have_ids(spec: InputSpec) -> bool:
    """Whether rows can have ids of their own: by a column the job names, or as OpenAI Batch lines."""
    return spec.id is not None or spec.format == "openai-batch" or (spec.format == "auto" and not spec.is_mapped)


class _NoRows:
    """None of the rows is ours: they only claim their ids."""

    def is_ours(self, index: int) -> bool:
        """Never."""
        return False

    def num_ours_until(self, index: int) -> int:
        """None."""
        return 0


def claim_again(source: Source, finished: Finished, spec: InputSpec, builder: Builder, ids: UniqueIds) -> None:
    """Let all rows up to the last finished one claim their ids in input order, after ``ids`` was lost.

    The journal knows ids too, but not who claimed one first: that may be a row still unfinished.
    """
    last = max(finished.done, default=-1)
    screen = Screen(spec, builder, ids, _NoRows())
    for chunk in chunked(takewhile(lambda row: row.index <= last, source.read())):
        screen.screen(chunk)


def refuse_bad_rows(rows: RowRange, builder: Builder, spec: InputSpec, ids: UniqueIds) -> None:
    """Read and check every row that is not finished, generating nothing; ``ids`` hold those of finished ones.

    Raises UsageError that names the first bad ones.
    """
    screen = Screen(spec, builder, ids, rows)
    bad: list[BadRow] = []
    num_bad = 0
    for chunk in chunked(rows.read()):
        found = [answer for answer in screen.screen(chunk) if isinstance(answer, BadRow)]
        num_bad += len(found)
        bad += found[: _SHOWN_BAD_ROWS - len(bad)]
    if num_bad:
        shown = "".join(f"\n  {row.source}:{row.line}: {row.error.code}: {row.error.message}" for row in bad)
        more = f"\n  and {num_bad - len(bad):,} more" if num_bad > len(bad) else ""
        raise UsageError(f"--strict: {counted(num_bad, 'bad row')}, nothing was run:{shown}{more}")

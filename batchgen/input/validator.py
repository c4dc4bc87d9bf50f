"""Row validator: turns chunks of input rows into requests.

It reads each row's id, claims it, and has the rows without an error made into requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import Request, Row
from batchgen.core.shard import WHOLE, Shard
from batchgen.input.ids import UniqueIds
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import chunked, with_id


@dataclass(frozen=True, slots=True)
class RowValidator:
    """Turns chunks of rows into requests and error rows. Rows of other shards than ``shard`` only claim their ids."""

    spec: InputSpec
    builder: RequestBuilder
    ids: UniqueIds
    shard: Shard = WHOLE

    def validate(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Request | None]]:
        """One answer per row of the shard, in order; see ``RequestBuilder.build``.

        The first takes longest: all rows claim their ids and are tokenized with it.
        """
        yield from self.builder.build(self.claim(rows))

    def claim(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of the shard with their ids, see ``claim_ids``; nothing is tokenized."""
        return [row for row in self.claim_ids(rows) if self.shard.owns(row.index)]

    def claim_ids(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their ids; it is an error if an id is missing, invalid or that of an earlier row."""
        named = [with_id(row, self.spec) for row in rows]
        ids = [(row.index, self._id_of(row)) for row in named if row.error is None]
        claims = [(index, row_id) for index, row_id in ids if row_id is not None]
        duplicates = self.ids.claim(claims) if claims else {}
        return [self._duplicate(row, duplicates[row.index]) if row.index in duplicates else row for row in named]

    def _duplicate(self, row: Row, first: int) -> Row:
        message = f"row {first} already has the id {self._id_of(row)!r}"
        return row.failed(RowError(RowErrorCode.DUPLICATE_ID, message))

    def _id_of(self, row: Row) -> str | int | None:
        """The id that a row's result is written with, where another row's result could be written with the same.

        An index that stands for a missing id is a number, which no ``custom_id`` of another row is, unless as text.
        """
        is_mixed = self.ids.as_text and self.spec.format == "auto" and not self.spec.is_mapped
        return str(row.index) if row.id is None and is_mixed else row.id


def rebuild_ids(rows: Iterable[Row], last: int, validator: RowValidator) -> None:
    """Claim the ids of all rows of the input up to ``last``, the last finished one, before a resume reads others.

    The journal knows ids too, but not which row claimed one first: that may be a row still unfinished.
    """
    for chunk in chunked(takewhile(lambda row: row.index <= last, rows)):
        validator.claim_ids(chunk)

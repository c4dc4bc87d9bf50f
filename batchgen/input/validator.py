"""Row validator: turns chunks of input rows into requests and error rows.

It reads each row's id, claims it, and has the remaining rows made into requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from batchgen.config.identity import draw_of
from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, FastPickle, Record, Request, SamplingParams
from batchgen.core.shard import WHOLE, Shard
from batchgen.input.ids import UniqueIds
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import RowProblem, bad_row, chunked, row_id


@dataclass(frozen=True, slots=True)
class Pending(FastPickle):
    """A row on its way through the engine: its id, None where it has none, its sampling and its prompt once known.

    ``prompt_token_ids`` are ``Request.named_tokens``.

    ``output_token_ids`` are tokens that an earlier run generated.
    """

    record: Record
    id: str | int | None
    params: SamplingParams = SamplingParams()  # noqa: RUF009 - it is frozen
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        return self.record.index

    @property
    def key(self) -> int:
        """What requests and results call the row."""
        return self.record.index


@dataclass(frozen=True, slots=True)
class RowValidator:
    """Turns chunks of rows into requests and error rows. Rows of other shards than ``shard`` only claim their ids."""

    spec: InputSpec
    builder: RequestBuilder
    ids: UniqueIds
    shard: Shard = WHOLE

    def validate(self, rows: Sequence[Record | BadRow]) -> Iterator[tuple[Pending, Request] | BadRow]:
        """One answer per row of the shard, in order: its request, or why it cannot run.

        The first takes longest: all rows claim their ids and are tokenized with it.
        """
        yield from build_requests(self.builder, self.claim(rows))

    def claim(self, rows: Sequence[Record | BadRow]) -> list[Pending | BadRow]:
        """The rows of the shard with their ids, see ``claim_ids``; nothing is tokenized."""
        return [row for row in self.claim_ids(rows) if self.shard.owns(row.index)]

    def claim_ids(self, rows: Sequence[Record | BadRow]) -> list[Pending | BadRow]:
        """The rows with their ids; a row whose id is missing, invalid or that of an earlier row is an error row."""
        named = [self._named(row) for row in rows]
        duplicates = self._duplicate_ids(named)
        return [
            self._duplicate(row, duplicates[row.index]) if isinstance(row, Pending) and row.index in duplicates else row
            for row in named  # an error row keeps its own code: it claims its id and loses nothing
        ]

    def _named(self, row: Record | BadRow) -> Pending | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return Pending(row, row_id(row, self.spec))
        except RowProblem as problem:
            return bad_row(row, problem.error, self.spec)

    def _duplicate_ids(self, rows: Sequence[Pending | BadRow]) -> dict[int, int]:
        """The rows whose id another row claimed first: index -> index of that row."""
        known = ((row.index, row.id if isinstance(row, BadRow) else self._known_by(row)) for row in rows)
        claims = [(index, row_id) for index, row_id in known if row_id is not None]
        return self.ids.claim(claims) if claims else {}

    def _duplicate(self, row: Pending, first: int) -> BadRow:
        message = f"row {first} already has the id {self._known_by(row)!r}"
        return bad_row(row.record, RowError(RowErrorCode.DUPLICATE_ID, message), self.spec)

    def _known_by(self, row: Pending) -> str | int | None:
        """The id that a row's result is written with, where another row's result could be written with the same.

        An index that stands for a missing id is a number, which no ``custom_id`` of another row is, unless as text.
        """
        is_mixed = self.ids.as_text and self.spec.format == "auto" and not self.spec.is_mapped
        return str(row.index) if row.id is None and is_mixed else row.id


def build_requests(
    builder: RequestBuilder, rows: Sequence[Pending | BadRow]
) -> Iterator[tuple[Pending, Request] | BadRow]:
    """One answer per row, in order: its request, with what an earlier run generated, or why it cannot run."""
    built = builder.build([row.record for row in rows if isinstance(row, Pending)])
    yield from (row if isinstance(row, BadRow) else _answer(row, next(built)) for row in rows)


def _answer(row: Pending, built: Request | BadRow) -> tuple[Pending, Request] | BadRow:
    if isinstance(built, BadRow):
        return built
    request = replace(built, output_token_ids=row.output_token_ids, draw=draw_of(row.id, row.index))
    return replace(row, params=built.params, prompt_token_ids=built.named_tokens), request


def rebuild_ids(rows: Iterable[Record | BadRow], last: int, validator: RowValidator) -> None:
    """Claim the ids of all rows of the input up to ``last``, the last finished one, before a resume reads others.

    The journal knows ids too, but not which row claimed one first: that may be a row still unfinished.
    """
    for chunk in chunked(takewhile(lambda row: row.index <= last, rows)):
        validator.claim_ids(chunk)

"""From input rows to requests: read in chunks, settle what can never run, hand out the rest as the engine asks.

Error rows go straight to the journal; for every request handed out it remembers the row until the result comes. It
knows nothing of the engine but that somebody pulls, and stops handing out as soon as it is told to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, Record, Request
from batchgen.input.ids import UniqueIds
from batchgen.input.rows import CHUNK_ROWS, RowProblem, bad_row, chunked, row_id
from batchgen.run.clock import Clock
from batchgen.run.ledger import Ledger
from batchgen.run.stop import Stopper

_SLOW_CHUNK_S = 2.0  # chat templates may take seconds for each row, and a stop loses the chunk it interrupts


class Builder(Protocol):
    """What the feed needs of ``RequestBuilder``."""

    def build(self, rows: Sequence[Record]) -> list[Request | BadRow]:
        """One answer per row, in order."""


class Ours(Protocol):
    """What the feed needs of ``RowRange``."""

    def is_ours(self, index: int) -> bool:
        """Whether a row is to be run here."""

    def num_ours_until(self, index: int) -> int:
        """How many rows up to and including this one are."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A row whose request is with the engine: what its user knows it by, if anything, and the choices to score."""

    record: Record
    id: str | int | None
    choices: tuple[str, ...] = ()


class Screen:
    """Turns a chunk of rows into requests and error rows, in order: ids, duplicates, prompts, sampling values."""

    def __init__(self, spec: InputSpec, builder: Builder, ids: UniqueIds, ours: Ours) -> None:
        self._spec = spec
        self._builder = builder
        self._ids = ids
        self.ours = ours

    def screen(self, rows: Sequence[Record | BadRow]) -> list[tuple[Pending, Request] | BadRow]:
        """One answer per row that is ours: what it asks for, or why it cannot run. Other rows only claim their ids."""
        answers: dict[int, tuple[Pending, Request] | BadRow] = {}
        pending: dict[int, Pending] = {}
        for row in rows:
            if isinstance(row, BadRow):
                answers[row.index] = row
                continue
            try:
                pending[row.index] = Pending(row, row_id(row, self._spec))
            except RowProblem as problem:
                answers[row.index] = bad_row(row, problem.error, self._spec)
        for index, first in self._losers(rows, pending).items():
            item = pending.pop(index, None)
            if item is not None:  # an error row keeps its own code, it only lends its id
                known = self._known_by(item)
                error = RowError(RowErrorCode.DUPLICATE_ID, f"id {known!r} is that of row {first} already")
                answers[index] = bad_row(item.record, error, self._spec)
        items = [item for item in pending.values() if self.ours.is_ours(item.record.index)]
        for item, answer in zip(items, self._builder.build([item.record for item in items]), strict=True):
            if isinstance(answer, BadRow):
                answers[item.record.index] = answer
            else:
                answers[item.record.index] = Pending(item.record, item.id, answer.params.choices), answer
        return [answers[row.index] for row in rows if self.ours.is_ours(row.index)]

    def _losers(self, rows: Sequence[Record | BadRow], pending: dict[int, Pending]) -> dict[int, int]:
        claims = []
        for row in rows:
            item = pending.get(row.index)
            known = row.id if isinstance(row, BadRow) else self._known_by(item) if item else None
            if known is not None:
                claims.append((row.index, known))
        return self._ids.claim(claims) if claims else {}

    def _known_by(self, row: Pending) -> str | int | None:
        """What a row's result is known by, where another's could be known by the same.

        An index that stands for a missing id is a number, which no ``custom_id`` of another row is, unless as text.
        """
        is_mixed = self._ids.as_text and self._spec.format == "auto" and not self._spec.is_mapped
        return str(row.record.index) if row.id is None and is_mixed else row.id


class Feed:
    """The requests of a run, lazily.

    ``pending`` holds the rows whose requests are with the engine, by index; ``is_exhausted`` says that there are no
    more rows. Reading, checking and tokenizing is charged to the clock's "read".
    """

    def __init__(self, ledger: Ledger, screen: Screen, stopper: Stopper, clock: Clock) -> None:
        self._ledger = ledger
        self._ours = screen.ours
        self._clock = clock
        self._screen = screen
        self._stopper = stopper
        self.pending: dict[int, Pending] = {}
        self.is_exhausted = False

    def requests(self, rows: Iterable[Record | BadRow]) -> Iterator[Request]:
        """The requests of ``rows`` in order, tokens of an earlier run included; ends early on a stop."""
        most = 1
        chunks = chunked(rows, lambda: most)
        while not self._stopper.requested:
            began_at = time.monotonic()
            with self._clock.on("read"):
                chunk = next(chunks, [])
                answers = self._screen.screen(chunk)
            most = min(2 * most, CHUNK_ROWS) if time.monotonic() - began_at < _SLOW_CHUNK_S else 1
            if not chunk:
                self.is_exhausted = True
                return
            if answers:  # with no row left the run is over, whatever its error rate
                self._ledger.check_error_rate(self._stopper)
            self._ledger.num_read = max(self._ledger.num_read, self._ours.num_ours_until(chunk[-1].index))
            for answer in answers:
                if self._stopper.requested:
                    return
                if isinstance(answer, BadRow):
                    self._ledger.fail(answer)
                else:
                    yield self._hand_out(*answer)

    def _hand_out(self, pending: Pending, request: Request) -> Request:
        self.pending[request.key] = pending
        tokens = self._ledger.journal.partials.get(request.key, ())
        return dataclasses.replace(request, output_token_ids=tokens) if tokens else request

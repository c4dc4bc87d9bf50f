"""Turns chunks of rows into requests and error rows: ids, duplicates, prompts, sampling values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, Record, Request
from batchgen.input.ids import UniqueIds
from batchgen.input.rows import RowProblem, bad_row, row_id


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

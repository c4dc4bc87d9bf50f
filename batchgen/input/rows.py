"""Row errors, row ids and chunks of rows: what readers, the request builder and the validator share.

Inside the input room a problem of a row is an exception; it leaves as a ``BadRow`` value and never stops a job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, Record

_Item = TypeVar("_Item")
CHUNK_ROWS = 256
CHUNK_CHARS = 4 << 20  # a chunk of long rows ends earlier, since it is held in memory


class RowProblem(Exception):
    """One row cannot become a request; ``error`` is what ``errors.jsonl`` will say."""

    def __init__(self, code: RowErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    bytes: "binary data (store it as a string)",
}


def type_name(value: object) -> str:
    """The type of a value from a row in words: "a number", "null"."""
    return _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def wrong_type(what: str, value: object, expected: str) -> RowProblem:
    """The problem of a value of another type than ``expected``, which is in words: "a string"."""
    return RowProblem(RowErrorCode.BAD_TYPE, f"{what} is {type_name(value)}, not {expected}")


def row_id(record: Record, spec: InputSpec) -> str | int | None:
    """The row's own id: the column ``spec.id``, else ``custom_id`` of an OpenAI Batch line, else None.

    Raises RowProblem when that column is missing or holds neither a string nor an integer. It need not be unique.
    """
    columns = record.columns
    name = spec.id or ("custom_id" if spec.is_batch_line(columns) else None)
    if name is None:
        return None
    if name not in columns:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no column {name!r} (the row's id)")
    value = columns[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(f"column {name!r} (the row's id)", value, "a string or an integer")
    return value


def bad_row(record: Record, error: RowError, spec: InputSpec) -> BadRow:
    """The error row of a record that was read but cannot be run; it keeps the record's id where that is valid."""
    try:
        known_id = row_id(record, spec)
    except RowProblem:
        known_id = None
    return BadRow(record.index, record.source, record.line, error, record.columns, record.after, known_id)


def chunked(
    rows: Iterable[Record | BadRow], most: Callable[[], int] = lambda: CHUNK_ROWS
) -> Iterator[list[Record | BadRow]]:
    """Rows in lists of at most ``most()`` rows, which end early where the rows hold much text."""
    return bounded(rows, row_chars, CHUNK_CHARS, most)


def bounded(
    items: Iterable[_Item], chars: Callable[[_Item], int], max_chars: int, most: Callable[[], int] = lambda: sys.maxsize
) -> Iterator[list[_Item]]:
    """``items`` in lists that end once they hold ``most()`` items, or ``max_chars`` characters in all."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += chars(item)
        if len(batch) >= most() or size >= max_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def row_chars(row: Record | BadRow) -> int:
    """About how much memory a row takes, in characters."""
    return num_chars(row.columns if isinstance(row, Record) else row.raw)


def num_chars(value: object) -> int:
    """About how much memory a value takes, in characters."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_chars, value.values()))
    if isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids
            return 8 * len(value)
        return sum(map(num_chars, value))
    return 8


@dataclass(frozen=True, slots=True)
class Embedded:
    """How texts are prepared for vectors: see ``Request.pooling`` and ``config.embed.EmbedSpec``."""

    pooling: str
    prefix: str
    truncates: bool
    dimensions: int

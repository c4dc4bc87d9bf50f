"""Rows out of Arrow record batches, which Parquet files and ``datasets`` both deliver.

Values become what ``to_pylist`` makes of them (dates are dates, binary is bytes); they are given words of JSON where
they are written. A value that cannot be read costs its own row only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, Cursor, Record
from batchgen.core.units import one_line
from batchgen.input.formats.interface import Rows, Wanted

MAX_BATCH_ROWS = 4096
_BATCH_BYTES = 4 << 20
_VALUE_ERRORS = (ValueError, ArithmeticError, LookupError, pa.ArrowException)  # bad UTF-8, dates out of range, ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What error messages call the file, and how many of its rows lie before those read here."""

    name: str
    rows_before: int = 0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """So many rows that the file should have and that cannot be got at."""

    num_rows: int
    message: str


@dataclass(frozen=True, slots=True)
class _BadValues:
    """A row with a value that cannot be read, and the values that can."""

    error: RowError
    readable: dict[str, Any]


def batch_rows(num_rows: int, num_bytes: int) -> int:
    """How many rows to convert at once, so that a batch takes some megabytes whatever the size of a row."""
    return max(1, min(MAX_BATCH_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))


def read_batches(
    batches: Iterable[pa.RecordBatch | Unreadable],
    at: Cursor,
    origin: Origin,
    stop: int | None,
    wanted: Wanted | None,
) -> Rows:
    """Yield the rows of consecutive batches, the first of which begins at ``at``; see ``InputFile.read``."""
    for batch in batches:
        num_rows = batch.num_rows if stop is None else min(batch.num_rows, stop - at.index)
        places = [place for place in range(num_rows) if wanted is None or wanted(at.index + place)]
        for place, row in zip(places, _chosen_rows(batch, places), strict=True):
            index, number = at.index + place, at.row + place + 1
            after = Cursor(at.file, at.offset, number, index + 1)
            line = origin.rows_before + number
            if isinstance(row, _BadValues):
                yield BadRow(index, origin.name, line, row.error, row.readable, after)
            else:
                yield Record(index, origin.name, line, row, after)
        at = Cursor(at.file, at.offset, at.row + num_rows, at.index + num_rows)
        if at.index == stop:
            break
    return at.index


def _chosen_rows(batch: pa.RecordBatch | Unreadable, places: list[int]) -> Iterator[dict[str, Any] | _BadValues]:
    if isinstance(batch, Unreadable):
        error = RowError(RowErrorCode.BAD_ENCODING, batch.message)
        return iter([_BadValues(error, {})] * len(places))
    if not places:
        return iter(())
    return _rows(batch if len(places) == batch.num_rows else batch.take(pa.array(places)))


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | _BadValues]:
    names = batch.schema.names
    try:
        columns = [column.to_pylist() for column in batch.columns]
    except _VALUE_ERRORS:
        for place in range(batch.num_rows):
            yield _row(batch.slice(place, 1))
        return
    if not columns:
        yield from ({} for _ in range(batch.num_rows))
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _row(batch: pa.RecordBatch) -> dict[str, Any] | _BadValues:
    """The one row of ``batch``, or what can be read of it and what is wrong with the first column that cannot."""
    readable: dict[str, Any] = {}
    problem: RowError | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            readable[name] = column.to_pylist()[0]
        except _VALUE_ERRORS as error:
            is_text = isinstance(error, UnicodeDecodeError)
            code = RowErrorCode.BAD_ENCODING if is_text else RowErrorCode.BAD_TYPE
            what = "is not UTF-8" if is_text else f"({column.type}) has a value that cannot be read"
            problem = problem or RowError(code, f"column {name!r} {what}: {one_line(error)}")
    return _BadValues(problem, readable) if problem else readable

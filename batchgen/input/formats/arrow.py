"""Rows of Arrow record batches, which both Parquet files and ``datasets`` give.

Values become what ``to_pylist`` makes of them (dates are dates, binary is bytes) and are converted to JSON types only
on output (``json_line``). A value that cannot be read costs its own row only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import BadRow, Cursor, Record
from batchgen.core.units import one_line
from batchgen.input.formats import Rows, Wanted

_MAX_BATCH_ROWS = 64  # what repeats is stored once, so that rows may be larger than their file says
_BATCH_BYTES = 4 << 20
_VALUE_ERRORS = (ValueError, ArithmeticError, LookupError, pa.ArrowException)  # bad UTF-8, dates out of range, ...
RowValues = tuple[dict[str, Any], RowError | None]  # the values that can be read, and what is wrong with the others


@dataclass(frozen=True, slots=True)
class Unreadable:
    """So many rows that the file should have and that cannot be read, and why."""

    num_rows: int
    message: str


def batch_rows(num_rows: int, num_bytes: int) -> int:
    """How many rows to convert at once, so that a batch takes some megabytes whatever the size of a row."""
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))


def pieces(batch: pa.RecordBatch, first: int = 0) -> Iterator[pa.RecordBatch]:
    """A batch from its row ``first`` on, in parts that each take some megabytes once converted."""
    size = batch_rows(batch.num_rows, batch.nbytes)
    return (batch.slice(at, size) for at in range(first, batch.num_rows, size))


def read_batches(
    batches: Iterable[pa.RecordBatch | Unreadable],
    at: Cursor,
    stop: int | None,
    wanted: Wanted | None,
    source: str,
    rows_before: int = 0,
) -> Rows:
    """Yield the rows of consecutive batches, the first of which begins at ``at``; see ``InputFile.read``.

    ``source`` names the file in error messages; ``rows_before`` of its rows precede those that ``at.row`` counts.
    """
    for batch in batches:
        num_rows = batch.num_rows if stop is None else min(batch.num_rows, stop - at.index)
        places = [place for place in range(num_rows) if wanted is None or wanted(at.index + place)]
        for place, (values, error) in zip(places, rows_at(batch, places), strict=True):
            index, number = at.index + place, at.row + place + 1
            after = Cursor(at.file, at.offset, number, index + 1)
            if error:
                yield BadRow(index, source, rows_before + number, error, values, after)
            else:
                yield Record(index, source, rows_before + number, values, after)
        at = Cursor(at.file, at.offset, at.row + num_rows, at.index + num_rows)
        if at.index == stop:
            break
    return at.index


def rows_at(batch: pa.RecordBatch | pa.Table | Unreadable, places: Sequence[int]) -> list[RowValues]:
    """The values of the rows at some places of a batch, in their order; see ``_row`` for one that cannot be read."""
    if isinstance(batch, Unreadable):
        return [({}, RowError(RowErrorCode.BAD_ENCODING, batch.message))] * len(places)
    if len(places) < batch.num_rows:
        batch = batch.take(pa.array(places, pa.int64()))
    try:
        return [(values, None) for values in batch.to_pylist()]
    except _VALUE_ERRORS:
        return [_row(batch.slice(place, 1)) for place in range(batch.num_rows)]


def _row(batch: pa.RecordBatch) -> RowValues:
    """The one row of ``batch``; its error is that of the first column that cannot be read."""
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
    return readable, problem

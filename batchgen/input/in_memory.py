"""Rows in memory as JSON Lines: a list, a pandas or Polars DataFrame, a dataset of ``datasets``, an Arrow table.

They are then read like the rows of a file; values that JSON lacks become text, as in all outputs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa

from batchgen.core.errors import RowError, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.units import one_line
from batchgen.input.formats.arrow import pieces, rows_at
from batchgen.input.rows import is_null

_PIECE_ROWS = 1024
_Row = dict[str, Any] | RowError  # the columns of a row, or why it cannot be read


def json_lines(rows: Any, request_columns: Collection[str]) -> Iterator[bytes]:
    """A line per row; ``request_columns`` as in ``rows_at``. A row that cannot be read or written becomes an error row.

    Raises UsageError for a value that is not a row or a table of rows, and for message contents without their type.
    """
    for number, row in enumerate(_rows(rows, request_columns)):
        if isinstance(row, RowError):
            yield _no_line(number, f"cannot be read: {row.message}")
            continue
        if isinstance(row, str) or _is_missing(row):
            columns: Mapping[str, Any] = {"prompt": row if isinstance(row, str) else None}
        elif isinstance(row, list):
            columns = {"messages": row}
        elif isinstance(row, Mapping):
            columns = row
        else:
            what = f"rows[{number}] is of type {type(row).__name__}"
            raise UsageError(f"{what}; a row is a string, a mapping of columns or a chat, a list of messages")
        try:
            yield encode_json(dict(columns)) + b"\n"
        except Exception as error:  # too many levels, a huge integer, or an error in a value's __str__
            yield _no_line(number, f"cannot be written as JSON: {one_line(error)}")


def _no_line(number: int, why: str) -> bytes:
    """A line that becomes an error row."""
    return f"rows[{number}] {' '.join(why.split())}\n".encode(errors="replace")


def _is_missing(row: Any) -> bool:
    """Whether a row is a missing value in a column of texts: None, NaN, or pandas' NA."""
    return is_null(row) or type(row).__name__ in ("NAType", "NaTType")


def _rows(rows: Any, request_columns: Collection[str]) -> Iterator[Any]:
    """Each row as a Python value, or an error. Raises UsageError."""
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        yield from _typed(_pandas_rows(rows, request_columns), request_columns)
    elif hasattr(rows, "with_format") and hasattr(rows, "iter"):  # datasets
        for table in rows.with_format("arrow").iter(_PIECE_ROWS):
            yield from _arrow_rows(table.to_batches(), request_columns)
    elif hasattr(rows, "__arrow_c_stream__"):  # Arrow, Polars, DuckDB
        try:
            batches = pa.RecordBatchReader.from_stream(rows)
        except pa.ArrowException:
            yield from rows  # one column, such as a pandas Series of texts
        else:
            yield from _typed(_arrow_rows(batches, request_columns), request_columns)
    elif isinstance(rows, Iterable) and not isinstance(rows, Mapping | bytes):
        yield from rows
    elif isinstance(rows, dict) and rows and all(isinstance(column, list) for column in rows.values()):
        if len({*map(len, rows.values())}) > 1:
            raise UsageError("rows is a dict of columns of several lengths")
        yield from (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
    else:
        hint = "; choose one split of it" if isinstance(rows, Mapping) and hasattr(rows, "num_rows") else ""
        raise UsageError(f"rows is of type {type(rows).__name__}, not a list, table or path{hint}")


def _pandas_rows(frame: Any, request_columns: Collection[str]) -> Iterator[_Row]:
    """The rows of a DataFrame; missing values are null. Raises UsageError for two columns of the same name."""
    if not frame.columns.is_unique:
        raise UsageError("rows is a DataFrame with several columns of one name")
    for first in range(0, len(frame), _PIECE_ROWS):
        piece = frame.iloc[first : first + _PIECE_ROWS].astype(object)
        for row in piece.where(piece.notna(), None).to_dict("records"):
            yield {name: _unpadded(value) if name in request_columns else value for name, value in row.items()}


def _arrow_rows(batches: Iterable[pa.RecordBatch], request_columns: Collection[str]) -> Iterator[_Row]:
    for piece in chain.from_iterable(map(pieces, batches)):
        yield from (error or values for values, error in rows_at(piece, range(piece.num_rows), request_columns))


def _typed(rows: Iterable[_Row], request_columns: Collection[str]) -> Iterator[_Row]:
    """The rows of a table. Raises UsageError after the last row if message contents have lost their type."""
    contents = _Contents()
    for row in rows:
        if not isinstance(row, RowError):
            contents.see(row.get(name) for name in request_columns)
        yield row
    contents.check()


class _Contents:
    """Checks whether all message contents of a table are JSON text, as pandas and Polars read type ``arrow.json``.

    ``datasets`` uses that type if some contents are texts and others lists of parts. One content does not decide: a
    tool's answer may be a JSON list, and a text may be in quotes.
    """

    def __init__(self) -> None:
        self._has_text = self._has_parts = False

    def see(self, chats: Iterable[Any]) -> None:
        """Look at the contents in a row's chats or request bodies, unless one that is not JSON text was found."""
        for chat in chats if not self._has_text else ():
            messages = chat.get("messages") if isinstance(chat, Mapping) else chat
            for message in messages if isinstance(messages, list) else ():
                content = message.get("content") if isinstance(message, Mapping) else None
                if isinstance(content, str):
                    parsed = _json_content(content)
                    self._has_text |= parsed is None
                    self._has_parts |= isinstance(parsed, list)

    def check(self) -> None:
        """Raises UsageError if the type was lost."""
        if self._has_parts and not self._has_text:
            what = "each content of the chats is JSON text: a type of the file was lost when the table was read"
            raise UsageError(f"{what}; give the path of the file, or rows read by datasets")


def _json_content(text: str) -> str | list[Any] | None:
    """The text or the parts that a content holds as JSON; None for any other content."""
    try:
        parsed = json.loads(text) if text[:1] in ('"', "[") else None
    except (ValueError, RecursionError):
        return None
    is_parts = isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "type" in item for item in parsed)
    return parsed if is_parts or isinstance(parsed, str) else None


def _unpadded(value: Any, is_read: bool = False) -> Any:
    """A value from pandas; inside arrays, which come from Parquet, objects lose the nulls that Arrow added."""
    if getattr(value, "ndim", 0):
        value, is_read = list(value), True
    if isinstance(value, dict):
        return {key: _unpadded(item, is_read) for key, item in value.items() if not (is_read and item is None)}
    return [_unpadded(item, is_read) for item in value] if isinstance(value, list) else value

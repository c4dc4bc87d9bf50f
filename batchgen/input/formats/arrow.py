"""Rows of Arrow record batches, which both Parquet files and ``datasets`` give, as values of Python.

A value that cannot be read fails its own row only; ``json_line`` converts values to JSON types on output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode, UsageError
from batchgen.core.records import Cursor, Row
from batchgen.core.units import one_line, shown
from batchgen.input.formats import InputFile, Rows, Wanted
from batchgen.input.rows import RowProblem, parse_json

_MAX_BATCH_ROWS = 64  # repeated values are stored once, so rows may be larger than their file suggests
_BATCH_BYTES = 4 << 20
_VALUE_ERRORS = (ValueError, ArithmeticError, LookupError, pa.ArrowException)  # bad UTF-8, dates out of range, ...
RowValues = tuple[dict[str, Any], RowError | None]  # the readable values, and the error of the others
_Convert = Callable[[Any], Any]  # converts a value of ``to_pylist``; never called for null
_JSON = "arrow.json"
_EXTENSION = b"ARROW:extension:name"  # metadata of a field whose type was unknown when it was read


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rows of the file that cannot be read: their number, and the reason."""

    num_rows: int
    message: str


def check_names(names: Sequence[str], location: str) -> None:
    """Raises UsageError if two columns have the same name, since a row has one value per name."""
    if repeated := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UsageError(f"{location}: two columns are named {shown(repeated[0])}: give each a name of its own")


def is_lost_in_json(arrow_type: pa.DataType) -> bool:
    """Whether values of a type come back with another type after being written as JSON."""
    tests = (pa.types.is_temporal, pa.types.is_decimal, pa.types.is_binary, pa.types.is_integer, pa.types.is_float32)
    return arrow_type != pa.int64() and any(test(arrow_type) for test in tests)


def batch_rows(num_rows: int, num_bytes: int) -> int:
    """Number of rows to convert at once, so that a batch takes some megabytes for rows of any size."""
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * num_rows // max(num_bytes, 1)))


def pieces(batch: pa.RecordBatch, first: int = 0) -> Iterator[pa.RecordBatch]:
    """The rows of a batch from ``first`` on, in parts that each take some megabytes once converted."""
    size = batch_rows(batch.num_rows, batch.nbytes)
    return (batch.slice(at, size) for at in range(first, batch.num_rows, size))


class TableFile(InputFile):
    """An input that Arrow reads. ``_name`` is its name in error messages, ``_spec`` says which columns rows need."""

    _name: str
    _spec: InputSpec

    def _read_batches(
        self,
        batches: Iterable[pa.RecordBatch | Unreadable],
        at: Cursor,
        stop: int | None,
        wanted: Wanted | None,
        rows_before: int = 0,
    ) -> Rows:
        """Yield the rows of batches, which begin at ``at`` and after ``rows_before`` rows; see ``InputFile.read``."""
        for batch in batches:
            num_rows = batch.num_rows if stop is None else min(batch.num_rows, stop - at.index)
            positions = [position for position in range(num_rows) if wanted is None or wanted(at.index + position)]
            read = rows_at(batch, positions, self._spec.request_columns, self._spares)
            for position, (values, error) in zip(positions, read, strict=True):
                index, number = at.index + position, at.row + position + 1
                after = Cursor(at.file, at.offset, number, index + 1)
                yield Row(index, self._name, rows_before + number, values, after, error=error)
            at = Cursor(at.file, at.offset, at.row + num_rows, at.index + num_rows)
            if at.index == stop:
                break
        return at.index

    def _spares(self, name: str) -> bool:
        """Whether rows can run although a cell of this column is unreadable; if so, adds the column to ``unread``."""
        if self._spec.spares(name):
            self.unread |= {name}
        return self._spec.spares(name)


def rows_at(
    batch: pa.RecordBatch | pa.Table | Unreadable,
    positions: Sequence[int],
    request_columns: Collection[str] = (),
    spares: Callable[[str], bool] | None = None,
) -> list[RowValues]:
    """The values of the rows at ``positions`` of a batch, in this order, each with its error if it cannot be read.

    For ``request_columns`` see ``InputSpec``. An unreadable cell becomes null if ``spares`` accepts its column (None:
    rows need all columns). Raises UsageError as ``check_names``.
    """
    if isinstance(batch, Unreadable):
        return [({}, RowError(RowErrorCode.BAD_ENCODING, batch.message))] * len(positions)
    check_names(batch.schema.names, "a table of rows")
    if len(positions) < batch.num_rows:
        batch = _taken(batch, positions)
    features = _features((batch.schema.metadata or {}).get(b"huggingface", b""))
    all_conversions = {
        field.name: _conversion(field, field.name in request_columns, features.get(field.name))
        for field in batch.schema
    }
    conversions = {name: convert for name, convert in all_conversions.items() if convert}
    try:
        rows = batch.to_pylist()
        for name, convert in conversions.items():
            for row in rows:
                row[name] = None if row[name] is None else convert(row[name])
        return [(row, None) for row in rows]
    except (RowProblem, *_VALUE_ERRORS):
        return [_row(batch.slice(position, 1), conversions, spares) for position in range(batch.num_rows)]


def _taken(batch: pa.RecordBatch | pa.Table, positions: Sequence[int]) -> pa.RecordBatch | pa.Table:
    try:
        return batch.take(pa.array(positions, pa.int64()))
    except pa.ArrowNotImplementedError:  # Arrow cannot take rows of views of texts
        table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
        return pa.concat_tables([table.slice(0, 0), *(table.slice(position, 1) for position in positions)])


def _row(batch: pa.RecordBatch, conversions: Mapping[str, _Convert], spares: Callable[[str], bool] | None) -> RowValues:
    """The one row of ``batch``; its error names the first needed column that cannot be read."""
    readable: dict[str, Any] = {}
    problem: RowError | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value = column.to_pylist()[0]
            readable[name] = conversions[name](value) if name in conversions and value is not None else value
        except (RowProblem, *_VALUE_ERRORS) as error:
            if spares is not None and spares(name):
                readable[name] = None
            elif problem is None:
                problem = _problem(name, column, error)
    return readable, problem


def _problem(name: str, column: pa.Array, error: Exception) -> RowError:
    """The error of a row whose cell in a column cannot be read."""
    if isinstance(error, RowProblem):
        return RowError(error.error.code, f"column {name!r} holds JSON that cannot be read: {error}")
    is_text = isinstance(error, UnicodeDecodeError)
    code = RowErrorCode.BAD_ENCODING if is_text else RowErrorCode.BAD_TYPE
    what = "is not UTF-8" if is_text else f"({column.type}) has a value that cannot be read"
    return RowError(code, f"column {name!r} {what}: {one_line(error)}")


@lru_cache(maxsize=8)
def _features(metadata: bytes) -> Mapping[str, Any]:
    """The description that ``datasets`` stores of each column; empty if it cannot be read."""
    features: Any = {}
    with suppress(ValueError, RecursionError, LookupError, TypeError):
        features = json.loads(metadata)["info"]["features"]
    return features if isinstance(features, dict) else {}


def _conversion(field: pa.Field, is_request: bool, feature: Any = None) -> _Convert | None:
    """The function that converts a field's values to what JSON Lines would hold; None if it is not needed.

    ``feature`` describes the field in ``datasets``, as a tree:
    https://huggingface.co/docs/datasets/about_dataset_features.
    """
    arrow_type = field.type
    if pa.types.is_integer(arrow_type) and (names := _names(feature)):
        return lambda number: names[number] if 0 <= number < len(names) else None  # -1: unlabelled
    name = (field.metadata or {}).get(_EXTENSION, b"").decode(errors="replace")
    if _JSON in (name, getattr(arrow_type, "extension_name", "")):
        return _parsed
    while isinstance(arrow_type, pa.BaseExtensionType):
        arrow_type = arrow_type.storage_type
    if pa.types.is_struct(arrow_type):
        return _of_structs(arrow_type, is_request, feature)
    if pa.types.is_map(arrow_type):
        return _of_maps(arrow_type, is_request)
    if pa.types.is_dictionary(arrow_type) or pa.types.is_run_end_encoded(arrow_type):
        return _conversion(pa.field("", arrow_type.value_type), is_request, feature)
    item = _conversion(arrow_type.value_field, is_request, _item(feature)) if isinstance(arrow_type, _LISTS) else None
    return None if item is None else lambda values: [None if value is None else item(value) for value in values]


_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def _parsed(value: str | bytes) -> Any:
    return parse_json(value if isinstance(value, str) else value.decode())


def _names(feature: Any) -> list[str]:
    """The names of a class label, in the order of their numbers; empty for any other feature."""
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _item(feature: Any) -> Any:
    """The feature of the items of a list."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    return feature.get("feature") if isinstance(feature, dict) else None


def _of_structs(arrow_type: pa.StructType, is_request: bool, feature: Any) -> _Convert | None:
    """Drops null fields of structs in a request: Arrow gives each row the fields of all rows."""
    children, is_sequence = feature, isinstance(feature, dict) and feature.get("_type") == "Sequence"
    if is_sequence and isinstance(_item(feature), dict):  # the name that older files use for a struct of lists
        children = {name: [child] for name, child in _item(feature).items()}
    children = children if isinstance(children, dict) else {}
    all_conversions = {child.name: _conversion(child, is_request, children.get(child.name)) for child in arrow_type}
    conversions = {name: convert for name, convert in all_conversions.items() if convert}
    if not conversions and not is_request:
        return None

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        items = value.items() if not is_request else [item for item in value.items() if item[1] is not None]
        return {key: conversions[key](item) if key in conversions and item is not None else item for key, item in items}

    return convert


def _of_maps(arrow_type: pa.MapType, is_request: bool) -> _Convert | None:
    """Turns maps into objects in a request; nulls are kept, since each map has its own keys."""
    item = _conversion(arrow_type.item_field, is_request)
    if item is None and not is_request:
        return None

    def convert(pairs: list[tuple[Any, Any]]) -> Any:
        converted = [(key, item(value) if item and value is not None else value) for key, value in pairs]
        return dict(converted) if is_request else converted

    return convert

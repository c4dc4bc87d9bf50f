"""Outputs as a typed, zstd-compressed Parquet file, written in row groups so that memory does not grow with the rows.

Values stay as they are (a key that an object lacks is null); a column without a type that holds all is JSON text.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import time
from io import BytesIO
from itertools import chain
from types import MappingProxyType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import VECTOR_KEYS, record_keys
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import is_packed
from batchgen.output.formats import OutputFormat
from batchgen.output.formats.arrays import array_of, column_of, holds_numbers, packed_types, sized_type, vector_types

GROUP_ROWS = 16_384
GROUP_BYTES = 16 << 20  # of JSON; a row group of long rows ends earlier, since it is held in memory as Python objects
_MAX_LEVELS = 24  # of objects and lists in a column; pyarrow writes files of a hundred and cannot open them
_MAX_FIELDS = 64  # of an object column; past that its keys are data, not fields
_JSON_MARK = {"batchgen": "json"}
_INFERRED = pa.null()  # stands for the type of a column that is found from its values


def field_of(name: str, pa_type: Any) -> Any:
    """The field of a column: of Arrow type ``pa_type``, or of JSON text if ``pa_type`` is None."""
    return pa.field(name, pa_type) if pa_type is not None else pa.field(name, pa.string(), metadata=_JSON_MARK)


_SECONDS = ("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s")
_COUNTS = ("cached_tokens", "preemptions")
_TOP_LOGPROB = pa.struct([("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float64())])
_LOGPROBS = pa.list_(pa.struct([*_TOP_LOGPROB, ("top_logprobs", pa.list_(_TOP_LOGPROB))]))
_TOKEN_IDS = pa.list_(pa.int32())
_TOOL_CALLS = pa.list_(pa.struct([("name", pa.string()), field_of("arguments", None)]))
_SAMPLE = pa.struct(
    [(name, pa.string()) for name in ("text", "reasoning", "finish_reason")]
    + [("complete", pa.bool_()), ("token_ids", _TOKEN_IDS), ("logprobs", _LOGPROBS), ("tool_calls", _TOOL_CALLS)]
)
_USAGE = pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])
_USAGE_OF_THOUGHTS = pa.struct([*_USAGE, ("reasoning_tokens", pa.int64())])
FIXED_TYPES: dict[str, Any] = {  # of all fields but ``id`` and ``parsed``
    "index": pa.int64(),
    "fingerprint": pa.string(),
    "text": pa.string(),
    "reasoning": pa.string(),
    "tool_calls": _TOOL_CALLS,
    "finish_reason": pa.string(),
    "finish_reasons": pa.list_(pa.string()),
    "complete": pa.bool_(),
    "usage": _USAGE,
    "timings": pa.struct(
        [(name, pa.float64()) for name in _SECONDS]
        + [(name, pa.int64()) for name in _COUNTS]
        + [("reused", pa.bool_())]
    ),
    "token_ids": _TOKEN_IDS,
    "logprobs": _LOGPROBS,
    "samples": pa.list_(_SAMPLE),
    "prompt_logprobs": _LOGPROBS,
    "perplexity": pa.float64(),
    **vector_types("float32"),
    "label": pa.string(),
    "score": pa.float64(),
}
# Columns of every file, in this order; ``parsed`` and ``extracted`` only if the job asks for them.
_ALWAYS = ("id", "index", "fingerprint", "text", "parsed", "extracted", "finish_reason", "usage", "timings")
_OF_TEXT = ("text", "reasoning", "finish_reason", "finish_reasons", "complete", "token_ids", "logprobs", "samples")
_NO_TYPES: Mapping[str, Any] = MappingProxyType({})
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_DECIMAL = re.compile(r"(decimal\d+)\((\d+), (-?\d+)\)")
_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)  # what pyarrow raises for values without a type


def fixed_types(spec: JobSpec) -> dict[str, Any]:
    """The Arrow type of each field that a job's records may have."""
    left_out = VECTOR_KEYS if spec.generates else _OF_TEXT
    all_types, more = FIXED_TYPES | vector_types(spec.embed.dtype), []
    types = {name: pa_type for name, pa_type in all_types.items() if name not in left_out}
    if spec.packs_logprobs:
        types |= packed_types(spec.output.logprobs_dtype)
        of_sample = {name: sized_type(types[name], ()) for name in ("logprobs", "top_ids", "top_logprobs")}
        types["samples"] = pa.list_(pa.struct({item.name: item.type for item in _SAMPLE} | of_sample))
    if spec.eval.extract:
        types["extracted"] = pa.string()
        more.append(pa.field("extracted", pa.string()))
    if "json" in spec.output.parse:
        types["parsed"] = _INFERRED
        more.append(field_of("parsed", None))
    if more:
        types["samples"] = pa.list_(pa.struct([*types["samples"].value_type, *more]))
    return types


def carried_types(spec: JobSpec, types: Mapping[str, str]) -> dict[str, Any]:
    """The Arrow types of kept columns, from their text in the input's fingerprint; unknown ones are left out."""
    pa_types = {name: _parsed_type(str(text)) for name, text in types.items() if name not in record_keys(spec)}
    return {name: pa_type for name, pa_type in pa_types.items() if pa_type is not None}


def _parsed_type(text: str) -> Any:
    """The type that Arrow shows as ``text``; None for an unknown one."""
    if parts := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(parts[1], parts[2])
    try:
        if parts := _DECIMAL.fullmatch(text):
            return getattr(pa, parts[1])(int(parts[2]), int(parts[3]))
        return pa.type_for_alias(text)
    except ValueError:
        return None


def table_of(lines: Sequence[bytes], fixed: Mapping[str, Any]) -> pa.Table:
    """Records as the table of ``outputs.parquet``.

    Arrow's own threads are not used: they may release a Python file after its content was returned, and if the
    interpreter ends just then, they are unwound within C++, which aborts the process.
    """
    file = BytesIO()
    ParquetFormat(fixed).write(file, lines)
    return pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)


class ParquetFormat(OutputFormat):
    """``outputs.parquet``."""

    def __init__(self, fixed: Mapping[str, Any] = FIXED_TYPES, carried: Mapping[str, Any] = _NO_TYPES) -> None:
        self._fixed, self._carried = fixed, carried

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Iterate ``rows`` twice, and once more for each column with a value that turns out not to fit its type."""
        fields = infer_fields(rows, self._fixed, self._carried)
        while (unfit := self._write_groups(file, rows, fields)) is not None:
            fields[unfit] = None

    def _write_groups(self, file: BinaryIO, rows: Iterable[bytes], fields: dict[str, Any]) -> str | None:
        """Write all rows; returns early with the name of a column if one of its values does not fit the type."""
        schema = pa.schema([field_of(name, pa_type) for name, pa_type in fields.items()])
        file.seek(0)
        file.truncate()
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _groups(rows):
                columns = []
                for field in schema:
                    column = self._column(field, [row.get(field.name) for row in group])
                    if column is None:
                        return str(field.name)
                    columns.append(column)
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        return None

    def _column(self, field: Any, values: list[Any]) -> Any:
        """The values as a column, None if the field cannot take them unchanged."""
        if holds_numbers(self._fixed.get(field.name, _INFERRED)):
            return column_of(values, field.type)
        if field.type == self._carried.get(field.name, _INFERRED):
            return _restored(values, field.type)
        if _holds_json(field):
            values = [_encoded(field, value) for value in values]
        try:
            return pa.array(values, field.type)
        except _UNFIT:
            return None


def infer_fields(
    rows: Iterable[bytes], fixed: Mapping[str, Any] = FIXED_TYPES, carried: Mapping[str, Any] = _NO_TYPES
) -> dict[str, Any]:
    """The Arrow type of each column in order: ``carried`` unless a value does not fit, None for JSON text."""
    fitting = dict(carried)
    always = [name for name in _ALWAYS if name in fixed or name == "id"]
    fields: dict[str, Any] = {name: fixed.get(name, _INFERRED) for name in always}
    for group in _groups(rows):
        for name in dict.fromkeys(name for row in group for name in row):
            if name == "usage" and any("reasoning_tokens" in (row.get(name) or ()) for row in group):
                fields[name] = _USAGE_OF_THOUGHTS
            elif fixed.get(name, _INFERRED) != _INFERRED:
                fields[name] = sized_type(fixed[name], (row.get(name) for row in group), fields.get(name))
            elif fields.get(name, _INFERRED) is not None:
                values = [row.get(name) for row in group]
                fields[name] = _common_type(fields.get(name, _INFERRED), values)
                if name in fitting and _restored(values, fitting[name]) is None:
                    del fitting[name]
    return {name: fitting.get(name, pa.string() if now == _INFERRED else now) for name, now in fields.items()}


def _restored(values: Sequence[Any], pa_type: Any) -> Any:
    """The column of values that were written as JSON (``core.json_line``); None if one does not fit ``pa_type``."""
    try:
        if pa.types.is_binary(pa_type):
            return pa.array([None if value is None else b64decode(value, validate=True) for value in values], pa_type)
        if pa.types.is_integer(pa_type) or pa.types.is_floating(pa_type):
            return pa.array(values, pa_type)
        if pa.types.is_time(pa_type):
            times = [None if value is None else time.fromisoformat(value) for value in values]
            return pa.array(times, pa.time64("us")).cast(pa_type)
        texts = pa.array(values, pa.string())
        if pa.types.is_timestamp(pa_type) and pa_type.unit != "ns":
            return texts.cast(pa.timestamp("us", pa_type.tz)).cast(pa_type)
        return texts.cast(pa_type)
    except _UNFIT:
        return None


def _common_type(pa_type: Any, values: list[Any]) -> Any:
    """The type that can hold both ``values`` and any value of type ``pa_type``; None if there is none."""
    try:
        schemas = [pa.schema([("column", each)]) for each in (pa_type, pa.array(values).type)]
        common = pa.unify_schemas(schemas, promote_options="permissive").field("column").type
    except _UNFIT:
        return None
    return common if _is_storable(common) and not _has_flags(common, values) else None


def _is_storable(pa_type: Any, levels: int = _MAX_LEVELS) -> bool:
    """Whether Parquet can hold the type, at most ``levels`` deep, and its objects have few enough keys."""
    if not pa.types.is_nested(pa_type):
        return True
    if pa.types.is_struct(pa_type) and not 0 < pa_type.num_fields <= _MAX_FIELDS:
        return False
    return levels > 0 and all(_is_storable(pa_type.field(i).type, levels - 1) for i in range(pa_type.num_fields))


def _holds_json(field: Any) -> bool:
    """Whether a field holds JSON text, at any depth."""
    return _is_json(field) or any(_holds_json(field.type.field(i)) for i in range(field.type.num_fields))


def _is_json(field: Any) -> bool:
    return b"batchgen" in (field.metadata or {})


def _has_flags(pa_type: Any, values: Iterable[Any]) -> bool:
    """Whether a bool is among floats: the only value that Arrow changes, to a number, instead of refusing it."""
    present = [value for value in values if value is not None]
    if pa.types.is_struct(pa_type):
        return any(_has_flags(item.type, [value.get(item.name) for value in present]) for item in pa_type)
    if pa.types.is_list(pa_type):
        return _has_flags(pa_type.value_type, chain.from_iterable(present))
    return pa.types.is_floating(pa_type) and any(isinstance(value, bool) for value in present)


def _encoded(field: Any, value: Any) -> Any:
    """A value as pyarrow takes it: JSON text wherever the field holds it."""
    if value is None:
        return None
    if _is_json(field):
        return encode_json(value).decode()
    if pa.types.is_struct(field.type):
        return {item.name: _encoded(item, value.get(item.name)) for item in field.type}
    if is_packed(value):
        return [*array_of(value, field.type)]
    if pa.types.is_list(field.type):
        return [_encoded(field.type.value_field, item) for item in value]
    return value


def _groups(rows: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    """The rows parsed, in groups bounded by their number and by their size."""
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        group.append(json.loads(row))
        size += len(row)
        if len(group) >= GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group

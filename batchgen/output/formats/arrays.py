"""Arrow columns of packed arrays (``core.packed``): their bytes become the column's, number by number nothing is made.

The rows of a table, such as the likeliest tokens in the place of each, have a fixed size where it is the same in all
rows of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.core.packed import data_of, is_packed

_IDS, _FLOATS, _HALVES = (pa.list_(kind()) for kind in (pa.int32, pa.float32, pa.float16))
_OF_IDS = {"top_ids": pa.list_(_IDS), "prompt_token_ids": _IDS, "prompt_top_ids": pa.list_(_IDS)}
_DEPTHS = {"logprobs": 1, "top_logprobs": 2, "prompt_logprobs": 1, "prompt_top_logprobs": 2}
_TYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4"), "bool": np.dtype("?")}


def packed_types(dtype: str) -> dict[str, Any]:
    """The types of fields that are packed arrays, with log-probabilities as float32 or float16."""
    floats = _HALVES if dtype == "float16" else _FLOATS
    of_floats = {name: floats if depth == 1 else pa.list_(floats) for name, depth in _DEPTHS.items()}
    return {**_OF_IDS, **of_floats, "assistant_mask": pa.list_(pa.bool_())}


PACKED_TYPES = {name: (kind, packed_types("float16")[name]) for name, kind in packed_types("float32").items()}


def packed_type(kind: Any, values: Iterable[Any], before: Any = None) -> Any:
    """The type of a column of packed arrays or nulls, whose numbers have the type that ``kind`` ends in.

    A table is a list of lists. The inner ones have a fixed size if that is the same in all ``values``, and in those
    that came before, whose column had the type ``before``.
    """
    if not pa.types.is_nested(kind.value_type):
        return kind
    widths = {value["shape"][1] for value in values if is_packed(value)}
    if before is not None:
        inner = before.value_type
        widths.add(inner.list_size if pa.types.is_fixed_size_list(inner) else None)
    number = kind.value_type.value_type
    width = widths.pop() if len(widths) == 1 else None
    return pa.list_(pa.list_(number) if width is None else pa.list_(number, width))


def packed_column(values: Sequence[Any], kind: Any) -> Any:
    """Packed arrays, and nulls, as a column of ``packed_type``."""
    counts = [0 if value is None else value["shape"][0] for value in values]
    numbers = _numbers([value for value in values if value is not None], kind)
    if pa.types.is_fixed_size_list(kind.value_type):
        numbers = pa.FixedSizeListArray.from_arrays(numbers, kind.value_type.list_size)
    elif pa.types.is_list(kind.value_type):
        widths = [value["shape"][1] for value in values if value is not None for _ in range(value["shape"][0])]
        numbers = pa.ListArray.from_arrays(_offsets(widths), numbers)
    is_null = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(_offsets(counts), numbers, mask=is_null)


def _numbers(values: Sequence[Mapping[str, Any]], kind: Any) -> Any:
    while pa.types.is_nested(kind):
        kind = kind.value_type
    parts = [np.frombuffer(data_of(value), _TYPES[value["dtype"]]) for value in values]
    numbers = np.concatenate(parts) if parts else np.empty(0, np.dtype("<f4"))
    return pa.array(numbers.astype(kind.to_pandas_dtype(), copy=False), kind)


def _offsets(counts: Iterable[int]) -> Any:
    return pa.array([*accumulate(counts, initial=0)], pa.int32())

"""Arrow columns of packed arrays (``core.logprobs``), made of their bytes without an object per number.

If all items in a file have the same size, their type states it; a type declared with size 1 is a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.core.logprobs import is_packed, numbers_of


def packed_types(dtype: str) -> dict[str, Any]:
    """The types of fields that are packed arrays in text jobs, with log-probabilities of type ``dtype``."""
    ids, numbers = pa.int32(), pa.type_for_alias(dtype)
    of_top = {"top_ids": pa.list_(pa.list_(ids, 1)), "top_logprobs": pa.list_(pa.list_(numbers, 1))}
    types = {"logprobs": pa.list_(numbers), **of_top}
    of_prompt = {"prompt_token_ids": pa.list_(ids), "assistant_mask": pa.list_(pa.bool_())}
    return {**types, **of_prompt, **{f"prompt_{name}": kind for name, kind in types.items()}}


def vector_types(dtype: str) -> dict[str, Any]:
    """The types of vectors with numbers of type ``dtype``."""
    vector = pa.list_(pa.type_for_alias(dtype), 1)
    return {"embedding": vector, "embeddings": pa.list_(vector)}


def holds_numbers(kind: Any) -> bool:
    """Whether a type is a list of numbers, or of lists of numbers at any depth."""
    return _is_list(kind) and (holds_numbers(kind.value_type) or pa.types.is_primitive(kind.value_type))


def sized_type(kind: Any, values: Iterable[Any], before: Any = None) -> Any:
    """The type of a column of packed arrays or nulls: lists of fixed size if all ``values`` share it.

    ``before`` is the column's type in earlier rows, None for the first ones. Other types are returned unchanged.
    """
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if not pa.types.is_fixed_size_list(inner):
        return before or kind
    sizes = {value["shape"][-1] if is_packed(value) else np.shape(value)[-1] for value in values if value is not None}
    if before is not None:
        lists = before.value_type if kind != inner else before
        sizes.add(lists.list_size if pa.types.is_fixed_size_list(lists) else -1)
    sized = pa.list_(inner.value_type, sizes.pop() if len(sizes) == 1 else -1)
    return pa.list_(sized) if kind != inner else sized


def column_of(values: Sequence[Any], kind: Any) -> Any:
    """Packed arrays or lists of numbers, and nulls, as a column of the sized type ``kind``."""
    is_null = pa.array([value is None for value in values])
    blank = [0] * kind.list_size if pa.types.is_fixed_size_list(kind) else []
    arrays = [array_of(blank if value is None else value, kind) for value in values]
    column = pa.array(np.concatenate([array.ravel() for array in arrays]), _number(kind))
    if _is_list(kind.value_type):
        column = _lists(column, kind.value_type, (array.shape[1] for array in arrays for _ in array))
    return _lists(column, kind, map(len, arrays), is_null)


def array_of(value: Any, kind: Any) -> Any:
    """A packed array, or lists, as a NumPy array with the number type of ``kind``."""
    dtype = _number(kind).to_pandas_dtype()
    if not is_packed(value):
        return np.array(value, dtype)
    return np.asarray(numbers_of(value), dtype).reshape(value["shape"])


def _lists(column: Any, kind: Any, counts: Iterable[int], is_null: Any = None) -> Any:
    """The items of ``column`` as lists: ``counts`` items each unless ``kind`` fixes the size; null if ``is_null``."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(column, kind.list_size, mask=is_null)
    offsets = pa.array([*accumulate(counts, initial=0)], pa.int32())
    return pa.ListArray.from_arrays(offsets, column, mask=is_null)


def _number(kind: Any) -> Any:
    return _number(kind.value_type) if _is_list(kind) else kind


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))

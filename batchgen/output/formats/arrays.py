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
    return {**types, **of_prompt, **{f"prompt_{name}": pa_type for name, pa_type in types.items()}}


def vector_types(dtype: str) -> dict[str, Any]:
    """The types of vectors with numbers of type ``dtype``."""
    vector = pa.list_(pa.type_for_alias(dtype), 1)
    return {"embedding": vector, "embeddings": pa.list_(vector)}


def holds_numbers(pa_type: Any) -> bool:
    """Whether a type is a list of numbers, or of lists of numbers at any depth."""
    return _is_list(pa_type) and (holds_numbers(pa_type.value_type) or pa.types.is_primitive(pa_type.value_type))


def sized_type(pa_type: Any, values: Iterable[Any], before: Any = None) -> Any:
    """The type of a column of packed arrays or nulls: lists of fixed size if all ``values`` share it.

    ``before`` is the column's type in earlier rows, None for the first ones. Other types are returned unchanged.
    """
    inner = pa_type.value_type if pa.types.is_list(pa_type) else pa_type
    if not pa.types.is_fixed_size_list(inner):
        return before or pa_type
    sizes = {value["shape"][-1] if is_packed(value) else np.shape(value)[-1] for value in values if value is not None}
    if before is not None:
        lists = before.value_type if pa_type != inner else before
        sizes.add(lists.list_size if pa.types.is_fixed_size_list(lists) else -1)
    sized = pa.list_(inner.value_type, sizes.pop() if len(sizes) == 1 else -1)
    return pa.list_(sized) if pa_type != inner else sized


def column_of(values: Sequence[Any], pa_type: Any) -> Any:
    """Packed arrays or lists of numbers, and nulls, as a column of the sized type ``pa_type``."""
    is_null = pa.array([value is None for value in values])
    blank = [0] * pa_type.list_size if pa.types.is_fixed_size_list(pa_type) else []
    arrays = [array_of(blank if value is None else value, pa_type) for value in values]
    column = pa.array(np.concatenate([array.ravel() for array in arrays]), _number(pa_type))
    if _is_list(pa_type.value_type):
        column = _lists(column, pa_type.value_type, (array.shape[1] for array in arrays for _ in array))
    return _lists(column, pa_type, map(len, arrays), is_null)


def array_of(value: Any, pa_type: Any) -> Any:
    """A packed array, or lists, as a NumPy array with the number type of ``pa_type``."""
    dtype = _number(pa_type).to_pandas_dtype()
    if not is_packed(value):
        return np.array(value, dtype)
    return np.asarray(numbers_of(value), dtype).reshape(value["shape"])


def _lists(column: Any, pa_type: Any, counts: Iterable[int], is_null: Any = None) -> Any:
    """The items of ``column`` as lists: ``counts`` each unless ``pa_type`` fixes the size; null if ``is_null``."""
    if pa.types.is_fixed_size_list(pa_type):
        return pa.FixedSizeListArray.from_arrays(column, pa_type.list_size, mask=is_null)
    offsets = pa.array([*accumulate(counts, initial=0)], pa.int32())
    return pa.ListArray.from_arrays(offsets, column, mask=is_null)


def _number(pa_type: Any) -> Any:
    return _number(pa_type.value_type) if _is_list(pa_type) else pa_type


def _is_list(pa_type: Any) -> bool:
    return bool(pa.types.is_list(pa_type) or pa.types.is_fixed_size_list(pa_type))

"""Arrays of numbers in a record, as the base64 text of their bytes: JSON numbers take several times the room and time.

A packed array is an object with ``dtype``, ``shape`` and ``base64``, of bytes with the lowest one first. It is what the
journal holds of numbers that a typed file takes as they are; other formats get lists.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

PACKED_KEYS = frozenset(  # fields of a record that may be packed; other columns named so are renamed
    {"logprobs", "top_ids", "top_logprobs", "assistant_mask"}
    | {"prompt_token_ids", "prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"}
)
_CODES = {"int32": "i", "float32": "f", "bool": "b"}  # of the module ``array``
_KEYS = {"dtype", "shape", "base64"}


def packed(dtype: str, data: bytes, *shape: int) -> dict[str, Any]:
    """The packed array of ``data``; of numbers of type int32 or float32, or of bytes 0 and 1 that are bools."""
    return {"dtype": dtype, "shape": [*shape], "base64": b64encode(data).decode()}


def is_packed(value: object) -> bool:
    """Whether a value of a record is a packed array."""
    return isinstance(value, dict) and value.keys() == _KEYS


def data_of(value: Mapping[str, Any]) -> bytes:
    """The bytes of a packed array. Raises ValueError where they are damaged."""
    return b64decode(value["base64"], validate=True)


def numbers_of(value: Mapping[str, Any]) -> array[Any]:
    """All numbers of a packed array, one after the other."""
    return array(_CODES[value["dtype"]], data_of(value))


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with lists in place of packed arrays, also in its samples."""
    arrays = {name for name in record.keys() & PACKED_KEYS if is_packed(record[name])}
    plain = {name: lists_of(value) if name in arrays else value for name, value in record.items()}
    if any(is_packed(value) for sample in record.get("samples") or () for value in sample.values()):
        plain["samples"] = [unpacked(sample) for sample in record["samples"]]
    return plain


def lists_of(value: Mapping[str, Any]) -> list[Any]:
    """A packed array as lists: one of numbers, or one of such lists."""
    numbers: list[Any] = numbers_of(value).tolist()
    if value["dtype"] == "float32":
        numbers = [float(f"{number:.9g}") for number in numbers]  # nine digits tell a float32
    if value["dtype"] == "bool":
        numbers = [*map(bool, numbers)]
    return _nested(numbers, value["shape"])


def _nested(numbers: list[Any], shape: Sequence[int]) -> list[Any]:
    if len(shape) < 2:
        return numbers
    return [numbers[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]

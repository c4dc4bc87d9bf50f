"""Arrays of numbers in a record, as base64 text of their bytes: JSON numbers take several times the room and time.

A packed array is an object with ``dtype``, ``shape`` and ``base64``, lowest byte first; other formats get lists.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Set
from typing import Any

PACKED_KEYS = frozenset(  # fields of a record that may be packed
    {"embedding", "embeddings", "logprobs", "top_ids", "top_logprobs", "assistant_mask"}
    | {"prompt_token_ids", "prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"}
)
_CODES: dict[str, Any] = {"int32": "i", "float32": "f", "bool": "?"}  # of ``memoryview``
_KEYS = {"dtype", "shape", "base64"}


def packed(dtype: str, data: bytes, *shape: int) -> dict[str, Any]:
    """The packed array of ``data``; of numbers of type int32 or float32, or of bytes 0 and 1 that are bools."""
    return {"dtype": dtype, "shape": [*shape], "base64": b64encode(data).decode()}


def is_packed(value: object) -> bool:
    """Whether a value of a record is a packed array."""
    return isinstance(value, dict) and value.keys() == _KEYS and str(value["dtype"]) in _CODES


def numbers_of(value: Mapping[str, Any]) -> memoryview[Any]:
    """All numbers of a packed array, one after the other. Raises ValueError or TypeError if its bytes are damaged."""
    return memoryview(b64decode(value["base64"], validate=True)).cast(_CODES[value["dtype"]])


def unpacked(record: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """A record with lists in place of the packed arrays of the fields ``names``, also in its samples."""
    plain = {name: lists_of(value) if name in names else value for name, value in record.items()}
    if names and record.get("samples"):
        plain["samples"] = [unpacked(sample, names) for sample in record["samples"]]
    return plain


def lists_of(value: Any) -> Any:
    """A packed array as lists: one of numbers, or one of such lists. Another value is returned as it is."""
    if not is_packed(value):
        return value
    shape: list[int] = value["shape"]
    numbers: list[Any] = numbers_of(value).tolist()
    if value["dtype"] == "float32":
        numbers = [float(f"{number:.9g}") for number in numbers]  # nine digits tell a float32
    if len(shape) < 2:
        return numbers
    return [numbers[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]

"""Header of a GGUF file, its metadata and places of tensors: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Parsed here, as the package ``gguf`` trusts the lengths that a file states; without torch, so that a plan can read it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchgen.core.errors import ModelError
from batchgen.core.model_files import file_bytes
from batchgen.core.units import one_line, shown

_MAX_HEADER_BYTES = 64 << 20  # the largest vocabularies with their merges take 20
_MAX_ENTRIES = 1 << 16  # values, or tensors: models have some thousand at most
_MAX_ELEMENTS = 1 << 20  # of an array that is asked for; the largest vocabularies have 262,144 tokens
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Place of one tensor: the number of its type, its ``shape`` as torch has it, its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufHeader(NamedTuple):
    """Metadata by key, None for an array that was not asked for; tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path, arrays: Collection[str] = ()) -> GgufHeader:
    """The header of a GGUF file; only the arrays named in ``arrays`` are kept. Raises ModelError for a damaged file."""
    size = file_bytes(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(_Cursor(data, min(size, _MAX_HEADER_BYTES)), arrays)
    except (OSError, ValueError, struct.error) as error:
        why = "its header is cut short" if isinstance(error, struct.error) else one_line(error)
        raise ModelError(f"{path}: not a usable GGUF file ({why}); download it again") from None
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{path}: is one piece of several; join them with llama-gguf-split --merge")
    return header


class _Cursor:
    """Reads consecutive little-endian values; none may go beyond ``end``. Raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self.offset = 0

    def number(self, code: str) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return float(str(np.float32(value))) if code == "f" else value  # the shortest number of that float32

    def take(self, count: int) -> bytes:
        if count > self._end - self.offset:
            raise struct.error
        self.offset += count
        return self._data[self.offset - count : self.offset]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, *, is_kept: bool) -> Any:
        """The next value; the elements of an array that is not kept are skipped."""
        value_type = self.number("I")
        if value_type == _STRING:
            return self.text()
        if value_type == _ARRAY:
            return self._array(self.number("I"), self.number("Q"), is_kept)
        if value_type not in _SCALARS:
            raise ValueError(f"metadata of unknown type {value_type}")
        return self.number(_SCALARS[value_type])

    def _array(self, value_type: int, count: int, is_kept: bool) -> list[Any] | None:
        if is_kept and count > _MAX_ELEMENTS:
            raise ValueError(f"an array of {count:,} elements; {_MAX_ELEMENTS:,} are taken")
        if value_type == _STRING:
            return self._texts(count, is_kept)
        if value_type not in _SCALARS:
            raise ValueError(f"an array of type {value_type}")
        code = _SCALARS[value_type]
        data = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", data)) if is_kept else None

    def _texts(self, count: int, is_kept: bool) -> list[str] | None:
        if 8 * count > self._end - self.offset:  # each has its length
            raise struct.error
        texts: list[str] = []
        offset, end, length_at = self.offset, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset > end:
                raise struct.error
            start, offset = offset + 8, offset + 8 + length_at(self._data, offset)[0]
            if is_kept and offset <= self._end:
                texts.append(self._data[start:offset].decode())
        if offset > self._end:
            raise struct.error
        self.offset = offset
        return texts if is_kept else None


def _parse(cursor: _Cursor, arrays: Collection[str]) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    if max(num_tensors, num_values) > _MAX_ENTRIES:
        raise ValueError(f"it claims {num_values:,} values and {num_tensors:,} tensors; {_MAX_ENTRIES:,} are taken")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(is_kept=key in arrays)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        num_dimensions = cursor.number("I")
        if name in tensors or num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)} is there twice, or has more than {_MAX_DIMENSIONS} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
        tensors[name] = GgufTensor(cursor.number("I"), shape, cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {shown(alignment)}")
    start = -(-cursor.offset // alignment) * alignment
    return GgufHeader(metadata, {name: item._replace(offset=start + item.offset) for name, item in tensors.items()})

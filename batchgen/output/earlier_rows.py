"""Finished rows of earlier jobs, found by fingerprint; their files are only read.

A row takes 16 bytes: its place and half of its fingerprint; the full one is compared when the record is read.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.core.errors import StorageError
from batchgen.core.storage import storage_errors
from batchgen.output.record_builder import check_record
from batchgen.output.segments import RESULT, SUFFIX, SegmentReader, decode_line

_OFFSET_BITS = 40
_KEY_DIGITS = 16  # digits of the fingerprint that are kept in memory
_DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
Record = dict[str, Any]


class EarlierRows:
    """The rows of all added jobs. Call ``seal`` after adding them, then ``find``, and ``close`` at the end.

    Damaged rows are skipped. Memory: 16 bytes per row, and 40 during ``seal``.
    """

    def __init__(self) -> None:
        self._keys: Any = array("Q")
        self._locations: Any = array("Q")
        self._paths: list[Path] = []
        self._files = SegmentReader([])

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, path: Path) -> None:
        """Index an ``outputs.jsonl`` or a journal's segment. Raises StorageError if it cannot be read."""
        number, offset = len(self._paths), 0
        self._paths.append(path)
        with storage_errors("read", path), path.open("rb", buffering=1 << 20) as file:
            for raw in file:
                with suppress(*_DAMAGED):
                    self._keys.append(int(_record(path, raw)["fingerprint"][:_KEY_DIGITS], 16))
                    self._locations.append(number << _OFFSET_BITS | offset)
                offset += len(raw)

    def seal(self) -> None:
        """Sort the added rows."""
        keys, locations = (np.frombuffer(column, np.uint64) for column in (self._keys, self._locations))
        order = np.argsort(keys, kind="stable")
        self._keys, self._locations = (column[order].data for column in (keys, locations))
        self._files = SegmentReader(self._paths)

    def find(self, fingerprint: str) -> Iterator[Record]:
        """The records of rows with this fingerprint that can still be read."""
        key = int(fingerprint[:_KEY_DIGITS], 16)
        at = bisect_left(self._keys, key)
        while at < len(self._keys) and self._keys[at] == key:
            record = self._read(self._locations[at])
            if record is not None and record.get("fingerprint") == fingerprint:
                yield record
            at += 1

    def close(self) -> None:
        self._files.close()

    def _read(self, location: int) -> Record | None:
        number, offset = divmod(location, 1 << _OFFSET_BITS)
        try:
            file = self._files.file(number)
            file.seek(offset)
            record = _record(self._paths[number], file.readline())
            check_record(record)
        except (OSError, StorageError, *_DAMAGED):
            return None
        return record


def _record(path: Path, raw: bytes) -> Record:
    """The record in a line of a file; in a segment also a replaced one, which is still right for its fingerprint."""
    if path.suffix == SUFFIX:
        line = decode_line(raw, 0)
        if line is None or line.kind != RESULT:
            raise ValueError("the line has no result, or does not match its checksum")
        raw = line.payload
    return dict(json.loads(raw))

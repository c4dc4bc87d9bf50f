"""Finished rows of earlier jobs, found by fingerprint; their files are only read.

A row takes 16 bytes: half of its fingerprint, which is compared in full when the record is read, and its place.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from batchgen.core.errors import StorageError
from batchgen.core.storage import storage_errors
from batchgen.output.record_builder import check_record
from batchgen.output.segments import RESULT, Line, SegmentReader, decode_line, scan, segments

_OFFSET_BITS = 40
_KEY_DIGITS = 16  # of the fingerprint, that are kept in memory
_DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
Record = dict[str, Any]


class _Place(NamedTuple):
    """A file with a record per line, and how to read one."""

    path: Path
    record: Callable[[bytes], Record]


class EarlierRows:
    """The rows of all added jobs. Call ``seal`` after adding them, then ``find``, and ``close`` at the end.

    Damaged rows are skipped. Memory: 16 bytes per row, and 40 during ``seal``.
    """

    def __init__(self) -> None:
        self._keys: Any = array("Q")
        self._locations: Any = array("Q")
        self._places: list[_Place] = []
        self._files = SegmentReader([])

    def __len__(self) -> int:
        return len(self._keys)

    def add_lines(self, path: Path) -> None:
        """Index the records of an ``outputs.jsonl``. Raises StorageError if it cannot be read."""
        self._add(path, lambda raw: dict(json.loads(raw)), _lines)

    def add_journal(self, folder: Path) -> None:
        """Index the results of a journal. Raises StorageError for a file that cannot be read."""
        for segment in segments(folder):
            self._add(segment, _journalled, _journal_lines)

    def seal(self) -> None:
        """Sort what was added."""
        keys, locations = (np.frombuffer(column, np.uint64) for column in (self._keys, self._locations))
        order = np.argsort(keys, kind="stable")
        self._keys, self._locations = (column[order].data for column in (keys, locations))
        self._files = SegmentReader([place.path for place in self._places])

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

    def _add(self, path: Path, record: Callable[[bytes], Record], lines: Callable[[BinaryIO], Iterator[Any]]) -> None:
        place = len(self._places)
        self._places.append(_Place(path, record))
        with storage_errors("read", path), path.open("rb", buffering=1 << 20) as file:
            for offset, payload in lines(file):
                try:
                    key = int(json.loads(payload)["fingerprint"][:_KEY_DIGITS], 16)
                except _DAMAGED:
                    continue
                self._keys.append(key)
                self._locations.append(place << _OFFSET_BITS | offset)

    def _read(self, location: int) -> Record | None:
        number, offset = divmod(location, 1 << _OFFSET_BITS)
        try:
            file = self._files.file(number)
            file.seek(offset)
            record = self._places[number].record(file.readline())
            check_record(record)
        except (OSError, StorageError, *_DAMAGED):
            return None
        return record


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for line in file:
        yield offset, line
        offset += len(line)


def _journal_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield results only, including replaced ones: each still answers its own fingerprint."""
    return ((line.offset, line.payload) for line in scan(file) if isinstance(line, Line) and line.kind == RESULT)


def _journalled(raw: bytes) -> Record:
    line = decode_line(raw, 0)
    if line is None:
        raise ValueError("it does not match its checksum")
    return dict(json.loads(line.payload))

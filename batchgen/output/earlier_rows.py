"""Finished rows of earlier runs, found by fingerprint; their run directories are only read.

Of each row 16 bytes are kept in memory: half of its fingerprint, and where its record is. The record itself is read
when it is asked for, and its whole fingerprint compared then. Which runs may be taken from is not decided here.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from batchgen.config.job import JobSpec
from batchgen.core.errors import StorageError
from batchgen.core.json_line import encode_json
from batchgen.core.storage import storage_errors
from batchgen.output.formats import output_format
from batchgen.output.record_builder import check_record
from batchgen.output.rundir import RunDir
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
    """The rows of all runs that were added. ``seal`` once all are, then ``find``; ``close`` at the end.

    Records of a Parquet file, which cannot be read one by one, are copied into a temporary file in ``scratch``. Memory:
    16 bytes per row, and 40 while it is sealed.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._keys: Any = array("Q")
        self._locations: Any = array("Q")
        self._places: list[_Place] = []
        self._files = SegmentReader([])
        self._copies: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, run_dir: RunDir, spec: JobSpec) -> None:
        """Index the finished rows of a run: those of its outputs, and of the journals of an unfinished run or retry.

        What is damaged or was edited is passed over. Raises StorageError for a file that cannot be read.
        """
        form, path = output_format(spec), run_dir.outputs(spec.output.format)
        if path.is_file() and spec.output.format == "parquet":
            self._add_copies(form.read(path))
        elif path.is_file():
            self._add(path, form.record, _lines)
        for folder in (run_dir.journal, run_dir.retry):
            for segment in segments(folder):
                self._add(segment, _journalled, _journal_lines)

    def seal(self) -> None:
        """Sort what was added."""
        keys, locations = (np.frombuffer(found, np.uint64) for found in (self._keys, self._locations))
        order = np.argsort(keys, kind="stable")
        self._keys, self._locations = (found[order].data for found in (keys, locations))
        self._files = SegmentReader([place.path for place in self._places])

    def find(self, fingerprint: str) -> Record | None:
        """The record of a row with this fingerprint; None where there is none that can still be read."""
        key = int(fingerprint[:_KEY_DIGITS], 16)
        at = bisect_left(self._keys, key)
        while at < len(self._keys) and self._keys[at] == key:
            record = self._read(self._locations[at])
            if record is not None and record["timings"].get("fingerprint") == fingerprint:
                return record
            at += 1
        return None

    def close(self) -> None:
        """Release the files."""
        self._files.close()
        if self._copies is not None:
            self._copies.close()

    def _add(self, path: Path, record: Callable[[bytes], Record], lines: Callable[[BinaryIO], Iterator[Any]]) -> None:
        self._places.append(_Place(path, record))
        with storage_errors("read", path), path.open("rb", buffering=1 << 20) as file:
            for offset, payload in lines(file):
                self._index(payload, len(self._places), offset)

    def _add_copies(self, rows: Iterator[tuple[int, bytes]]) -> None:
        """Rows of a Parquet file. ``parsed`` has other types there than a result, so that it is left out."""
        with storage_errors("write a temporary file", self._scratch or Path()):
            if self._copies is None:
                self._copies = TemporaryFile(dir=self._scratch)  # noqa: SIM115 - ``close`` closes it
            offset = self._copies.seek(0, os.SEEK_END)
            for _, row in rows:
                payload = encode_json(without_parsed(json.loads(row)))
                self._index(payload, 0, offset)
                offset += self._copies.write(payload + b"\n")

    def _index(self, payload: bytes, place: int, offset: int) -> None:
        try:
            key = int(json.loads(payload)["timings"]["fingerprint"][:_KEY_DIGITS], 16)
        except _DAMAGED:  # or of a run that wrote none
            return
        self._keys.append(key)
        self._locations.append(place << _OFFSET_BITS | offset)

    def _read(self, location: int) -> Record | None:
        number, offset = divmod(location, 1 << _OFFSET_BITS)
        try:
            if number:
                file, decode = self._files.file(number - 1), self._places[number - 1].record
            else:
                assert self._copies is not None, "a location in it was made"
                file, decode = self._copies, json.loads
            file.seek(offset)
            record: Record = decode(file.readline())
            check_record(record)
        except (OSError, StorageError, *_DAMAGED):
            return None
        return record


def without_parsed(record: Mapping[str, Any]) -> Record:
    """A record, and its samples, without ``parsed``."""
    found = {name: value for name, value in record.items() if name != "parsed"}
    return found | ({"samples": [*map(without_parsed, found["samples"])]} if found.get("samples") else {})


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    offset = 0
    for line in file:
        yield offset, line
        offset += len(line)


def _journal_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Results alone: also one that was replaced since is that of its fingerprint."""
    return ((line.offset, line.payload) for line in scan(file) if isinstance(line, Line) and line.kind == RESULT)


def _journalled(raw: bytes) -> Record:
    line = decode_line(raw, 0)
    if line is None:
        raise ValueError("it does not match its checksum")
    return dict(json.loads(line.payload))

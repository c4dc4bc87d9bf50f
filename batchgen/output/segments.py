"""The journal's files, and the index of the rows in them, in eight bytes per row.

Segments ``000001-TOKEN.seg``, ``000002-TOKEN.seg`` have one checksummed line per record. JSON holds no newline, so
damage costs the lines it hits. Random tokens keep two machines from giving a segment the same name.
"""

from __future__ import annotations

import re
from array import array
from binascii import crc32
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, NamedTuple

from batchgen.core.errors import StorageError
from batchgen.core.records import Cursor
from batchgen.core.storage import storage_error
from batchgen.core.units import WHOLE, Shard

RESULT, ERROR, PARTIAL = b"r", b"e", b"p"
CHECK_DISK = "check the disk, then run again: what is damaged is done once more, all else is kept"
_KINDS = frozenset({RESULT, ERROR, PARTIAL})
SUFFIX = ".seg"
_NAME = re.compile(r"(\d{1,9})-[0-9a-f]{8}", re.ASCII)
_MAX_OPEN = 64  # files; a journal of days has more segments than a process may open
_ABSENT = -1
_OFFSET_BITS = 40  # a segment is rotated long before 1 TiB; this leaves 22 bits for its number


class Line(NamedTuple):  # a dataclass takes three times as long to make, and opening a journal makes one per row
    """An intact line of a segment for row ``row``, starting at byte ``offset``; the rest is parsed on demand."""

    offset: int
    kind: bytes
    row: int
    raw: bytes

    @property
    def payload(self) -> bytes:
        return self.raw.split(b" ", 4)[4][:-1]

    @property
    def cursor(self) -> Cursor:
        """The place in the input after this row, from which a resume reads."""
        return Cursor(*map(int, self.raw.split(b" ", 4)[3].split(b":")))


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not an intact line; ``torn`` if they are an unfinished last line, as a crash leaves it."""

    offset: int
    size: int
    torn: bool


def encode_line(kind: bytes, index: int, cursor: Cursor | None, payload: bytes) -> bytes:
    """The line ``CRC KIND INDEX CURSOR PAYLOAD\\n`` of one record; ``payload`` is JSON without a newline.

    CRC is the CRC-32 of all bytes after it, in hex digits; the cursor, ``file:offset:row:index`` or ``-``, is the place
    in the input after the row, from which reading can continue.
    """
    position = b"-" if cursor is None else b"%d:%d:%d:%d" % (cursor.file, cursor.offset, cursor.row, cursor.index)
    body = b" %b %d %b %b\n" % (kind, index, position, payload)
    return b"%08x" % crc32(body) + body


def decode_line(raw: bytes, offset: int) -> Line | None:
    """The record in ``raw`` (newline included), or None if it is not exactly as ``encode_line`` writes it."""
    if raw[:8] != b"%08x" % crc32(raw[8:]):
        return None
    kind = raw[9:10]
    try:
        index = int(raw[11 : raw.index(b" ", 11)])
    except ValueError:
        return None
    return Line(offset, kind, index, raw) if kind in _KINDS else None


def scan(file: BinaryIO) -> Iterator[Line | Damage]:
    """Every line of a segment in order, intact or damaged; needs memory for one line."""
    offset = 0
    for raw in file:
        yield decode_line(raw, offset) or Damage(offset, len(raw), torn=not raw.endswith(b"\n"))
        offset += len(raw)


def next_segment(folder: Path, last: Path | None) -> Path:
    """The file of a new segment, to be written after ``last``."""
    return folder / f"{1 if last is None else _number(last) + 1:06d}-{token_hex(4)}{SUFFIX}"


def segments(folder: Path) -> list[Path]:
    """The segments of a journal in the order they were begun in; [] without a journal."""
    paths = [path for path in folder.glob(f"*{SUFFIX}") if _NAME.fullmatch(path.stem) and path.is_file()]
    return sorted(paths, key=lambda path: (_number(path), path.name))


def written_at(folder: Path) -> float:
    """When a journal was last written to, as ``stat`` says; 0 if it does not exist."""
    return max((path.stat().st_mtime for path in segments(folder)), default=0.0)


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[0])


class SegmentReader:
    """Random access to the lines of a journal's segments, with a bounded number of open files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()  # least recently used first

    def read(self, segment: int, offset: int) -> Line:
        """The line at ``offset`` of the path at position ``segment``. Raises StorageError if it is damaged."""
        path = self._paths[segment]
        try:
            file = self.file(segment)
            file.seek(offset)
            line = decode_line(file.readline(), offset)
        except OSError as error:
            raise storage_error("read", path, error) from error
        if line is None:
            raise StorageError(f"{path}: the record at byte {offset} no longer matches its checksum; {CHECK_DISK}")
        return line

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def file(self, segment: int) -> BinaryIO:
        if segment not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[segment] = self._paths[segment].open("rb", buffering=16 << 10)
        self._open.move_to_end(segment)
        return self._open[segment]


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Place of a finished row's record: its segment, the offset of its line, and its kind."""

    segment: int
    offset: int
    is_error: bool


class RowIndex:
    """The finished rows of one shard, by index: ``index in done``, ``len(done)``, ``done.first_gap``.

    A row of another shard is never in the set.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard_rows = shard.rows()  # finished or not, by their positions in _packed
        self._packed = array("q")
        self._gap = 0  # all positions before it are filled
        self.num_results = 0
        self.num_errors = 0

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int) or index not in self.shard_rows:
            return False
        position = self.shard_rows.index(index)
        return position < len(self._packed) and self._packed[position] != _ABSENT

    def __len__(self) -> int:
        return self.num_results + self.num_errors

    def __iter__(self) -> Iterator[int]:
        return (index for index, _ in self._finished())

    def indexes(self, *, errors: bool) -> Iterator[int]:
        """Ascending indexes of the rows that ended in an error, or in a result."""
        return (index for index, packed in self._finished() if packed & 1 == errors)

    @property
    def first_gap(self) -> int:
        """The smallest unfinished index of the shard; all calls together take one pass over the index."""
        packed = self._packed
        while self._gap < len(packed) and packed[self._gap] != _ABSENT:
            self._gap += 1
        return self.shard_rows[self._gap]

    @property
    def num_passed(self) -> int:
        """Number of the shard's rows up to the last finished one, finished or not."""
        return len(self._packed)

    def num_below(self, index: int) -> int:
        """Number of the shard's rows before ``index``, finished or not."""
        return len(range(self.shard_rows.start, index, self.shard_rows.step))

    def covers(self, num_rows: int) -> bool:
        """Whether these are exactly the shard's rows of an input of ``num_rows`` rows."""
        return self.first_gap >= num_rows and len(self) == self.num_below(num_rows)

    def add(self, index: int, segment: int, offset: int, is_error: bool) -> None:
        """Store where a row's record is, replacing an earlier one. Raises ValueError for a row of another shard."""
        packed, position = self._packed, self.shard_rows.index(index)
        if position >= len(packed):
            packed.extend([_ABSENT] * (position + 1 - len(packed)))
        elif packed[position] != _ABSENT:
            self._count(packed[position] & 1, -1)
        packed[position] = (segment << _OFFSET_BITS | offset) << 1 | is_error
        self._count(is_error, 1)

    def location(self, index: int) -> RowLocation:
        """The location of a finished row's record. Raises KeyError for a row that is not finished."""
        if index not in self:
            raise KeyError(index)
        packed = self._packed[self.shard_rows.index(index)]
        segment, offset = divmod(packed >> 1, 1 << _OFFSET_BITS)
        return RowLocation(segment, offset, bool(packed & 1))

    def previous(self, index: int) -> int | None:
        """The index of the shard's row before ``index``, or None for its first row."""
        position = self.shard_rows.index(index)
        return self.shard_rows[position - 1] if position else None

    def _finished(self) -> Iterator[tuple[int, int]]:
        rows = zip(self.shard_rows, self._packed, strict=False)
        return ((index, packed) for index, packed in rows if packed != _ABSENT)

    def _count(self, is_error: int, change: int) -> None:
        self.num_errors += change * is_error
        self.num_results += change * (1 - is_error)

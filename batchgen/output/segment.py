"""The journal's bytes: one record a line, each with its own checksum, so damage costs no more than the lines it hits.

A line is ``CRC KIND INDEX CURSOR PAYLOAD\\n``: CRC-32 (8 hex digits) of all bytes after it, the newline included; kind
``r`` (result), ``e`` (error) or ``p`` (tokens of a half-done row); the row's index; ``file:offset:row:index`` of where
reading can go on after the row (``-`` for ``p``); one JSON value. Escaped JSON holds no newline, so after any damage
the next newline is the start of an intact line. It knows neither segments' names nor which record supersedes which.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from batchgen.core.records import Cursor

RESULT, ERROR, PARTIAL = b"r", b"e", b"p"
_KINDS = frozenset({RESULT, ERROR, PARTIAL})


class Line(NamedTuple):  # a dataclass takes three times as long to make, and opening a journal makes one a row
    """An intact line of a segment, that of row ``row``, starting at byte ``offset``; the rest is parsed on demand."""

    offset: int
    kind: bytes
    row: int
    raw: bytes

    @property
    def payload(self) -> bytes:
        """The JSON text of the record."""
        return self.raw.split(b" ", 4)[4][:-1]

    @property
    def cursor(self) -> Cursor:
        """Where reading goes on after this row."""
        return Cursor(*map(int, self.raw.split(b" ", 4)[3].split(b":")))


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no intact line: ``torn`` when they are an unfinished last line, as a crash leaves it."""

    offset: int
    size: int
    torn: bool


def encode_line(kind: bytes, index: int, cursor: Cursor | None, payload: bytes) -> bytes:
    """The line of one record; ``payload`` is JSON without a newline."""
    where = b"-" if cursor is None else b"%d:%d:%d:%d" % (cursor.file, cursor.offset, cursor.row, cursor.index)
    body = b" %b %d %b %b\n" % (kind, index, where, payload)
    return b"%08x" % crc32(body) + body


def decode_line(raw: bytes, offset: int) -> Line | None:
    """The record in ``raw`` (newline included), or None where it is not exactly what ``encode_line`` wrote."""
    if raw[:8] != b"%08x" % crc32(raw[8:]):
        return None
    kind = raw[9:10]
    try:
        index = int(raw[11 : raw.index(b" ", 11)])
    except ValueError:
        return None
    return Line(offset, kind, index, raw) if kind in _KINDS else None


def scan(file: BinaryIO) -> Iterator[Line | Damage]:
    """Every line of a segment in order, intact or not; needs memory for one line."""
    offset = 0
    for raw in file:
        yield decode_line(raw, offset) or Damage(offset, len(raw), torn=not raw.endswith(b"\n"))
        offset += len(raw)

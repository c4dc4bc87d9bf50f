"""The bytes of a text file, decompressed if it is compressed; a damaged file ends early, with the reason.

Compression is recognized by the first bytes, never by the name: UTF-8 text cannot begin with them.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Generator
from contextlib import suppress
from typing import Any, BinaryIO

import pyarrow as pa

from batchgen.core.units import one_line
from batchgen.input.input_bytes import BUFFER_BYTES, InputBytes

_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f: an empty frame, with which pzstd begins
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MAGIC |= {bytes([0x50 + number]) + _SKIPPABLE: "zstd" for number in range(16)}
_FOREIGN_MAGIC = {
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"\xff\x06\0\0sNaPpY": "snappy",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
}


_ESCAPE = "batchgen.escape"  # an error handler of codecs


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Replace undecodable bytes by surrogates, which UTF-8 never has: one for all bytes if they include ASCII."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    with suppress(UnicodeError):
        escaped, end = codecs.lookup_error("surrogateescape")(error)
        return str(escaped), end
    is_wide = error.encoding.startswith(("utf-16", "utf-32"))
    ends_line = not is_wide and b"\n" in error.object[error.start : error.end]
    return "\udcff\n" if ends_line else "\udcff", error.end


codecs.register_error(_ESCAPE, _escape)


class Decompressed(io.RawIOBase):
    """The decompressed content of a file.

    It ends where it cannot be decompressed any further, and ``damage`` then says why; the block with the damaged byte
    (some 20 kB of a gzip file, a block of a zstd file) is lost. A real failure to read raises ``OSError``.
    """

    def __init__(self, content: InputBytes, codec: str) -> None:
        self.damage: str | None = None
        self._content = content
        self._codec = codec
        self._num_bytes = content.num_bytes
        self._blocks = self._read_blocks()
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader passes
        """Fill ``buffer`` with bytes of the next block; returns their number, 0 at the end."""
        if not self._pending:
            self._pending = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def close(self) -> None:
        self._blocks.close()  # and the file with it
        super().close()

    def _read_blocks(self) -> Generator[bytes]:
        """The content in blocks. A block with damage in it is lost, so it is read again in smaller ones."""
        done = 0
        for block_bytes in (BUFFER_BYTES, 1 << 10, 1):
            with self._content.open() as file, self._decompressed(file) as stream:
                for start in range(0, done, BUFFER_BYTES):
                    stream.read(min(BUFFER_BYTES, done - start))
                try:
                    while block := stream.read(block_bytes):
                        done += len(block)
                        yield block
                    return
                except OSError as error:
                    if error.errno is not None:
                        raise
                    self.damage = one_line(error)

    def _decompressed(self, file: BinaryIO) -> Any:
        return pa.CompressedInputStream(pa.PythonFile(file, "r").get_stream(0, self._num_bytes), self._codec)


class Transcoded(io.RawIOBase):
    """Text of another encoding, converted to UTF-8. Undecodable bytes are kept and make their rows error rows."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)(_ESCAPE)
        self._pending = b""
        self._is_ended = False

    @property
    def damage(self) -> str | None:
        return damage(self._stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader passes
        """Fill ``buffer`` with decoded bytes; returns their number, 0 at the end."""
        while not self._pending and not self._is_ended:
            block = self._stream.read(BUFFER_BYTES)
            self._is_ended = not block
            self._pending = self._decode(block).encode(errors="surrogateescape")
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size

    def _decode(self, block: bytes) -> str:
        """The text of a block. If decoding fails, the block is decoded as if the file ended with it."""
        before = self._decoder.getstate()
        try:
            return self._decoder.decode(block, self._is_ended)
        except UnicodeError:
            self._decoder.setstate(before)
            return self._decoder.decode(block, True)

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_text(content: InputBytes, offset: int = 0) -> BinaryIO:
    """A stream of the file's decompressed text in UTF-8, from byte ``offset`` of that text on. Raises ``OSError``.

    In a plain file it seeks; other files are decompressed or decoded up to the offset.
    """
    plain = content.open()
    codec = _codec(plain)
    if codec is None and not content.encoding:
        plain.seek(offset)
        return plain
    if codec is None:
        plain.seek(0)
        stream = plain
    else:
        plain.close()
        stream = io.BufferedReader(Decompressed(content, codec), BUFFER_BYTES)
    if content.encoding:
        stream = io.BufferedReader(Transcoded(stream, content.encoding), BUFFER_BYTES)
    while offset and (skipped := stream.read(min(offset, BUFFER_BYTES))):
        offset -= len(skipped)
    return stream


def _codec(stream: BinaryIO) -> str | None:
    head = stream.read(4)
    return next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)


def damage(stream: BinaryIO) -> str | None:
    """The damage that ended a stream of ``open_text`` too early; None if there is none."""
    raw = getattr(stream, "raw", None)
    return raw.damage if isinstance(raw, Decompressed | Transcoded) else None


def foreign_compression(content: InputBytes) -> str | None:
    """The name of an unsupported compression, if the file begins with its magic bytes."""
    with content.open() as stream:
        head = stream.read(16)
    return next((name for magic, name in _FOREIGN_MAGIC.items() if head.startswith(magic)), None)

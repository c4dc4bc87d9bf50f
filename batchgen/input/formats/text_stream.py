"""The bytes of a text file, decompressed where needed; a damaged compressed file ends early with the reason.

Compression is recognized by the first bytes, never by the name: no UTF-8 text begins with the marks of gzip or zstd.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from batchgen.core.units import one_line
from batchgen.input.input_bytes import BUFFER_BYTES, InputBytes

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Decompressed(io.RawIOBase):
    """The decompressed content of a file.

    It ends where it cannot be decompressed any further, and ``damage`` then says why; what is decompressed in one go
    with a damaged byte (some 20 kB of a gzip file, a block of a zstd file) is lost with it. A real failure to read
    raises ``OSError``.
    """

    def __init__(self, content: InputBytes, codec: str) -> None:
        self.damage: str | None = None
        self._content = content
        self._codec = codec
        self._blocks = self._read_blocks()
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader passes
        """Fill ``buffer`` as far as the next block reaches; 0 at the end."""
        if not self._pending:
            self._pending = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def _read_blocks(self) -> Iterator[bytes]:
        """The content in blocks. A block with damage in it is lost, so it is read again in smaller ones."""
        done = 0
        for block_bytes in (BUFFER_BYTES, 1 << 10, 1):
            with pa.input_stream(self._content.arrow_source(), compression=self._codec) as stream:
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


def open_text(content: InputBytes, offset: int = 0) -> BinaryIO:
    """A stream of the file's text that starts ``offset`` bytes into the decompressed text. Raises ``OSError``.

    It seeks in a plain file, and decompresses a compressed one up to there.
    """
    plain = content.open()
    codec = _codec(plain)
    if codec is None:
        plain.seek(offset)
        return plain
    plain.close()
    stream: BinaryIO = io.BufferedReader(Decompressed(content, codec), BUFFER_BYTES)
    while offset and (skipped := stream.read(min(offset, BUFFER_BYTES))):
        offset -= len(skipped)
    return stream


def is_compressed(stream: BinaryIO) -> bool:
    """Whether the bytes at the start of a file are those of a compressed one."""
    return _codec(stream) is not None


def _codec(stream: BinaryIO) -> str | None:
    head = stream.read(4)
    return next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)


def damage(stream: BinaryIO) -> str | None:
    """Why a stream of ``open_text`` ended before its file did; None while it has not."""
    raw = getattr(stream, "raw", None)
    return raw.damage if isinstance(raw, Decompressed) else None

"""The bytes of one input file, on this machine or at an address: reads them and notices changes.

A remote file is read in the version that was found first. The content is opaque to this module.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from batchgen.core.addresses import bare, masked, scheme_of
from batchgen.core.errors import InputError, RemoteError, UsageError
from batchgen.core.file_digests import Digests, input_changed
from batchgen.core.remote import attempt, open_store, refusals_as_usage

BUFFER_BYTES = 1 << 18
BLOCK_BYTES = 4 << 20  # of a remote file, fetched at once
_CHEAP_BYTES = 64 << 20  # a remote file that is larger is not read once more to count its rows
_VERSIONS = ("generation", "blob_id", "ETag", "Last-Modified")  # at Google Cloud, the Hub, S3 and on the web
_FRESH = {"hf": {"expand_info": True, "refresh": True}}  # makes the store return them, uncached


class LocalFile:
    """A file on this machine, which messages call ``name``; ``encoding`` is "" for UTF-8. Raises OSError."""

    def __init__(self, path: Path, encoding: str = "") -> None:
        self.path = path
        self.encoding = encoding
        self.name = str(path)
        self.suffixes = path.suffixes
        self.num_bytes = path.stat().st_size

    def open(self) -> BinaryIO:
        """A new seekable stream of the bytes. Raises OSError, or BatchgenErrors for a remote file."""
        return self.path.open("rb", buffering=BUFFER_BYTES)

    def arrow_source(self) -> str:
        """The file for Arrow: a path, which Arrow reads itself, or a stream."""
        return self.name

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """Fingerprint that a resume compares. Raises UsageError."""
        return digests.fingerprint(self.path)

    def check_version(self) -> None:
        """Raises InputError if the file at an address has changed since it was opened."""

    def countable_bytes(self) -> int | None:
        """The size; None if reading the file only to count its rows would cost too much."""
        return self.num_bytes


class RemoteFile:
    """The file at an address, like ``LocalFile``; only the version found when it is opened is ever read.

    ``version`` is an ETag, a generation, a blob id, or the time of the last change. Raises UsageError if the file does
    not exist, its version is unknown or access is refused, and RemoteError if the server cannot be reached.
    """

    def __init__(self, address: str, encoding: str = "") -> None:
        self.path = None
        self.encoding = encoding
        self.name = masked(address)
        self._name = PurePosixPath(bare(address))
        self.suffixes = self._name.suffixes
        self._file: Any = None  # the store's file object, opened at the first read
        with refusals_as_usage():
            self._store, self._path = open_store(address)
            self.num_bytes, self.version = attempt("open", address, self._look)

    def open(self) -> BinaryIO:
        return io.BufferedReader(_RemoteStream(self), BLOCK_BYTES)

    def arrow_source(self) -> BinaryIO:
        return self.open()

    def countable_bytes(self) -> int | None:
        return self.num_bytes if self.num_bytes <= _CHEAP_BYTES else None

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        return {"file": self._name.name or self.name, "version": self.version, "bytes": self.num_bytes}

    def check_version(self) -> None:
        try:
            num_bytes, version = attempt("read", self.name, self._look)
        except RemoteError as error:
            raise self._changed(error) from error
        if (num_bytes, version) != (self.num_bytes, self.version):
            sizes = f"it had {self.num_bytes:,} bytes and has {num_bytes:,} now"
            versions = f"its version was {self.version} and is {version} now"
            raise input_changed(self.name, versions if num_bytes == self.num_bytes else sizes)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to ``end`` or the end of the file.

        Raises InputError if this version is gone, RemoteError if the file cannot be read.
        """
        end = min(end, self.num_bytes)
        if start >= end:
            return b""
        try:
            return attempt("read on in", self.name, partial(self._fetch, start, end))
        except RemoteError as error:
            raise self._changed(error) from error

    def _look(self) -> tuple[int, str]:
        """The size in bytes and the version now."""
        info = self._store.info(self._path, **_FRESH.get(str(scheme_of(self.name)), {}))
        if info["type"] != "file":
            raise FileNotFoundError(self._path)
        version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
        if info["size"] is None or not version:
            raise UsageError(
                f"{self.name}: the server sends no {'size' if version else 'ETag or Last-Modified'}, so a changed file "
                "cannot be detected: download it to this machine first"
            )
        return int(info["size"]), version

    def _fetch(self, start: int, end: int) -> bytes:
        if self._file is None:
            self._file = self._store.open(self._path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        try:
            self._file.seek(start)
            content: bytes = self._file.read(end - start)
        except ValueError as error:  # raised by fsspec's web files
            why = "the server does not support byte ranges: download the file to this machine first"
            raise RemoteError(f"cannot read {self.name}: {why}") from error
        if self._look() != (self.num_bytes, self.version):
            raise RemoteError(f"cannot read {self.name}: it is no longer the same version", "changed")
        if len(content) != end - start:
            raise ConnectionError(f"{len(content):,} bytes came instead of {end - start:,}")
        return content

    def _changed(self, error: RemoteError) -> RemoteError | InputError:
        """InputError if the version is gone; otherwise the error, with the advice to resume."""
        if error.kind in ("changed", "missing", "no bucket"):
            return input_changed(self.name, str(error).partition(": ")[2])
        return RemoteError(f"{error}; finished rows are kept: run again to resume", error.kind)


class _RemoteStream(io.RawIOBase):
    """A seekable stream of the bytes of a remote file."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.num_bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(self._at, self._at + len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


InputBytes = LocalFile | RemoteFile

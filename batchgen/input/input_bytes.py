"""The bytes of one input file, on this machine or at an address: how they are read, and how a change is noticed.

What is read of a remote file belongs to the version that was found first. What is in a file is unknown here.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from batchgen.core.errors import InputError, RemoteError
from batchgen.core.fingerprint import Digests, input_changed
from batchgen.core.remote import attempt, open_store, refusals_as_usage, scheme_of

if TYPE_CHECKING:
    from batchgen.input.pinned_files import PinnedFile, PinnedStream

BUFFER_BYTES = 1 << 18
_CHEAP_BYTES = 64 << 20  # a remote file that is larger is not read once more to count its rows


class LocalFile:
    """A file on this machine; ``name`` stands for it in messages and rows. Raises OSError where there is none.

    ``encoding`` is that of its text, "" where it is UTF-8.
    """

    def __init__(self, path: Path, encoding: str = "") -> None:
        self.path = path
        self.encoding = encoding
        self.name = str(path)
        self.suffixes = path.suffixes
        self.num_bytes = path.stat().st_size

    def open(self) -> BinaryIO:
        """A new stream of the bytes, which seeks. Raises OSError, or BatchgenErrors of a remote file."""
        return self.path.open("rb", buffering=BUFFER_BYTES)

    def arrow_source(self) -> str:
        """The same for Arrow: a path, which it reads itself, or a stream."""
        return self.name

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """What a resume compares. Raises UsageError."""
        return digests.fingerprint(self.path)

    def check_version(self) -> None:
        """Raises InputError if what is at an address is no longer of the version that was found first."""

    def countable_bytes(self) -> int | None:
        """The size; None where reading the file only to count its rows would cost too much."""
        return self.num_bytes


class RemoteFile:
    """The file at an address, as ``LocalFile``: nothing is given of another version than the one that is there now.

    ``path`` is None, since it is not on this machine. Raises UsageError where there is none or access is refused,
    RemoteError where the server cannot be reached.
    """

    def __init__(self, address: str, encoding: str = "") -> None:
        self.path = None
        self.encoding = encoding
        self.name = address
        where = urlsplit(address).path if scheme_of(address) in ("http", "https") else address
        self._file = PurePosixPath(where)
        self.suffixes = self._file.suffixes
        with refusals_as_usage():
            self._pinned = _pinned_file(address)
            self.num_bytes, self.version = attempt("open", address, self._pinned.look)

    def open(self) -> BinaryIO:
        return io.BufferedReader(self.arrow_source(), BUFFER_BYTES)

    def arrow_source(self) -> PinnedStream:
        from batchgen.input.pinned_files import PinnedStream

        return PinnedStream(self.read, self.num_bytes)

    def countable_bytes(self) -> int | None:
        return self.num_bytes if self.num_bytes <= _CHEAP_BYTES else None

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        return {"file": self._file.name or self.name, "version": self.version, "bytes": self.num_bytes}

    def check_version(self) -> None:
        try:
            found = attempt("read", self.name, _pinned_file(self.name).look)
        except RemoteError as error:
            raise self._changed(error) from error
        if found != (self.num_bytes, self.version):
            sizes = f"it had {self.num_bytes:,} bytes and has {found[0]:,} now"
            versions = f"its version was {self.version} and is {found[1]} now"
            raise input_changed(self.name, versions if found[0] == self.num_bytes else sizes)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to ``end`` or the end of the file.

        Raises InputError where they can no longer be had of this version, RemoteError where not at all.
        """
        end = min(end, self.num_bytes)
        if start >= end:
            return b""
        try:
            return attempt("read on in", self.name, partial(self._fetch, start, end))
        except RemoteError as error:
            raise self._changed(error) from error

    def _fetch(self, start: int, end: int) -> bytes:
        content = self._pinned.fetch(start, end)
        if len(content) != end - start:
            raise ConnectionError(f"{len(content):,} bytes came instead of {end - start:,}")
        return content

    def _changed(self, error: RemoteError) -> RemoteError | InputError:
        """InputError where the version has gone; else the error, which says that the run resumes."""
        if error.kind in ("changed", "missing", "no bucket"):
            return input_changed(self.name, str(error).partition(": ")[2])
        return RemoteError(f"{error}; finished rows are kept: run again to resume", error.kind)


InputBytes = LocalFile | RemoteFile


def _pinned_file(address: str) -> PinnedFile:
    """Raises UsageError and RemoteError as ``open_store``."""
    from batchgen.input import pinned_files

    scheme = str(scheme_of(address))
    if scheme in ("http", "https"):
        return pinned_files.WebFile(address)
    kinds: dict[str, Callable[[Any, str], PinnedFile]] = {
        "s3": pinned_files.S3File,
        "gs": pinned_files.GsFile,
        "hf": pinned_files.HubFile,
    }
    return kinds[scheme](*open_store(address))

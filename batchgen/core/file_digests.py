"""Fingerprints of files: the SHA-256 of their content, whatever their path and time.

``Digests`` reads a file again only when its state in the file system has changed, as git's index does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.core.errors import InputError, UsageError

# A later start trusts a digest only if the file was older than one tick of its file system's clock, since a change
# within a tick leaves the times equal. FAT has the longest tick, 2 s.
_TICK_NS = 2_000_000_000


class FileState(NamedTuple):
    """Metadata of a file; every change of the content changes at least the ctime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The current state of the file, links followed. Raises OSError."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    @property
    def written(self) -> tuple[int, ...]:
        """Fields that change when the file is written to or replaced, but not with new rights or links."""
        return self.size, self.mtime_ns, self.inode


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file's digest, its state while it was read, and whether a later start may trust that state."""

    state: FileState
    sha256: str
    is_trusted: bool


class Digests:
    """SHA-256 of files by path, each read once. ``kept`` is an earlier ``to_plain``; its invalid parts are ignored."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._kept = kept or {}
        self._entries: dict[str, _Entry] = {}

    def to_plain(self) -> dict[str, Any]:
        """The digests and states of this run's files that a later run can trust, by absolute path."""
        return {
            path: {"sha256": entry.sha256, "state": list(entry.state)}
            for path, entry in sorted(self._entries.items())
            if entry.is_trusted
        }

    def digest(self, path: Path) -> str:
        """The file's digest as hex. Raises UsageError when it cannot be read."""
        return self._entry(path).sha256

    def fingerprint(self, path: Path) -> dict[str, Any]:
        """Name, digest and size in bytes of a file, which a resume compares. Raises UsageError."""
        entry = self._entry(path)
        return {"file": path.name, "sha256": entry.sha256, "bytes": entry.state.size}

    def state(self, path: Path) -> FileState | None:
        """The state that the digest belongs to; None for a file whose digest was not asked for."""
        entry = self._entries.get(_key(path))
        return entry.state if entry else None

    def check_unchanged(self, path: Path) -> None:
        """Raises InputError for a file that was written to or replaced since its digest was taken."""
        before = self._entries[_key(path)].state
        try:
            now = FileState.of(path)
        except OSError as error:
            raise input_changed(path, f"it cannot be read any more ({error.strerror or error})") from None
        if now.written != before.written:
            sizes = f"it had {before.size:,} bytes and has {now.size:,} now"
            raise input_changed(path, sizes if now.size != before.size else "it was written to, or replaced")

    def _entry(self, path: Path) -> _Entry:
        key = _key(path)
        if key not in self._entries:
            self._entries[key] = self._trusted(path) or _read(path)
        return self._entries[key]

    def _trusted(self, path: Path) -> _Entry | None:
        """The file's entry from an earlier run, if its state has not changed since then."""
        match self._kept.get(_key(path)):
            case {"sha256": str(sha256), "state": [*state]}:
                try:
                    now = FileState.of(path)
                except OSError:
                    return None
                return _Entry(now, sha256, is_trusted=True) if [*now] == state else None
        return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content as hex, as ``sha256sum`` prints it.

    One core hashes about 1.7 GB/s with SHA instructions and 0.5 GB/s without. Raises
    UsageError when the file cannot be read.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise UsageError(f"cannot read {path}: not a regular file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> _Entry:
    """Digest and state that belong together. Raises UsageError."""
    began_ns = time.time_ns()
    try:
        state = FileState.of(path)
        digest = file_digest(path)
        if FileState.of(path) == state:
            return _Entry(state, digest, is_trusted=state.ctime_ns + _TICK_NS < began_ns)
    except OSError as error:
        raise _unreadable(path, error) from error
    raise UsageError(f"{path} changes while it is read; run again when nothing writes to it any more")


def _key(path: Path) -> str:
    return str(path.absolute())


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror or error}")


def input_changed(name: object, how: str) -> InputError:
    """The error for a file that has changed since the run first read it."""
    return InputError(
        f"{name} has changed while it was in use: {how}. Nothing was published and finished rows are kept: run "
        "again to resume, with what the input holds then"
    )

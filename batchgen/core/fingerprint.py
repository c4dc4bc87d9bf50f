"""What identifies a file on resume: its content, all of it; where it lies and when it was written do not count.

``Digests`` reads a file only when what the system says of it (``FileState``) has changed, as git's index does. The
same comparison tells a run that an input or a model has changed under it. It knows paths and bytes, no rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.core.errors import InputChanged, UsageError

# A change within one tick of a file system's clock leaves no trace in the times: so long must the last one be past
# before equal times prove equal content. FAT's clock has the longest tick, of 2 s.
SETTLED_NS = 2_000_000_000
_AHEAD_S = 5.0  # how long a digest is trusted where the clock of the file system is ahead of ours
TRIES = 5  # at a file that changes while it is read


class FileState(NamedTuple):
    """What the system says of a file without reading it: every change of the content changes at least the ctime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state now, of the file that a link leads to. Raises OSError."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    def is_settled(self, now_ns: int) -> bool:
        """Whether a later change is sure to leave another state; an mtime in the future was set by hand."""
        return max(self.ctime_ns, self.mtime_ns if self.mtime_ns <= now_ns else 0) + SETTLED_NS < now_ns


@dataclass(frozen=True, slots=True)
class _Known:
    """A file's digest, its state before and after it was read, and whether equal states prove equal content."""

    state: FileState
    sha256: str
    is_settled: bool
    read_at: float = -_AHEAD_S

    def is_ahead(self) -> bool:
        """Whether the file's clock is ahead of ours and it was read just now: reading it each time would take hours."""
        return self.state.ctime_ns > time.time_ns() and time.monotonic() - self.read_at < _AHEAD_S


class Digests:
    """SHA-256 of files by path, each read once, and again only if its state has changed or is too fresh to tell.

    ``kept`` is what ``to_plain`` gave an earlier run; anything else in it is passed over.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._kept = kept or {}
        self._known: dict[str, _Known] = {}

    def to_plain(self) -> dict[str, Any]:
        """The digests and states of this run's files that a later run can trust, by absolute path."""
        return {
            path: {"sha256": known.sha256, "state": list(known.state)}
            for path, known in sorted(self._known.items())
            if known.is_settled
        }

    def digest(self, path: Path) -> str:
        """The file's digest as hex. Raises UsageError when it cannot be read or changes all the time."""
        return self._find(path).sha256

    def fingerprint(self, path: Path) -> dict[str, Any]:
        """What identifies a file on resume, wherever it lies: its name, size in bytes and digest; raises UsageError."""
        known = self._find(path)
        return {"file": path.name, "sha256": known.sha256, "bytes": known.state.size}

    def state(self, path: Path) -> FileState | None:
        """The state that the digest belongs to; None for a file whose digest was not asked for."""
        known = self._known.get(_key(path))
        return known.state if known else None

    def is_unchanged(self, path: Path) -> bool:
        """Whether a file has stayed as it was since its digest was taken; if not, what was read since may be wrong.

        False for one whose content is the same again though its state is not: from now on that state counts. Raises
        InputChanged for other content, or if the file cannot be read. The digest must have been asked for before.
        """
        known = self._known[_key(path)]
        try:
            if (known.is_settled or known.is_ahead()) and FileState.of(path) == known.state:
                return True
            now = _read(path)
        except (OSError, UsageError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise _changed(path, f"it cannot be read any more ({reason})") from None
        if now.sha256 != known.sha256:
            sizes = f"it had {known.state.size:,} bytes and has {now.state.size:,} now"
            same_size = f"it has other content in its {now.state.size:,} bytes"
            raise _changed(path, same_size if now.state.size == known.state.size else sizes)
        self._known[_key(path)] = now
        return now.state == known.state

    def _find(self, path: Path) -> _Known:
        key = _key(path)
        if key not in self._known:
            self._known[key] = self._trusted(path) or _read(path)
        return self._known[key]

    def _trusted(self, path: Path) -> _Known | None:
        """What an earlier run found, if the file is still in that state."""
        match self._kept.get(_key(path)):
            case {"sha256": str(sha256), "state": [*state]}:
                try:
                    now = FileState.of(path)
                except OSError:
                    return None
                return _Known(now, sha256, is_settled=True) if [*now] == state else None
        return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content as hex, the same that ``sha256sum`` prints, so any edit is noticed.

    It reads at the speed of the disk, or of one core (about 1.7 GB/s with SHA instructions, 0.5 GB/s without). Raises
    UsageError when the file cannot be read.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise UsageError(f"cannot read {path}: not a regular file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> _Known:
    """Digest and state that belong together. Raises UsageError."""
    for _ in range(TRIES):
        began_ns = time.time_ns()
        try:
            before = FileState.of(path)
            digest = file_digest(path)
            if FileState.of(path) == before:
                return _Known(before, digest, before.is_settled(began_ns), time.monotonic())
        except OSError as error:
            raise _unreadable(path, error) from error
    raise UsageError(f"{path} changes while it is read; run again when nothing writes to it any more")


def _key(path: Path) -> str:
    return str(path.absolute())


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror or error}")


def _changed(path: Path, how: str) -> InputChanged:
    return InputChanged(
        f"{path} has changed while it was in use: {how}. Nothing was published and finished rows are kept: "
        "put it back as it was and run again to resume, or start anew with --overwrite"
    )

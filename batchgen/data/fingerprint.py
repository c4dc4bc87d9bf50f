"""What identifies a file on resume: its content, all of it; where it lies and when it was written do not count."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError


def file_fingerprint(path: Path) -> dict[str, Any]:
    """What identifies a file on resume, wherever it lies: its name, size in bytes and digest. Raises UsageError."""
    return {"file": path.name, "sha256": file_digest(path), "bytes": path.stat().st_size}


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
        raise UsageError(f"cannot read {path}: {error.strerror}") from error

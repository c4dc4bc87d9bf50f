"""A digest of a file that notices edits without reading terabytes; neither name nor modification time enters it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError

_WHOLE_BYTES = 64 << 20  # files up to this size are hashed whole
_EDGE_BYTES = 1 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10


def file_fingerprint(path: Path) -> dict[str, Any]:
    """What identifies a file on resume, wherever it lies: its name, size in bytes and digest. Raises UsageError."""
    return {"file": path.name, "sha256": file_digest(path), "bytes": path.stat().st_size}


def file_digest(path: Path) -> str:
    """SHA-256 over the size and the content of a file, as hex.

    Up to 64 MiB all of it counts; of a larger file the first and last MiB and 256 blocks of 64 KiB spread evenly
    between them. So an edit that keeps the size of a large file and falls between two blocks is not noticed; one
    that moves the bytes after it is. Raises UsageError when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            for offset, length in _pieces(size):
                file.seek(offset)
                digest.update(file.read(length))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    """Offset and length of the pieces that count."""
    if size <= _WHOLE_BYTES:
        return [(offset, _EDGE_BYTES) for offset in range(0, size, _EDGE_BYTES)]
    last = size - _EDGE_BYTES
    samples = [(_EDGE_BYTES + number * (last - _EDGE_BYTES) // _SAMPLES, _SAMPLE_BYTES) for number in range(_SAMPLES)]
    return [(0, _EDGE_BYTES), *samples, (last, _EDGE_BYTES)]

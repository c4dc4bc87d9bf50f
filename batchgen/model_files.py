"""Reads what lies in a model folder, which anyone may have written: regular files of a bounded size, nothing else.

A FIFO or a device would be read for ever, and so would a sparse file of exabytes. So the size of each file that a
model or tokenizer may consist of is checked before any of them is opened. It knows no key of their content.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.machine import physical_bytes
from batchgen.units import shortened

_MAX_DATA_BYTES = 1 << 30  # of a JSON file or template; the largest tokenizers have 50 MB
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_files(folder: Path, patterns: Iterable[str]) -> None:
    """Check every file of ``folder`` that matches one of ``patterns``, without opening it.

    Raises:
        ModelError: one is no regular file (a link to one is) or is too large to be what its name says, or the weights
            are larger than the machine's memory.
    """
    weights_bytes = 0
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        size = file_bytes(path)
        if path.suffix == ".safetensors":
            weights_bytes += size
        elif size > _MAX_DATA_BYTES:
            raise ModelError(f"{path}: has {size:,} bytes, more than the {_MAX_DATA_BYTES:,} that a model's files have")
    if weights_bytes > physical_bytes():
        raise ModelError(
            f"{folder}: the weights have {weights_bytes:,} bytes, more than this machine's memory of "
            f"{physical_bytes():,}; run a smaller model"
        )


def file_bytes(path: Path) -> int:
    """Size of a regular file, or of the one that a link leads to.

    Raises:
        ModelError: there is none, or it is something else.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ModelError(f"{path}: is {kind}, not a regular file; a model folder holds regular files only")
    return found.st_size


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``max_bytes`` bytes.

    Raises:
        ModelError: no such regular file, too large, not UTF-8, not JSON, nested too deeply, or no object.
    """
    size = file_bytes(path)
    if size > max_bytes:
        raise ModelError(f"{path}: has {size:,} bytes; a file of this name has {max_bytes:,} at most")
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(size).decode())
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else shortened(str(error), 200)
        raise ModelError(f"{path}: not valid JSON ({why})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def _unreadable(path: Path, error: Exception) -> ModelError:
    why = error.strerror if isinstance(error, OSError) else error
    return ModelError(f"{path}: cannot be read ({why}); a model folder needs this file")

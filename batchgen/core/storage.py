"""Writes that either happen or do not: whole files by rename, and the system's refusals as one clear line.

Everything durable in a run directory goes through here, so the rules (fsync the file, rename, fsync the
folder; created with the user's umask) stand in one place. It knows bytes and paths, not what they mean.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchgen.core.errors import StorageError, UsageError

_HEAD_BYTES = 4096
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})  # file systems that cannot sync a folder


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into a ``StorageError`` that says what failed, where and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            advice = "free some space, then run again: finished rows are kept"
        else:
            advice = "put that right, then run again: finished rows are kept"
        raise StorageError(f"cannot {doing} {path}: {error.strerror or error}; {advice}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: files created in it, renamed or removed from it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """Where ``path`` is written before it appears: a hidden neighbour of fixed name, so crashes leave at most one."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """Write the content of ``path`` beside it; on leaving it is durable but not yet visible (see ``publish``).

    Raises StorageError; on any exception the temporary file is removed, which gives a full disk its space back.
    """
    temporary = temporary_name(path)
    try:
        with storage_errors("write", path), temporary.open("wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish(path: Path) -> None:
    """Let a staged file appear under its name, replacing what was there, and make that durable."""
    with storage_errors("write", path):
        temporary_name(path).replace(path)
        sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: after a crash at any moment the old or the new content is there, whole."""
    with staged_file(path) as file:
        file.write(content)
    publish(path)


def check_replaceable(path: Path, marker: bytes, what: str) -> None:
    """Raises UsageError unless ``path`` is free, empty, or a file that we wrote: ``marker`` is among its first bytes.

    ``what`` names such a file. The user names the path, and may have mistaken an input for it.
    """
    try:
        if not path.exists():
            return
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file: choose another path for {what}")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot use {path} for {what}: {error.strerror or error}") from error
    if head and marker not in head:
        raise UsageError(f"{path} exists and is not {what} of ours: it is left alone; choose another path")


def remove_file(path: Path) -> None:
    """Remove a file if it is there, and what a killed write of it left behind; durably."""
    with storage_errors("remove", path):
        path.unlink(missing_ok=True)
        temporary_name(path).unlink(missing_ok=True)
        sync_folder(path.parent)


def doomed_name(folder: Path) -> Path:
    """Where ``folder`` goes to be removed: a hidden neighbour of fixed name, which a kill can leave half empty."""
    return folder.with_name(f".{folder.name}.removed")


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it: after a crash at any moment it is there whole, or gone under that name."""
    doomed = doomed_name(folder)
    with storage_errors("remove", folder):
        shutil.rmtree(doomed, ignore_errors=True)
        if folder.is_dir():
            folder.replace(doomed)
            sync_folder(folder.parent)
            shutil.rmtree(doomed, ignore_errors=True)

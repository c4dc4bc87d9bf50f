"""Local files: atomic, durable writes (temporary file, fsync, rename, fsync of the folder), and checks of paths.

Everything durable in a run directory goes through it; errors of the system become one-line ``StorageError``s.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchgen.core.addresses import prefix_of
from batchgen.core.errors import StorageError, UsageError

_HEAD_BYTES = 4096
_FILE = "file://"
RUN_AGAIN = "run again: finished rows are kept"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})  # file systems that cannot sync a folder


def storage_error(doing: str, path: Path, error: OSError, then: str = RUN_AGAIN) -> StorageError:
    """``error`` as an error of the disk; ``then`` is what to do once the fault is gone."""
    if error.errno in _NO_SPACE:
        advice = f"free some space, then {then}"
    elif error.errno == errno.EFBIG:
        advice = f"raise the limit on the size of a file (ulimit -f), then {then}"
    else:
        advice = f"fix that, then {then}"
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}; {advice}")


@contextmanager
def storage_errors(doing: str, path: Path, then: str = RUN_AGAIN) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into ``storage_error``."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, path, error, then) from error


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a small file or pipe that a user names, line ends as ``\\n``.

    Raises OSError, UnicodeDecodeError, or ValueError for a device or a larger file; its text follows the file's name.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ValueError("is a device, not a file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"is larger than {max_bytes >> 20} MiB")
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for a pipe or device, from which a read might never return."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def sync_file(fd: int) -> None:
    """Make the bytes of an open file durable. On macOS an fsync leaves them in the drive's cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # a file system that has only an fsync, such as one in the network
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: files created in it, renamed or removed from it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written but not read cannot be synced
        return
    try:
        sync_file(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and make their names durable, even of a folder that exists. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing or [path]:
        sync_folder(folder.parent)


def temporary_name(path: Path) -> Path:
    """The file in which ``path`` is staged: a hidden sibling of fixed name, so crashes leave at most one."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def staged_file(path: Path, then: str = RUN_AGAIN) -> Iterator[BinaryIO]:
    """Write the content of ``path`` to its temporary file: durable afterwards, visible only after ``commit_staged``.

    Raises StorageError; on any exception the temporary file is removed, which frees space on a full disk. It is always
    a new file: an existing link of that name is not followed.
    """
    temporary = temporary_name(path)
    if temporary.is_dir():
        raise StorageError(
            f"cannot write {path}: its temporary name {temporary} is a folder; remove that and run again"
        )
    try:
        with storage_errors("write", path, then):
            temporary.unlink(missing_ok=True)
            with temporary.open("xb", buffering=1 << 20) as file:
                yield file
                file.flush()
                sync_file(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def commit_staged(path: Path) -> None:
    """Rename a staged file to its name, replacing an older file, and make that durable."""
    with storage_errors("write", path):
        temporary_name(path).replace(path)
        sync_folder(path.parent)


def write_atomic(path: Path, content: bytes, then: str = RUN_AGAIN) -> None:
    """Replace the content of ``path`` in one step; ``then`` as in ``storage_errors``. Raises StorageError."""
    with staged_file(path, then) as file:
        file.write(content)
    commit_staged(path)


def check_replaceable(path: Path, marker: bytes, what: str) -> None:
    """Raises UsageError unless ``path`` is free, empty, or written by this package: ``marker`` is in its first bytes.

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
        raise UsageError(
            f"{path} exists and is not {what} that batchgen wrote: it is not replaced; choose another path"
        )


def remove_file(path: Path) -> None:
    """Remove a file and its temporary file, if they exist, durably."""
    with storage_errors("remove", path):
        path.unlink(missing_ok=True)
        temporary_name(path).unlink(missing_ok=True)
        sync_folder(path.parent)


def trash_name(folder: Path) -> Path:
    """The name under which ``folder`` is removed: a hidden sibling of fixed name; a kill may leave it half empty."""
    return folder.with_name(f".{folder.name}.removed")


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content: a crash at any moment leaves it complete, or gone from its name."""
    trash = trash_name(folder)
    with storage_errors("remove", folder):
        shutil.rmtree(trash, ignore_errors=True)
        if folder.is_dir():
            folder.replace(trash)
            sync_folder(folder.parent)
            shutil.rmtree(trash, ignore_errors=True)


def check_path(text: str) -> None:
    """Raises ValueError (completes "<key> = <value>: ...") for remote addresses, NUL characters and too long names."""
    if text.lower().startswith(_FILE):
        raise ValueError(f"is a URL: write the path without {_FILE}")
    if prefix := prefix_of(text):
        raise ValueError(
            f"{prefix} is not a local path: copy the file; URLs work only in input.path and output.publish "
            "(a model on the Hub is ORGANIZATION/NAME)"
        )
    try:
        os.lstat(text)
    except ValueError:
        raise ValueError("holds a NUL or other character that no path can have") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("is too long for a path") from None


def absolute(path: Path) -> Path:
    """The absolute path. Raises UsageError for a relative one if the working directory is gone."""
    try:
        return path.absolute()
    except OSError as error:
        raise UsageError(f"{path} is relative, and the working directory cannot be found: {error.strerror}") from None

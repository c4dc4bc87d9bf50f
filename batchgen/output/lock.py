"""Lock of a run directory: ``run.lock``, held by ``flock``, which the system frees however the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchgen.core.errors import LockedError, UsageError
from batchgen.core.storage import read_regular, storage_errors

_HEAD = b'{"pid": '
_TRIES = 4  # status holds the lock for an instant, which must not turn a run away
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run directory."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """The lock, held until ``close``. Raises LockedError naming the holder.

    Raises StorageError if the file system cannot lock, UsageError if the file is not a lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        for attempt in range(_TRIES):
            fd = self._try()
            if fd is not None:
                break
            if attempt < _TRIES - 1:
                time.sleep(_PAUSE_S)
        else:
            raise LockedError(
                f"{path.parent} is in use by {_read_holder(path) or 'another process'}; wait for it or stop it"
            )
        self._fd = fd
        is_ours = stat.S_ISREG(os.fstat(fd).st_mode)  # after a crash of the machine it may hold zeros
        if not (is_ours and _HEAD.startswith(os.pread(fd, len(_HEAD), 0).rstrip(b"\0"))):
            os.close(fd)
            raise UsageError(f"{path} was not written by a run; choose another output.path")
        with storage_errors("write", path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)

    def close(self) -> None:
        """Free the lock. The file is removed while locked, so that other processes cannot lock a removed file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _try(self) -> int | None:
        """A descriptor that holds the lock, or None while another process does. Raises StorageError."""
        with storage_errors("lock", self._path):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._path.stat()):
                    return fd
            except (BlockingIOError, FileNotFoundError):  # held; or removed by a holder between our open and our lock
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            return None


def lock_holder(path: Path) -> Holder | None:
    """The process that holds the lock now, if any; looking does not keep other processes from taking it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name would block
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read_holder(path)
    finally:
        os.close(fd)
    return None


def _read_holder(path: Path) -> Holder | None:
    try:
        data = json.loads(read_regular(path))
        return Holder(int(data["pid"]), str(data["host"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

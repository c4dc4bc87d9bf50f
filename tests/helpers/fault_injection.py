"""Faults at the operations that a process does on the files of one folder: killed, torn, no power, no space, failing.

``Injector`` stands between the code under test and the operating system: it replaces the functions of ``os`` and
``io.open``. It counts the operations, and at the one it was given it does the fault. It is armed in a forked child,
which it may end, and never disarmed. What survives a loss of power is known to ``power_loss``.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NoReturn

from power_loss import Disk

Kind = Literal["kill", "torn", "power", "some power", "ENOSPC", "EIO"]
POWER: tuple[Kind, ...] = ("power", "some power")
KINDS: tuple[Kind, ...] = ("kill", "torn", *POWER, "ENOSPC", "EIO")
DEADLY = frozenset({"kill", "torn", *POWER})  # these end the process
KILLED = 137

_CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir")  # by path
_NEEDS_SPACE = frozenset({"create", "write", "mkdir", "replace", "rename", "fsync", "grow"})
_ONLY_READS = frozenset({"open", "read"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a file: what is done (``write``, ``create`` …) and the file's name."""

    name: str
    file: str

    @property
    def changes(self) -> bool:
        """Whether it does more than read."""
        return self.name not in _ONLY_READS

    def takes(self, kind: Kind) -> bool:
        """Whether a fault of this kind can happen here, and makes a difference."""
        if kind == "torn":
            return self.name == "write"
        if kind == "ENOSPC":
            return self.name in _NEEDS_SPACE
        return kind == "EIO" or self.changes  # killed before a read is killed after what was before it


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of ``kind`` at operation number ``at``; a lasting one goes on failing in all that comes after.

    With "power" nothing survives that was not synced, with "some power" a part of it, drawn by ``at``. Operations that
    only read are counted if ``counts_reads``: how many there are depends on how new the files are. With ``after``, the
    name of an operation and a pattern of files, it comes behind the ``at``-th of these.
    """

    kind: Kind
    at: int
    lasts: bool = True
    counts_reads: bool = True
    after: tuple[str, str] | None = None


class Injector:
    """Watches all operations under ``root`` of this process and does ``fault``, if any, at its place.

    ``operations`` holds what was done so far; ``on_fault`` is called as the fault happens, with the files of journals
    and how many of their bytes must survive a loss of power.
    """

    def __init__(self, root: Path, fault: Fault | None, on_fault: Callable[[dict[str, int]], object]) -> None:
        self.operations: list[Operation] = []
        self._root = str(root)
        self._fault = fault
        self._on_fault = on_fault
        self._watched: dict[int, str] = {}  # open descriptors and the names of their files
        self._disk: Disk | None = None  # watched where power is to be lost
        self._loser: int | None = None  # the thread that loses it

    def arm(self) -> None:
        """Replace the functions of this process."""
        if self._fault is not None and self._fault.kind in POWER:
            self._disk = Disk(Path(self._root))
        self._replace_paths()
        self._replace_descriptors()
        self._replace_open()

    def at(self, name: str, file: str, tear: Callable[[], None] | None = None) -> None:
        """One operation is about to be done; ``tear`` does half of it. Raises OSError where it is to fail."""
        if self._loser is not None:
            if self._loser != threading.get_ident():
                threading.Event().wait()  # the machine is off
            return
        fault, number = self._fault, len(self.operations)
        operation = Operation(name, Path(file).name)
        self.operations.append(operation)
        if fault is not None and fault.after is not None:
            seen = [
                made
                for made in self.operations[:-1]
                if made.name == fault.after[0] and fnmatch(made.file, fault.after[1])
            ]
            number = fault.at if len(seen) == fault.at and seen[-1] is self.operations[-2] else -1
        elif fault is not None and not fault.counts_reads:
            if not operation.changes:
                return
            number = sum(operation.changes for operation in self.operations) - 1
        if fault is None or number < fault.at:
            return
        if number == fault.at:
            if self._disk is not None:
                self._lose_power(self._disk, self._disk.sizes(".seg", synced=True))
            self._on_fault({})
            if fault.kind in DEADLY:
                if fault.kind == "torn" and tear is not None:
                    tear()
                os._exit(KILLED)
        elif not fault.lasts or not operation.takes(fault.kind):
            return
        if fault.kind == "ENOSPC" and number == fault.at and tear is not None:
            tear()  # what still fits is written
        code = errno.ENOSPC if fault.kind == "ENOSPC" else errno.EIO
        raise OSError(code, os.strerror(code), file)

    def end(self) -> None:
        """The command is done, and all of its journal should be synced: power that is to be lost later is lost now."""
        if self._disk is not None:
            self._lose_power(self._disk, self._disk.sizes(".seg", synced=False))

    def _lose_power(self, disk: Disk, promised: dict[str, int]) -> NoReturn:
        """End the process and leave of its files what survives."""
        self._loser = threading.get_ident()
        assert self._fault is not None
        self._on_fault(promised)
        disk.lose(random.Random(self._fault.at) if self._fault.kind == "some power" else None)
        os._exit(KILLED)

    def synced(self, path: int | str) -> None:
        """A file or folder was fsynced."""
        if self._disk is not None:
            self._disk.sync(path)

    def _name(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The watched file that a path, or a descriptor, stands for."""
        if isinstance(path, int):
            return self._watched.get(path)
        text = os.fsdecode(path)
        if dir_fd is not None and dir_fd in self._watched:
            return f"{self._watched[dir_fd]}/{text}"
        path = str(Path(text).absolute())
        return path if path.startswith(self._root) else None

    def _replace_paths(self) -> None:
        def replacement(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
                watched = self._name(path, kwargs.get("dir_fd"))
                if watched is not None:
                    self.at(name, watched)
                return call(path, *args, **kwargs)

            return wrapper

        for name in _CHANGES:
            setattr(os, name, replacement(name, getattr(os, name)))

    def _replace_descriptors(self) -> None:
        open_, close, write, pwrite, fsync, truncate = os.open, os.close, os.write, os.pwrite, os.fsync, os.ftruncate

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            watched = self._name(path, dir_fd)
            if watched is not None:
                self.at("create" if flags & os.O_CREAT else "open", watched)
            fd = open_(path, flags, mode, dir_fd=dir_fd)
            if watched is not None:
                self._watched[fd] = watched
            return fd

        def closed(fd: int) -> None:
            self._watched.pop(fd, None)
            close(fd)

        def written(fd: int, data: Any) -> int:
            if fd in self._watched:
                half = bytes(data)[: len(data) // 2]
                self.at("write", self._watched[fd], lambda: (write(fd, half), None)[1])
            return write(fd, data)

        def pwritten(fd: int, data: Any, offset: int) -> int:
            if fd in self._watched:
                half = bytes(data)[: len(data) // 2]
                self.at("write", self._watched[fd], lambda: (pwrite(fd, half, offset), None)[1])
            return pwrite(fd, data, offset)

        def synced(fd: Any) -> None:
            if fd in self._watched:
                self.at("fsync", self._watched[fd])
            fsync(fd)
            if fd in self._watched:
                self.synced(fd)

        def truncated(fd: Any, size: int) -> None:
            if fd in self._watched:
                self.at("truncate", self._watched[fd])
            truncate(fd, size)

        os.open, os.close, os.write, os.pwrite = opened, closed, written, pwritten
        os.fsync, os.ftruncate = synced, truncated

    def _replace_open(self) -> None:
        original = io.open

        @functools.wraps(original)
        def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or kwargs.get("opener") or self._name(file) is None:
                return original(file, mode, buffering, *args, **kwargs)
            raw = _WatchedFile(self, os.fsdecode(file), mode.replace("t", "").replace("b", ""))
            if buffering == 0:
                return raw
            size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
            kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
            buffered = kind(raw, size)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        io.open = opened  # what pathlib opens files with
        builtins.open = opened

    def watch(self, fd: int, file: str) -> None:
        """What is done to the descriptor from now on counts."""
        self._watched[fd] = file

    def forget(self, fd: int) -> None:
        """The descriptor is about to be closed."""
        self._watched.pop(fd, None)


class _WatchedFile(io.FileIO):
    """A file as ``open`` makes it, each of whose operations counts."""

    def __init__(self, injector: Injector, file: str, mode: str) -> None:
        self._injector = injector
        self._file = file
        injector.at("open" if mode[0] == "r" else "create", file)
        super().__init__(file, mode)
        injector.watch(self.fileno(), file)

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(data) // 2]
        write = super().write
        self._injector.at("write", self._file, lambda: (write(half), None)[1])
        return write(data)

    def readinto(self, buffer: Any) -> int:
        self._injector.at("read", self._file)
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        self._injector.at("read", self._file)
        return super().readall() or b""

    def truncate(self, size: int | None = None) -> int:
        self._injector.at("truncate", self._file)
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            self._injector.forget(self.fileno())
        super().close()

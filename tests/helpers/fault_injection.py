"""Faults at the operations that a process does on the files of one folder: killed, torn, no power, no space, failing.

``Injector`` stands between the code under test and the operating system: it replaces the functions of ``os`` and
``io.open``, and by way of ``sqlite3_vfs.xSetSystemCall`` the system calls of SQLite too, where the interpreter's
SQLite is a shared library. It counts the operations, and at the one it was given it does the fault. It is armed in a
forked child, which it may end, and never disarmed. What survives a loss of power is known to ``power_loss``.
"""

from __future__ import annotations

import _sqlite3
import builtins
import ctypes
import errno
import functools
import io
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
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
_SQLITE_IOERR_FSYNC = 1034


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a file: what is done (``write``, ``create``, ``sqlite write`` …) and the file's name."""

    name: str
    file: str

    def takes(self, kind: Kind) -> bool:
        """Whether a fault of this kind can happen here, and makes a difference."""
        action = self.name.removeprefix("sqlite ")
        if kind == "torn":
            return action == "write"
        if kind == "ENOSPC":
            return action in _NEEDS_SPACE
        return kind == "EIO" or action not in _ONLY_READS  # killed before a read is killed after what was before it


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of ``kind`` at operation number ``at``; a lasting one goes on failing in all that comes after.

    With "power" nothing survives that was not synced, with "some power" a part of it, drawn by ``at``.
    """

    kind: Kind
    at: int
    lasts: bool = True


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
        self._kept: list[object] = []  # callbacks that SQLite holds
        self._disk: Disk | None = None  # watched where power is to be lost
        self._loser: int | None = None  # the thread that loses it

    def arm(self) -> None:
        """Replace the functions of this process."""
        if self._fault is not None and self._fault.kind in POWER:
            self._disk = Disk(Path(self._root))
        self._replace_paths()
        self._replace_descriptors()
        self._replace_open()
        self._replace_sqlite()

    def at(self, name: str, file: str, tear: Callable[[], None] | None = None) -> None:
        """One operation is about to be done; ``tear`` does half of it. Raises OSError where it is to fail."""
        if self._loser is not None:
            if self._loser != threading.get_ident():
                threading.Event().wait()  # the machine is off
            return
        fault, number = self._fault, len(self.operations)
        operation = Operation(name, Path(file).name)
        self.operations.append(operation)
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

    def _replace_sqlite(self) -> None:
        calls = sqlite_calls()
        if calls is None:
            return
        files: dict[int, str] = {}
        c_int, c_void_p, c_char_p, c_size_t = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

        def attempt(name: str, file: str | None, act: Callable[[], int], tear: Callable[[], None] | None = None) -> int:
            try:
                if file is not None:
                    self.at(f"sqlite {name}", file, tear)
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            return act()

        def open_(real: Any, path: bytes, flags: int, mode: int) -> int:
            name = self._name(path)
            fd: int = attempt("create" if flags & os.O_CREAT else "open", name, lambda: int(real(path, flags, mode)))
            if name is not None and Path(name).is_dir():
                self.synced(name)  # which is all that SQLite does to a folder that it has opened
            if name is not None and fd >= 0:
                files[fd] = name
            elif fd >= 0:
                files.pop(fd, None)
            return fd

        def pwrite(real: Any, fd: int, data: int, size: int, offset: int) -> int:
            def tear() -> None:
                real(fd, data, size // 2, offset)

            return attempt("write", files.get(fd), lambda: int(real(fd, data, size, offset)), tear)

        def write(real: Any, fd: int, data: int, size: int) -> int:
            def tear() -> None:
                real(fd, data, size // 2)

            return attempt("write", files.get(fd), lambda: int(real(fd, data, size)), tear)

        def truncate(real: Any, fd: int, size: int) -> int:
            return attempt("truncate", files.get(fd), lambda: int(real(fd, size)))

        def unlink(real: Any, path: bytes) -> int:
            return attempt("unlink", self._name(path), lambda: int(real(path)))

        def pread(real: Any, fd: int, data: int, size: int, offset: int) -> int:
            return attempt("read", files.get(fd), lambda: int(real(fd, data, size, offset)))

        ssize, off = ctypes.c_ssize_t, ctypes.c_int64
        for names, call, result, arguments in (
            (("open",), open_, c_int, (c_char_p, c_int, c_int)),
            (("pwrite", "pwrite64"), pwrite, ssize, (c_int, c_void_p, c_size_t, off)),
            (("write",), write, ssize, (c_int, c_void_p, c_size_t)),
            (("pread", "pread64"), pread, ssize, (c_int, c_void_p, c_size_t, off)),
            (("ftruncate",), truncate, c_int, (c_int, off)),
            (("unlink",), unlink, c_int, (c_char_p,)),
        ):
            for name in names:
                kind = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
                if calls.replace(name, kind, call):
                    self._kept.append(calls)

        def sync(real: Callable[[], int], path: str) -> int:
            name = self._name(path)
            code = attempt("fsync", name, real)
            if code == 0 and name is not None:
                self.synced(name)
            return _SQLITE_IOERR_FSYNC if code < 0 else code

        calls.replace_sync(sync)


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


class _Vfs(ctypes.Structure):
    """``sqlite3_vfs`` of https://www.sqlite.org/c3ref/vfs.html, as far as it is used."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("max_pathname", ctypes.c_int),
        *((f"pointer_{number}", ctypes.c_void_p) for number in range(3)),
        ("open", ctypes.c_void_p),
        *((f"pointer_{number}", ctypes.c_void_p) for number in range(4, 16)),
        ("set_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
        ("get_call", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)),
    ]


class _Methods(ctypes.Structure):
    """``sqlite3_io_methods`` of https://www.sqlite.org/c3ref/io_methods.html."""

    _fields_ = [
        ("version", ctypes.c_int),
        *((f"method_{number}", ctypes.c_void_p) for number in range(4)),
        ("sync", ctypes.c_void_p),
        *((f"method_{number}", ctypes.c_void_p) for number in range(5, 18)),
    ]


class SqliteCalls:
    """The system calls of this process's SQLite."""

    def __init__(self, vfs: int) -> None:
        self._address = vfs
        self._vfs = _Vfs.from_address(vfs)
        self._kept: list[object] = []

    def replace(self, name: str, kind: Any, call: Callable[..., int]) -> bool:
        """Let ``call(original, *arguments)`` stand for a system call; false if this SQLite does not use it."""
        address = self._vfs.get_call(self._address, name.encode())
        if not address:
            return False
        callback = kind(functools.partial(call, kind(address)))
        self._kept.append(callback)
        code: int = self._vfs.set_call(self._address, name.encode(), ctypes.cast(callback, ctypes.c_void_p))
        return code == 0

    def replace_sync(self, call: Callable[[Callable[[], int], str], int]) -> None:
        """Let ``call(original, path)`` stand for the fsync of each file opened from now on; it returns SQLite's code.

        An fsync is none of the system calls that SQLite lets replace, so it is the method of the open file that is.
        """
        pointer, c_int = ctypes.c_void_p, ctypes.c_int
        sync_kind = ctypes.CFUNCTYPE(c_int, pointer, c_int)
        # The path is an address here: SQLite keeps it, and a copy would be gone by then.
        open_kind = ctypes.CFUNCTYPE(c_int, pointer, pointer, pointer, c_int, pointer)
        open_file = open_kind(self._vfs.open)

        def opened(vfs: int, path: int | None, file: int, flags: int, flags_out: int | None) -> int:
            code: int = open_file(vfs, path, file, flags, flags_out)
            found = pointer.from_address(file)  # a sqlite3_file begins with the address of its methods
            if code == 0 and path is not None and found.value:
                methods = _Methods.from_buffer_copy(ctypes.string_at(found.value, ctypes.sizeof(_Methods)))
                real = sync_kind(methods.sync)
                name = os.fsdecode(ctypes.string_at(path))
                callback = sync_kind(lambda file, flags: call(lambda: int(real(file, flags)), name))
                methods.sync = ctypes.cast(callback, pointer).value
                self._kept += [methods, callback, real]
                found.value = ctypes.addressof(methods)
            return code

        callback = open_kind(opened)
        self._kept += [callback, open_file]
        self._vfs.open = ctypes.cast(callback, pointer).value


def sqlite_calls() -> SqliteCalls | None:
    """The system calls of SQLite, or None where it is linked into the interpreter and cannot be reached."""
    try:
        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
    except (AttributeError, OSError):
        return None
    find.restype = ctypes.c_void_p
    find.argtypes = [ctypes.c_char_p]
    vfs = find(None)
    return SqliteCalls(vfs) if vfs and _Vfs.from_address(vfs).version >= 3 else None

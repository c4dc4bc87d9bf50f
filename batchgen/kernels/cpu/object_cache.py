"""Machine code of kernels, kept on disk for later processes and loaded by llvmlite, without numba.

A torn or foreign file, or another user's, counts as missing: LLVM would crash on garbage, or run that user's code.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from llvmlite import binding

from batchgen.kernels import processor
from batchgen.kernels.cpu.kernel_specs import KernelSpec
from batchgen.kernels.cpu.layout import ENTRY

_DIGEST_BYTES = hashlib.sha256().digest_size
_ENGINES: list[binding.ExecutionEngine] = []  # they own the loaded code


def file_name(spec: KernelSpec, kind: str) -> str:
    """The name of a kernel's file: a digest of its source, its compiler and the target."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("NUMBA_", "BATCHGEN_TILES")))
    identity = (spec.module, _sources(spec.module), processor.target(), settings, spec.kinds[kind])
    return f"{spec.name}-{kind}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.o"


@lru_cache
def _sources(module: str) -> str:
    """Digest of everything that a kernel of this module may depend on."""
    here, spec = Path(__file__).parent, find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is a file"
    around = {*(here / f"{name}.py" for name in ("layout", "kernel_specs", "compiler")), Path(processor.__file__)}
    files = {*(here / "compiled").glob("*.py"), *around, Path(spec.origin)}
    contents = [path.read_bytes() for path in sorted(files)]
    return hashlib.sha256(
        b"".join([*contents, *(version(name).encode() for name in ("numba", "llvmlite"))])
    ).hexdigest()


def read(name: str) -> bytes | None:
    """The object file of that name; None if it is missing or cannot be trusted."""
    folder = _folder()
    if folder is None:
        return None
    with suppress(OSError):
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
        with os.fdopen(handle, "rb") as file:
            if _is_ours(os.fstat(handle)):
                content = file.read()
                digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
                return code if digest == _digest(name, code) else None
    return None


def write(name: str, code: bytes) -> bool:
    """Keep an object for later processes; returns False if it cannot be written, which must not stop a run."""
    folder = _folder()
    if folder is None:
        return False
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(_digest(name, code) + code)
        temporary.replace(folder / name)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def _digest(name: str, code: bytes) -> bytes:
    """The SHA-256 at the start of a file, which reveals a torn or renamed file."""
    return hashlib.sha256(name.encode() + code).digest()


def is_writable() -> bool:
    """Whether objects can be kept for the next process."""
    folder = _folder()
    return folder is not None and os.access(folder, os.W_OK)


def lock() -> bool:
    """Take the lock on compiling until this process and its forks end; returns False if another process holds it.

    Processes that begin together, such as the workers of a run, need the same kernels: one compiles them for all. True
    if the lock cannot be used.
    """
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            handle = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
    return True


def _folder() -> Path | None:
    """Folder of the objects, created if missing; None unless only this user can write to it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_ours(folder.stat()) else None
    except (OSError, RuntimeError):  # RuntimeError: this user lacks a home folder
        return None


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user or the administrator can have written a file or folder; False for a device."""
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def load(code: bytes) -> int:
    """Put a kernel's object into memory; returns the address of its function."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    address: int = engine.get_function_address(ENTRY)
    return address

"""Machine code of kernels for this process: from files, from parallel compiling processes, or compiled here.

Numba compiles for seconds in one thread, so other processes do it while torch is imported and weights are read.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from importlib.metadata import version

from batchgen.core.machine import fresh_python
from batchgen.kernels.cpu import object_cache
from batchgen.kernels.cpu.kernel_specs import KernelSpec, needed, needed_by_some

Forms = tuple[str, ...]  # the dtype and forms of a model's weights and caches, as arguments of ``needed``
Wanted = list[tuple[KernelSpec, str]]
_MAX_WORKERS = 4  # the slowest kernel takes as long to compile as all others on three processors
_LONGEST_WAIT_S = 120.0  # for one kernel: a process that needs longer hangs
_PROGRAM = """
from batchgen.kernels.cpu.build import work_on
work_on(*json.loads(sys.argv[2]))
"""
_LOCK = threading.RLock()
_started: set[Forms] = set()
_builders: dict[Forms, tuple[subprocess.Popen[bytes], Wanted]] = {}  # compiling processes and their kernels
_addresses: dict[str, int] = {}  # of kernels in memory, by the names of their objects
_plainly_compiled: set[str] = set()  # names of kernels from ``compile_plainly``, which are not kept


def start(*forms: str) -> None:
    """Begin to compile the kernels that a model may need and that are not on disk; ``forms`` as for ``needed``."""
    with _LOCK:
        _started.add(forms)
        missing = _missing(forms)
        if forms in _builders or not missing or not object_cache.is_writable():
            return
        command = fresh_python(_PROGRAM, [*forms])
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with suppress(OSError):  # in a separate group: Ctrl-C reaches only the run
            process = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, process_group=0)
            _builders[forms] = process, missing


def _begin_copy() -> None:
    """Replace the lock in a fork of the process: a thread that was not copied might hold it for ever."""
    global _LOCK  # noqa: PLW0603 - a lock that another thread holds cannot be released
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_begin_copy)


def is_started() -> bool:
    """Whether this process has said which kernels it needs."""
    return bool(_started)


def finish(*forms: str) -> None:
    """Wait until all kernels that every step of a model needs are compiled."""
    for spec, kind in needed(*forms):
        address(spec, kind)


def not_kept(*forms: str) -> str:
    """The reason why the next process compiles a model's kernels again; "" if it does not. Call after ``finish``."""
    if not _not_on_disk(needed(*forms)):
        return ""
    if _plainly_compiled:
        return (
            f"numba {version('numba')} differs inside from the versions that batchgen knows, so each start compiles "
            "the kernels again, which takes longer: install an older one"
        )
    return (
        "kernels cannot be kept here, so each start compiles them again: set XDG_CACHE_HOME to a folder that only you "
        "can write to"
    )


def address(spec: KernelSpec, kind: str) -> int:
    """The address of a kernel's function, which is compiled if necessary."""
    name = object_cache.file_name(spec, kind)
    with _LOCK:
        if name not in _addresses:
            code = _awaited(spec, kind, name)
            _addresses[name] = object_cache.load(code) if code else _compiled(spec, kind, name)
        return _addresses[name]


def _missing(forms: Forms) -> Wanted:
    return _not_on_disk(needed(*forms) + needed_by_some(*forms))


def _not_on_disk(wanted: Wanted) -> Wanted:
    return [kernel for kernel in wanted if object_cache.read(object_cache.file_name(*kernel)) is None]


def _awaited(spec: KernelSpec, kind: str, name: str) -> bytes | None:
    """The object from a process that compiles it; None without such a process, or if it takes too long.

    Then all such processes are ended, since other kernels would take too long as well.
    """
    builders = [process for process, wanted in _builders.values() if (spec, kind) in wanted]
    give_up_at = time.monotonic() + _LONGEST_WAIT_S
    while any(process.poll() is None for process in builders):
        if code := object_cache.read(name):
            return code
        if time.monotonic() > give_up_at:
            stop()
            break
        time.sleep(0.01)
    return object_cache.read(name)


def _compiled(spec: KernelSpec, kind: str, name: str) -> int:
    from batchgen.kernels.cpu import compiler  # imports numba

    try:
        code = compiler.machine_code(spec, kind)
    except Exception:  # another numba may raise anything; an error in the kernel itself is raised again below
        _plainly_compiled.add(name)
        return compiler.compile_plainly(spec, kind)
    object_cache.write(name, code)
    return object_cache.load(code)


@atexit.register
def stop() -> None:
    """End the compiling processes. They also end if this process is killed: their standard input is a pipe from it."""
    for process, _ in _builders.values():
        assert process.stdin is not None, "it was started with a pipe"
        process.stdin.close()
        process.kill()
        process.wait()
    _builders.clear()


def work_on(*forms: str) -> None:
    """Compile the missing kernels on several processors; this is the program of the process that ``start`` starts."""
    gc.disable()  # collecting takes a tenth of the time, and the process ends soon
    while not object_cache.lock():
        if select.select([0], [], [], 0.05)[0]:  # the process that this one works for has ended
            return
    if not _missing(forms):
        return
    from batchgen.kernels.cpu import compiler  # imports numba

    missing = _missing(forms)
    compiler.prepare(spec.module for spec, _ in missing)
    jobs, end = os.pipe()
    os.write(end, bytes(range(len(missing))))
    os.close(end)
    num_others = min(len(missing), os.cpu_count() or 1, _MAX_WORKERS) - 1
    try:
        while num_others > 0 and os.fork():
            num_others -= 1
    except OSError:  # no more processes may be started: this one compiles alone
        num_others = 0
    is_first = num_others == 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while job := os.read(jobs, 1):
        spec, kind = missing[job[0]]
        if not object_cache.write(object_cache.file_name(spec, kind), compiler.machine_code(spec, kind)):
            break  # the others would fail likewise
    with suppress(ChildProcessError):
        while is_first:
            os.wait()
    os._exit(0)


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written to it
    os._exit(1)

"""Memory, address space, processors, GPUs and interpreters of this machine, and the errors of exhausted memory.

It imports nothing large, so that limits can be checked before torch is imported.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from batchgen.core.errors import BatchgenError, OutOfMemory, UsageError

_MIN_ADDRESS_SPACE = 2 << 30  # torch's libraries map 1 GB; the kernels' compiler ends the process if it runs out
SMALLER_SIZES = "give a smaller --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs, or --quantization w8a16"
_SIGNS = re.compile(r"allocate memory|unable to allocate|out of memory|bad_alloc|alloc_failed", re.IGNORECASE)
# These have other causes too (a folder without execution, a limit on processes), so they count only under a limit.
_NO_THREAD = "can't start new thread"
_SIGNS_UNDER_A_LIMIT = re.compile(rf"failed to map segment from shared object$|{_NO_THREAD}")
_MORE_THREADS = "raise the limit on processes and threads (ulimit -u, or --pids-limit of the container), then run again"
_REMEDIES = "end other processes, or raise the limit"
_AMOUNT = re.compile(r"(?:allocate|mmap) (?:memory: you tried to allocate )?([\d.]+ [kKMGTPE]?i?B(?:ytes)?\b)", re.I)
_CPUINFO = Path("/proc/cpuinfo")
_FALLBACK_SHARE = 0.5  # of built-in memory: assumed free on systems that do not report it (not Linux)
# Types of the weights and of the activations of linears: "auto" as they are stored or computed, or "int8".
QUANTIZATIONS = {"none": ("auto", "auto"), "w8a16": ("int8", "auto"), "w8a8": ("int8", "int8")}
UNTRIED_DEVICES = ("mps", "xpu")  # torch's names of the GPUs of Apple and Intel, on which batchgen has never run
# https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html and .../scheduler/sched-bwc.html
_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_FILES = {  # by version: the limit, the usage, and the line of memory.stat with the part that the kernel can reclaim
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# By version: the files with the microseconds of processor time in each period, and with the period.
_CPU_QUOTAS = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


def physical_bytes() -> int:
    """Installed memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def address_space_bytes() -> int | None:
    """The limit on the process's address space (``ulimit -v``), in bytes; None if unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def require_address_space(weights_bytes: int = 0) -> None:
    """Check that the address space has room for torch, the kernels' compiler and the weights.

    Raises UsageError if the limit is too low: the compiler would abort the process without a message.
    """
    limit, needed = address_space_bytes(), _MIN_ADDRESS_SPACE + weights_bytes
    if limit is not None and limit < needed:
        raise UsageError(
            f"the address space is limited to {limit / 1e9:.1f} GB, running this model takes {needed / 1e9:.1f} GB: "
            "raise the limit (ulimit -v unlimited)"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of Python, NumPy, torch or the loader, or one of its causes, reports exhausted memory."""
    seen: set[int] = set()  # an error that was raised again may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | OSError | ImportError):
            text = str(error)
            if _SIGNS.search(text) or (address_space_bytes() is not None and _SIGNS_UNDER_A_LIMIT.search(text)):
                return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def memory_errors(doing: str, advice: str = "") -> Iterator[None]:
    """Turn an error that reports exhausted memory into OutOfMemory; ``doing`` completes "out of memory while".

    ``advice`` is a remedy in addition to ending other processes and raising the limit. If a limit on processes keeps a
    thread from starting, raises BatchgenError; other errors pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BatchgenError):
            raise
        if not is_out_of_memory(error):
            if _NO_THREAD in str(error):
                raise BatchgenError(f"cannot start a thread: {_MORE_THREADS}") from error
            raise
        amount = _AMOUNT.search(str(error))
        size = f" (asked for {amount[1]} more)" if amount else ""
        remedies = f"end other processes, raise the limit, or {advice}" if advice else _REMEDIES
        raise OutOfMemory(f"out of memory while {doing}{size}: {remedies}") from error


def processor_name() -> str:
    """Model name of the processor; if Linux does not name it, as on Arm: implementer, part number and architecture."""
    lines: dict[str, str] = {}
    with suppress(OSError), _CPUINFO.open(encoding="utf-8") as file:
        lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
    if "model name" in lines:
        return lines["model name"]
    parts = (lines.get("CPU implementer", ""), lines.get("CPU part", ""), platform.processor() or platform.machine())
    return " ".join(filter(None, parts))


class _Limit:
    max_bytes: int | None = None


def peak_bytes() -> int:
    """Largest resident size of this process so far; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes() -> int:
    """Bytes that this process could use if it were alone: the machine's memory or a cgroup limit, whichever is less."""
    return min([physical_bytes(), *(limit for limit, _ in memory_limits())])


def num_usable_cpus() -> int:
    """Processors that this process may run on, at most the processor time that its control group allows.

    With more threads, the system suspends all of them for most of each period.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([usable, *cpu_limits()])


def limit_memory(max_bytes: int) -> None:
    """Limit ``available_bytes`` to this process's share, less its resident memory."""
    _Limit.max_bytes = max_bytes


def available_bytes() -> int:
    """Free bytes: the system's estimate, or fewer if a limit on memory leaves less."""
    room = [_meminfo_available()]
    if (limit := address_space_bytes()) is not None:
        room.append(max(0, limit - _num_pages(0) * resource.getpagesize()))
    if _Limit.max_bytes is not None:
        room.append(max(0, _Limit.max_bytes - _num_pages(1) * resource.getpagesize()))
    room += [max(0, limit - used) for limit, used in memory_limits()]
    limits = [r for r in room if r is not None]
    return min(limits) if limits else int(_FALLBACK_SHARE * physical_bytes())


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _num_pages(column: int) -> int:
    """Pages of this process, by the column of Linux's statm: 0 for all, 1 for those in memory; 0 elsewhere."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])
    except OSError:
        return 0


def cpus_by_node() -> list[list[int]]:
    """The processors that this process may run on, by NUMA node, threads of a core adjacent. Empty if not Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    nodes: dict[str, list[tuple[int, int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}")
        node = next((path.name for path in folder.glob("node[0-9]*")), "")
        nodes.setdefault(node, []).append((_number(folder / "topology/core_id") or 0, cpu))
    return [[cpu for _, cpu in sorted(cpus)] for cpus in nodes.values()]


def visible_gpus(device: str) -> list[str]:
    """Names, as in CUDA_VISIBLE_DEVICES, of the GPUs for a job's workers; empty if ``device`` names one or a CPU.

    The driver's files under /dev are read, so torch is not imported.
    """
    if device not in ("auto", "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


def fresh_python(program: str, *arguments: object, options: Sequence[str] = ("-I", "-S")) -> list[str]:
    """The command of a new interpreter that runs ``program`` with exactly the modules that this one can import.

    ``arguments`` are JSON in ``sys.argv[2:]``; ``json`` and ``sys`` are imported. With the default ``options`` it
    ignores environment variables and ``site``.
    """
    folders = [*map(Path, filter(None, sys.path)), Path(__file__).parents[2]]
    argv = [str(folder.absolute()) for folder in folders], *arguments
    start = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
    return [sys.executable, *options, "-c", start + program, *map(json.dumps, argv)]


def memory_limits() -> list[tuple[int, int]]:
    """For each control group the limit in bytes, and the bytes in use that the kernel cannot reclaim; or empty.

    The kernel counts cached files as used until it needs their memory; they are subtracted here.
    """
    limits = []
    for version, folder in _groups("memory"):
        limit_name, usage_name, reclaimable_name = _FILES[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            limits.append((limit, max(0, usage - _reclaimable(folder, reclaimable_name))))
    return limits


def cpu_limits() -> list[int]:
    """Processors whose time each control group may use, rounded up; empty if none limits it."""
    limits = []
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            words = " ".join((folder / name).read_text(encoding="ascii") for name in _CPU_QUOTAS[version]).split()
            quota, period = map(int, words)
            if quota > 0:  # -1 means unlimited
                limits.append(-(-quota // period))
    return limits


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """The version and folder of each control group of this process that may have limits of ``controller``."""
    names = {"": "", controller: ""}  # by controller; version 2 does not name it
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            _, controllers, name = (*line.split(":", 2), "", "")[:3]
            names |= dict.fromkeys(controllers.split(","), name)
    for version, mount in ((2, ""), (1, controller)):
        inside = [part for part in PurePosixPath(names[mount]).parts if part not in ("/", "..")]
        # A container may show its own group as the mount point, under another name than ``/proc/self/cgroup`` has.
        for depth in range(len(inside), -1, -1):
            yield version, (_MOUNT / mount).joinpath(*inside[:depth])


def _reclaimable(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _number(path: Path) -> int | None:
    """The number in a file, or None if the file is missing or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

"""Memory that this process uses and may use, limits of containers included."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from batchgen.core.machine import address_space_bytes, physical_bytes

_CGROUP_V2 = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
_CGROUP_V1 = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_FALLBACK_BYTES = 4 << 30  # where the system does not tell (not Linux)


def peak_bytes() -> int:
    """Largest resident size of this process so far; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes() -> int:
    """Bytes that this process could use if it were alone: what is built in, or a cgroup limit, whichever is less."""
    limits = [_read_int(limit) for limit, _ in (_CGROUP_V2, _CGROUP_V1)]
    return min([physical_bytes(), *(limit for limit in limits if limit is not None)])


def available_bytes() -> int:
    """Bytes free for use: the system's estimate, or what a limit on cgroup or address space leaves if that is less."""
    room = [_meminfo_available(), _address_space_left()]
    for limit, usage in (_CGROUP_V2, _CGROUP_V1):
        bounds = _read_int(limit), _read_int(usage)
        if bounds[0] is not None and bounds[1] is not None:
            room.append(max(0, bounds[0] - bounds[1]))
    known = [r for r in room if r is not None]
    return min(known) if known else _FALLBACK_BYTES


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


def _address_space_left() -> int | None:
    limit = address_space_bytes()
    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    return None if limit is None else max(0, limit - num_pages * resource.getpagesize())


def _read_int(path: str) -> int | None:
    """The number in a file, or None where there is no such file or it says "max"."""
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

"""Memory limits of the control groups of this process: of its own group and of each above it, which all apply.

A batch system or a service manager sets the limit some levels below the mount point. A container may show its own group
as the mount point, whatever the name by which ``/proc/self/cgroup`` knows it.
Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_FILES = {  # by version: the limit, what is used, and of that the line of memory.stat for what the kernel can take back
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_limits() -> list[tuple[int, int]]:
    """Bytes that each group may have, and those in use that cannot be taken back; empty without control groups.

    Files that were read are counted as used until the kernel needs their memory; they are not in use here.
    """
    limits = []
    for version, folder in _groups():
        limit_name, usage_name, reclaimable_name = _FILES[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            limits.append((limit, max(0, usage - _reclaimable(folder, reclaimable_name))))
    return limits


def _groups() -> Iterator[tuple[int, Path]]:
    """The version and folder of this process's groups that limit memory, each with those above it."""
    names = {"": "", "memory": ""}  # by controller, which version 2 does not name
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            _, controllers, name = (*line.split(":", 2), "", "")[:3]
            names |= dict.fromkeys(controllers.split(","), name)
    for version, controller in ((2, ""), (1, "memory")):
        inside = [part for part in PurePosixPath(names[controller]).parts if part not in ("/", "..")]
        for depth in range(len(inside), -1, -1):
            yield version, (_MOUNT / controller).joinpath(*inside[:depth])


def _reclaimable(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _number(path: Path) -> int | None:
    """The number in a file, or None where there is no such file or it says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

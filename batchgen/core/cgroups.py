"""Limits of the control groups of this process: its own group and all groups above it, where batch systems set them.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html and .../scheduler/sched-bwc.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_FILES = {  # by version: the limit, the usage, and the line of memory.stat with the part that the kernel can reclaim
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Of each version: microseconds of processor time in each period, and the period.
_CPU_QUOTAS = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


def memory_limits() -> list[tuple[int, int]]:
    """For each group the limit in bytes, and the bytes in use that the kernel cannot reclaim; empty without groups.

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
    """Processors whose time each group may use, rounded up; empty if none limits it."""
    limits = []
    for version, folder in _groups("cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            words = " ".join((folder / name).read_text(encoding="ascii") for name in _CPU_QUOTAS[version]).split()
            quota, period = map(int, words)
            if quota > 0:  # -1 means unlimited
                limits.append(-(-quota // period))
    return limits


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """The version and folder of each of this process's groups that may limit what a controller controls."""
    names = {"": "", controller: ""}  # by controller, which version 2 does not name
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            _, controllers, name = (*line.split(":", 2), "", "")[:3]
            names |= dict.fromkeys(controllers.split(","), name)
    for version, mount in ((2, ""), (1, controller)):
        inside = [part for part in PurePosixPath(names[mount]).parts if part not in ("/", "..")]
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

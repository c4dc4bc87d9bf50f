"""Memory and processors are what the strictest of a process's control groups leaves, its own and each above it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from batchgen.core import machine

MIB = 1 << 20
V2, V1 = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


class Groups:
    """A tree of control groups as Linux shows it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def belong_to(self, *lines: str) -> None:
        (self.root / "own").write_text("".join(f"{line}\n" for line in lines))

    def add(self, group: str, limit: str | int, used: int, *, names: tuple[str, str] = V2, inactive: int = 0) -> None:
        for name, value in zip(names, (limit, used), strict=True):
            path = self.root / name
            path = path.parent / group / path.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        its_own, all_below = (inactive, 0) if names == V2 else (0, inactive)
        told = f"anon 7\ninactive_file {its_own}\ntotal_inactive_file {all_below}\n"
        (path.parent / "memory.stat").write_text(told)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr(machine, "_MOUNT", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "physical_bytes", lambda: 64 * 1024 * MIB)
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 60 * 1024 * MIB)
    monkeypatch.setattr(machine, "address_space_bytes", lambda: None)
    return Groups(tmp_path)


@pytest.mark.parametrize(("names", "line"), [(V2, "0::"), (V1, "9:hugetlb,memory:")])
def test_the_least_of_all_groups_from_the_own_one_up_counts(groups: Groups, names: tuple[str, str], line: str) -> None:
    groups.belong_to(f"{line}/slurm/job_7/step_0", "3:cpu:/elsewhere")
    groups.add("", "max", 9 * MIB, names=names)
    groups.add("slurm", 900 * MIB, 100 * MIB, names=names)
    groups.add("slurm/job_7", 500 * MIB, 90 * MIB, names=names)
    groups.add("slurm/job_7/step_0", "max", 90 * MIB, names=names)
    groups.add("slurm/job_8", 1 * MIB, 0, names=names)
    groups.add("elsewhere", 1 * MIB, 0, names=names)
    assert machine.total_bytes() == 500 * MIB
    assert machine.available_bytes() == 410 * MIB


@pytest.mark.parametrize("names", [V2, V1])
def test_files_that_were_read_are_not_in_use(groups: Groups, names: tuple[str, str]) -> None:
    groups.belong_to("0::/job", "9:memory:/job")
    groups.add("job", 500 * MIB, 450 * MIB, names=names, inactive=400 * MIB)
    assert machine.available_bytes() == 450 * MIB


@pytest.mark.parametrize("line", ["0::/docker/0123", "0::/../../other", "0::/", "", "nonsense", "0:"])
def test_a_container_sees_its_group_at_the_mount_point_whatever_its_name(groups: Groups, line: str) -> None:
    groups.belong_to(line)
    groups.add("", 500 * MIB, 100 * MIB)
    assert machine.total_bytes() == 500 * MIB
    assert machine.available_bytes() == 400 * MIB


def test_without_groups_the_machine_counts(groups: Groups) -> None:
    assert machine.total_bytes() == 64 * 1024 * MIB
    assert machine.available_bytes() == 60 * 1024 * MIB


def test_a_system_that_does_not_tell_what_is_free_lends_half(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_meminfo_available", lambda: None)
    assert machine.available_bytes() == 32 * 1024 * MIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: Some CPU @ 3 GHz\nflags : x\n", "Some CPU @ 3 GHz"),
        ("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "0x41 0xd0c aarch64"),
        ("", "aarch64"),
    ],
)
def test_a_processor_without_a_name_is_known_by_its_number(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.processor_name() == name


@pytest.mark.parametrize("group", ["", "job", "job/step"])
@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_processors_count_only_as_far_as_a_group_grants_their_time(
    groups: Groups, files: dict[str, str], cpus: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    groups.belong_to("4:cpu,cpuacct:/job/step", "3:memory:/other", "0::/job/step")
    for name, text in files.items():
        path = groups.root / name
        path = path.parent / group / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.num_usable_cpus() == cpus


def test_a_system_without_affinity_lends_all_its_processors(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert machine.num_usable_cpus() == 3

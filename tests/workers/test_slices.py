"""How one machine is shared out over workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.job import JobSpec
from batchgen.config.load import load_job
from batchgen.core import machine
from batchgen.core.errors import UsageError
from batchgen.workers import slices
from batchgen.workers.slices import MachineSlice, split_machine


def spec_of(device: str = "auto", **cluster: Any) -> JobSpec:
    places = {"input": {"path": ["/in"]}, "output": {"path": "/out"}}
    return load_job(None, {"model": {"path": "dummy:LFM2-350M", "device": device}, **places, "cluster": cluster})


@pytest.fixture(autouse=True)
def two_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight processors on two nodes, without GPUs, and with 16 GB free."""
    monkeypatch.setattr(slices, "cpus_by_node", lambda: [[0, 4, 1, 5], [2, 6, 3, 7]])
    monkeypatch.setattr(slices, "available_bytes", lambda: 16_000_000_000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def cpus(found: list[MachineSlice]) -> list[tuple[int, ...]]:
    return [share.cpus for share in found]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"workers": 2}, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ({"workers": 4}, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ({"workers": "1:3"}, [(0, 4), (1, 2, 5), (3, 6, 7)]),
        ({"workers": 9}, [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]),
        ({"workers": 3, "cpus_per_worker": 2}, [(0, 4), (1, 5), (2, 6)]),
        ({"workers": 3, "cpus_per_worker": 4}, [(0, 1, 4, 5), (2, 3, 6, 7), (0, 1, 4, 5)]),
        ({"workers": 1, "cpus_per_worker": 99}, [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ],
)
def test_processors_are_shared_out_by_whole_nodes(given: dict[str, Any], wanted: list[tuple[int, ...]]) -> None:
    assert cpus(split_machine(spec_of(**given), None)) == wanted


@pytest.mark.parametrize(
    ("num_rows", "weight_bytes", "number"), [(None, 0, 8), (3, 0, 3), (10, 3_500_000_000, 4), (10, 10**12, 1)]
)
def test_no_more_workers_are_started_than_rows_processors_and_memory_carry(
    num_rows: int | None, weight_bytes: int, number: int
) -> None:
    notes: list[str] = []
    assert len(split_machine(spec_of(workers=100), num_rows, weight_bytes, notes.append)) == number
    (note,) = notes
    assert note.startswith(f"--workers 100: {number} started, for ")
    assert note.count("8 CPUs") == 1


def test_as_many_workers_as_are_carried_need_no_word() -> None:
    notes: list[str] = []
    assert len(split_machine(spec_of(workers="1:8"), 8, 10**9, notes.append)) == 8
    assert not notes


def test_memory_is_shared_out() -> None:
    assert {share.memory_bytes for share in split_machine(spec_of(workers=4), None)} == {4_000_000_000}


@pytest.mark.parametrize(("num_rows", "number"), [(None, 2), (10_000, 2), (2048, 2), (2047, 1), (0, 1)])
def test_auto_is_a_worker_for_each_node_that_has_rows_enough(num_rows: int | None, number: int) -> None:
    assert len(split_machine(spec_of(workers="auto"), num_rows)) == number


def test_auto_is_a_worker_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,GPU-a,7")
    found = split_machine(spec_of(workers="auto"), 100_000)
    assert [share.gpus for share in found] == [("3",), ("5",), ("GPU-a",), ("7",)]
    assert {share.memory_bytes for share in found} == {None}
    found = split_machine(spec_of(workers="auto", gpus_per_worker=2), None)
    assert [share.gpus for share in found] == [("3", "5"), ("GPU-a", "7")]
    assert len(split_machine(spec_of(workers="auto"), 4 * 1024 * 3)) == 3
    with pytest.raises(
        UsageError, match=r"--workers 5 with --gpus-per-worker 1: this machine has 4 GPUs; ask for fewer"
    ):
        split_machine(spec_of(workers=5), None)
    assert [share.gpus for share in split_machine(spec_of(workers=2, gpus_per_worker=0), None)] == [None, None]
    assert [share.gpus for share in split_machine(spec_of("cpu", workers=2), None)] == [None, None]
    assert len(split_machine(spec_of("cuda:1", workers="auto"), 100_000)) == 1


def test_a_share_binds_the_process_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        MachineSlice((min(allowed),), ("2", "GPU-a")).take()
        assert os.sched_getaffinity(0) == {min(allowed)}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-a"
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_share_of_memory_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(machine._Limit, "max_bytes", None)
    machine.limit_memory(resident + (50 << 20))
    assert (30 << 20) < machine.available_bytes() < (70 << 20)
    machine.limit_memory(1)
    assert machine.available_bytes() == 0


def test_processors_are_known_by_node() -> None:
    assert {cpu for node in machine.cpus_by_node() for cpu in node} == os.sched_getaffinity(0)

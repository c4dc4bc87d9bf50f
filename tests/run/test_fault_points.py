"""Whatever fails at whatever file operation of a command, the command run again ends as if nothing had been.

See ``fault_runs`` for how. ``BATCHGEN_FAULT_SHARE=1`` does every single fault.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import fault_runs
import pytest
from fault_injection import KINDS, Fault, Operation, sqlite_calls
from run_helpers import survived

from batchgen.core import storage

SEED = 13
SLOW_SHARE = float(os.environ.get("BATCHGEN_FAULT_SHARE", "0.12"))


def attack(scenarios: Iterable[str], folder: Path, share: float, *mount: Path) -> Counter[str]:
    """The faults done, by kind; fails the test with those that were not survived."""
    return Counter(survived(fault_runs.__file__, ",".join(scenarios), folder, share, SEED, *mount)["counts"])


@pytest.mark.slow
def test_faults_at_any_operation_lose_and_repeat_nothing(
    fast_folder: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = attack(fault_runs.SCENARIOS, fast_folder, SLOW_SHARE)
    del counts["operations"]
    with capsys.disabled():
        print(f"\nfaults survived, by kind: {dict(counts)}; {counts.total()} in all", end=" ")
    for kind, count in counts.items():
        record_property(kind, count)
    assert counts.keys() >= {*KINDS, "EFBIG"}
    assert counts.total() > 6000 * SLOW_SHARE


@pytest.mark.parametrize("left_out", ["sync_file", "sync_folder"])
def test_a_loss_of_power_finds_files_that_were_not_synced(
    fast_folder: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    monkeypatch.setattr(storage, left_out, lambda what: None)
    attack = fault_runs.Attack(fault_runs.Stage(fault_runs.SCENARIOS["run"], fast_folder), 0, random.Random(SEED))
    attack.run()
    assert attack.failures[0].startswith("power at the end"), attack.failures
    assert "outputs.jsonl" in attack.failures[0]


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_once_there_is_room(fast_folder: Path) -> None:
    mount = fast_folder / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    try:
        assert attack(["run-parquet", "merge"], fast_folder, 1, mount)["full disk"] > 8
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_the_system_calls_of_sqlite_are_among_those_that_fail(fast_folder: Path) -> None:
    if sqlite_calls() is None:
        pytest.skip("SQLite is linked into this interpreter, its system calls cannot be replaced")
    stage = fault_runs.Stage(fault_runs.SCENARIOS["run"], fast_folder)
    stage.prepare()
    assert stage.child(fault_runs.RUN)[0] == fault_runs.FAILED_ROWS
    done = {(operation.name, operation.file) for operation in stage.operations()}
    calls = {("sqlite create", "ids.sqlite"), ("sqlite write", "ids.sqlite"), ("sqlite write", "ids.sqlite-wal")}
    assert done >= calls | {("sqlite fsync", "ids.sqlite"), ("sqlite fsync", "ids.sqlite-wal")}


def test_the_first_operation_of_a_run_is_the_making_of_its_folder(fast_folder: Path) -> None:
    stage = fault_runs.Stage(fault_runs.SCENARIOS["run"], fast_folder)
    stage.prepare()
    stage.child(fault_runs.RUN)
    changes = [operation for operation in stage.operations() if operation.takes("kill")]
    assert [(change.name, change.file) for change in changes[:3]] == [
        ("mkdir", "out"),
        ("fsync", "work"),
        ("create", "run.lock"),
    ]


def test_a_copy_of_standard_input_that_cannot_be_removed_hides_no_other_error(fast_folder: Path) -> None:
    stage = fault_runs.Stage(fault_runs.SCENARIOS["run-stdin"], fast_folder)
    stage.prepare()
    stage.child(stage.scenario.act)
    at = stage.operations().index(Operation("open", ".input.spool.tmp"))
    stage.restore()
    code, has_failed = stage.child(stage.scenario.act, Fault("EIO", at))
    assert (code, has_failed) == (2, True)
    assert "cannot read" in stage.said
    assert "Input/output error" in stage.said
    assert "Traceback" not in stage.said

"""Killed, frozen and asked to stop at random moments, by twos too, jobs of every kind end with the same bytes.

See ``storm_runs`` for how.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import fault_runs
import pytest
import storm_runs
from fault_injection import KINDS, Fault, Operation
from repeats import SLOW_SHARE, share_of
from run_helpers import JobMaker, finish, rows_of, start, survived, without_timings

from batchgen.core import storage

SEED = 17
NUM_KILLS = share_of(200)  # processes of the stub engine; a tenth as many of the model's own


def storm(folder: Path, num_kills: int, num_rows: int, *names: str) -> Counter[str]:
    """What was done, by kind; fails the test with what was not survived."""
    return Counter(survived(storm_runs.__file__, folder, num_kills, SEED, num_rows, *names)["counts"])


def test_a_few_signals_at_random_moments_change_no_byte(tmp_path: Path) -> None:
    counts = storm(tmp_path, 2, 40, "run-parquet", "update-job", "run-samples")
    assert counts["rounds"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("share", "num_rows", "engine"), [(1.0, 60, []), (0.1, 36, ["real"])])
def test_a_storm_of_signals_changes_no_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float, num_rows: int, engine: list[str]
) -> None:
    counts = storm(tmp_path, int(NUM_KILLS * share), num_rows, *engine)
    with capsys.disabled():
        print(f"\nsignals survived: {dict(counts)}", end=" ")
    assert sum(count for name, count in counts.items() if name.startswith("kill")) >= int(NUM_KILLS * share)


def test_two_runs_at_once_one_wins_and_the_other_exits_5(job: JobMaker, tmp_path: Path) -> None:
    job.write([*rows_of(60), "{"])
    job.run(job.spec(output={"path": str(tmp_path / "reference")}))
    other_has_ended = tmp_path / "other-has-ended"
    processes = [start(["run", job.toml()], load_until=str(other_has_ended)) for _ in range(2)]
    while sum(process.poll() is None for process in processes) > 1:
        time.sleep(0.05)
    other_has_ended.touch()
    ends = sorted(finish(process) for process in processes)
    assert [code for code, _ in ends] == [3, 5], ends
    assert job.outputs() == without_timings(tmp_path / "reference" / "outputs.jsonl")
    assert (job.output / "errors.jsonl").read_bytes() == (tmp_path / "reference" / "errors.jsonl").read_bytes()


# ---------------------------------------------------------------- faults at every operation


def attack(scenarios: Iterable[str], folder: Path, share: float, *mount: Path) -> Counter[str]:
    """The faults done, by kind; fails the test with those that were not survived."""
    return Counter(survived(fault_runs.__file__, ",".join(scenarios), folder, share, SEED, *mount)["counts"])


# One for each way to write: by workers, after a stop, over a run, three updates, and shards that are merged.
FEW = ("run-workers", "stop-limit", "overwrite", "update-job", "update-form", "update-parquet", "merge-parquet")


@pytest.mark.slow
def test_faults_at_any_operation_lose_and_repeat_nothing(
    fast_folder: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """CI attacks a few scenarios, since each takes seconds without a fault too; the night attacks all."""
    scenarios, share = (fault_runs.SCENARIOS, 1 / 6) if SLOW_SHARE == 1 else (FEW, SLOW_SHARE / 4)
    counts = attack(scenarios, fast_folder, share)
    del counts["operations"]
    with capsys.disabled():
        print(f"\nfaults survived, by kind: {dict(counts)}; {counts.total()} in all", end=" ")
    for kind, count in counts.items():
        record_property(kind, count)
    assert counts.keys() >= {*KINDS, "EFBIG"}
    assert counts.total() > 250 * len(scenarios) * share


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
        share = max(SLOW_SHARE, 0.5)  # every second page
        assert attack(["run-parquet", "update", "merge"], fast_folder, share, mount)["full disk"] > 8 * share
    finally:
        subprocess.run(["umount", str(mount)], check=True)


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

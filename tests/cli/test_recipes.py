"""The recipes in ``jobs/`` run: shards of an array are finished, queued again when stopped early, and merged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import ENVIRONMENT, JobMaker, read_lines, rows_of

from batchgen.cli.main import call

RECIPES = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``batchgen`` has a stub engine and ``scontrol`` notes what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = Path(__file__).parents[1] / "helpers" / "stub_cli.py"
    for name, text in (
        ("batchgen", f"""exec {sys.executable} {stub} "{{\\"step_s\\": ${{STEP_S:-0}}}}" "$@\""""),
        ("scontrol", f'echo "$@" >> {tmp_path}/scontrol'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}


def slurm(job: JobMaker, environment: dict[str, str], number: int, *flags: str) -> int:
    array = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_JOB_ID": "77"}
    command = [str(RECIPES / "slurm.sh"), str(job.toml()), str(job.folder / "part"), *flags]
    return subprocess.run(command, env=environment | array, timeout=60, check=False, capture_output=True).returncode


def test_the_tasks_of_a_slurm_array_are_shards_that_merge(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(40))
    assert [slurm(job, commands, number) for number in (1, 2)] == [0, 0]
    assert call(["merge", f"{job.folder}/part-1", f"{job.folder}/part-2", "-o", f"{job.folder}/whole"]) == 0
    assert [row["index"] for row in read_lines(job.folder / "whole" / "outputs.jsonl")] == list(range(40))
    assert not (job.folder / "scontrol").exists()


def test_a_slurm_task_that_stops_early_is_queued_again_and_goes_on(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(80))
    assert slurm(job, commands, 2, "--max-total-tokens", "200") == 0
    assert (job.folder / "scontrol").read_text() == "requeue 77_2\n"
    assert not (job.folder / "part-2" / "outputs.jsonl").exists()
    assert slurm(job, commands, 2) == 0
    assert len(read_lines(job.folder / "part-2" / "outputs.jsonl")) == 40


def test_a_slurm_task_whose_shard_is_finished_with_failed_rows_lets_the_merge_run(
    job: JobMaker, commands: dict[str, str]
) -> None:
    job.write([*rows_of(10), "{", "{"])
    assert [slurm(job, commands, number) for number in (1, 2)] == [0, 0]
    assert call(["merge", f"{job.folder}/part-1", f"{job.folder}/part-2", "-o", f"{job.folder}/whole"]) == 3
    assert slurm(job, commands, 1, "--no-such-flag") == 2


def test_the_merge_of_a_slurm_array_waits_for_its_tasks() -> None:
    text = (RECIPES / "slurm.sh").read_text()
    merges = [line for line in text.splitlines() if "batchgen merge" in line]
    assert merges
    assert all("sbatch --dependency=afterok:$id" in line for line in merges)


def pod(job: JobMaker, environment: dict[str, str], index: int) -> subprocess.Popen[bytes]:
    yaml = pytest.importorskip("yaml")
    spec: dict[str, Any] = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())["spec"]
    assert spec["completionMode"] == "Indexed"
    assert f"/{spec['completions']}" in spec["template"]["spec"]["containers"][0]["args"][0]
    assert [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule] == [
        [75],
        [2],
    ]
    container = spec["template"]["spec"]["containers"][0]
    script = container["args"][0].replace("/jobs/job.toml", str(job.toml())).replace("/runs/", f"{job.folder}/")
    return subprocess.Popen([*container["command"], script], env=environment | {"JOB_COMPLETION_INDEX": str(index)})


def test_a_pod_runs_its_shard_and_failed_rows_are_no_failed_pod(job: JobMaker, commands: dict[str, str]) -> None:
    job.write([*rows_of(15), "{"])
    assert pod(job, commands, 7).wait(60) == 0
    assert [row["index"] for row in read_lines(job.folder / "part-7" / "outputs.jsonl")] == [7]
    assert len(read_lines(job.folder / "part-7" / "errors.jsonl")) == 1


def test_an_evicted_pod_says_75_and_the_next_one_goes_on(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(800))
    evicted = pod(job, commands | {"STEP_S": "0.05"}, 0)
    folder = job.folder / "part-0" / "journal"
    until = time.monotonic() + 60
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    evicted.send_signal(signal.SIGTERM)
    assert evicted.wait(60) == 75
    assert pod(job, commands, 0).wait(60) == 0
    assert len(read_lines(job.folder / "part-0" / "outputs.jsonl")) == 100

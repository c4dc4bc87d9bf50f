"""Killed, frozen and asked to stop at random moments, by twos too, jobs of every kind end with the same bytes.

See ``storm_runs`` for how. ``BATCHGEN_STORM_KILLS`` is how many processes the slow tests kill with the stub engine, a
tenth of them with the model's own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import storm_runs
from run_helpers import ENVIRONMENT, MODEL, JobMaker, finish, rows_of, start, survived, without_timings

SEED = 17
NUM_KILLS = int(os.environ.get("BATCHGEN_STORM_KILLS", "100"))


def storm(folder: Path, num_kills: int, num_rows: int, *names: str) -> Counter[str]:
    """What was done, by kind; fails the test with what was not survived."""
    return Counter(survived(storm_runs.__file__, folder, num_kills, SEED, num_rows, *names)["counts"])


def test_a_few_signals_at_random_moments_change_no_byte(tmp_path: Path) -> None:
    counts = storm(tmp_path, 4, 40, "run-parquet", "retry", "run-samples")
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


@pytest.mark.slow
def test_processes_of_the_command_itself_are_killed_and_change_no_byte(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows_of(120)), encoding="utf-8")
    command = [sys.executable, "-m", "batchgen", "run", "--model", str(MODEL), "--input", str(source), "--prompt"]
    command += ["{question}", "--n", "2", "--temperature", "0.7", "--stop", "7", "--threads", "1", "--output"]

    def start(output: str) -> subprocess.Popen[str]:
        words = [*command, str(tmp_path / output)]
        return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    started_at = time.monotonic()
    code, said = finish(start("reference"), timeout=300)
    whole_s = time.monotonic() - started_at
    assert code == 0, said
    for _ in range(4):
        process = start("out")
        time.sleep(rng.uniform(0.3, 1) * whole_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    code, said = finish(start("out"), timeout=300)
    assert code == 0, said
    assert without_timings(tmp_path / "out" / "outputs.jsonl") == without_timings(
        tmp_path / "reference" / "outputs.jsonl"
    )


def test_two_runs_at_once_one_wins_and_the_other_exits_5(job: JobMaker, tmp_path: Path) -> None:
    job.write([*rows_of(60), "{"])
    job.run(job.spec(output={"path": str(tmp_path / "reference")}))
    others_have_ended = tmp_path / "others-have-ended"
    processes = [start(["run", job.toml()], load_until=str(others_have_ended)) for _ in range(3)]
    while sum(process.poll() is None for process in processes) > 1:
        time.sleep(0.05)
    others_have_ended.touch()
    ends = sorted(finish(process) for process in processes)
    assert [code for code, _ in ends] == [3, 5, 5], ends
    assert job.outputs() == without_timings(tmp_path / "reference" / "outputs.jsonl")
    assert (job.output / "errors.jsonl").read_bytes() == (tmp_path / "reference" / "errors.jsonl").read_bytes()

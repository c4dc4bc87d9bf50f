"""Killed again and again at moments nobody chose, a job still ends with the bytes of an undisturbed run.

Each test runs the command in a process of its own with the stub engine behind it, sends SIGKILL after a random time,
and starts it again, until it has been killed often enough and is left to finish.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, finish, read_lines, rows_of, start, without_timings
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.output.rundir import RunDir
from batchgen.run.reports import read_report

NUM_ROWS = 400
STEP_S = 0.01  # some 500 steps: undisturbed the job takes five seconds and more


def hard_rows() -> list[dict[str, Any] | str]:
    """Rows with every kind of trouble a restart could get wrong: errors, duplicates, rows of their own sampling."""
    rows: list[dict[str, Any] | str] = list(rows_of(NUM_ROWS))
    rows[7] = "{"
    rows[150] = {"id": "no-question"}
    rows[399] = rows[3]
    rows[200] = {"id": "own", "question": "Why?", "sampling": {"max_tokens": 30, "temperature": 0.7}}
    return rows


def undisturbed(job: JobMaker, folder: Path, arguments: list[str]) -> Path:
    code = call(["run", str(job.toml()), *arguments, "--output", str(folder), "-q"], engine_factory=stub_factory())
    assert code == 3
    return folder


def killed_until_done(
    arguments: list[str | Path], num_kills: int, rng: random.Random, stdin: Path | str = os.devnull
) -> None:
    """Run a command to its end, killing it ``num_kills`` times on the way."""
    kills = 0
    while True:
        process = start(arguments, stdin=stdin, step_s=STEP_S)
        if kills < num_kills:
            time.sleep(rng.uniform(0.1, 2.0))
            if process.poll() is None:
                process.kill()
                process.communicate()
                kills += 1
                continue
        code, said = finish(process)
        assert code == 3 or "already done" in said, said  # killed after the outputs had appeared
        if kills >= num_kills:
            return
        process = start(
            [*arguments, "--overwrite"], stdin=stdin, step_s=STEP_S
        )  # done too early: once more from the start
        time.sleep(2)
        process.kill()
        process.communicate()
        kills += 1


def same_content(left: Path, right: Path) -> None:
    """Both run directories hold the same rows, dead letters and counts; only times may differ."""
    (outputs,) = (path.name for path in left.glob("outputs.*"))
    assert without_timings(left / outputs) == without_timings(right / outputs)
    if outputs.endswith(".parquet"):
        assert pq.read_schema(left / outputs) == pq.read_schema(right / outputs)
    assert (left / "errors.jsonl").read_bytes() == (right / "errors.jsonl").read_bytes()
    reports = [read_report(RunDir(folder)) for folder in (left, right)]
    for key in ("rows", "errors", "tokens", "finish_reasons"):
        assert reports[0][key] == reports[1][key]


def check(job: JobMaker, tmp_path: Path, arguments: list[str], num_kills: int, seed: int) -> None:
    job.write(hard_rows())
    reference = undisturbed(job, tmp_path / "reference", arguments)
    killed_until_done(["run", job.toml(), *arguments], num_kills, random.Random(seed))
    same_content(reference, job.output)
    indexes = sorted(
        [row["index"] for row in without_timings(next(job.output.glob("outputs.*")))]
        + [letter["index"] for letter in read_lines(job.output / "errors.jsonl")]
    )
    assert indexes == list(range(NUM_ROWS))
    assert {path.name for path in job.output.iterdir()} == {path.name for path in reference.iterdir()}


CASES = {
    "greedy-jsonl": [],
    "sampled-jsonl": ["--temperature", "1", "--seed", "5"],
    "greedy-parquet": ["--output-format", "parquet"],
    "sampled-parquet": ["--temperature", "1", "--output-format", "parquet"],
}


@pytest.mark.parametrize("case", ["sampled-parquet"])
def test_a_few_kills_change_no_byte(job: JobMaker, tmp_path: Path, case: str) -> None:
    check(job, tmp_path, CASES[case], num_kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forty_kills_change_no_byte(job: JobMaker, tmp_path: Path, case: str) -> None:
    check(job, tmp_path, CASES[case], num_kills=40, seed=2)


@pytest.mark.slow
def test_kills_of_a_shard_change_no_byte(job: JobMaker, tmp_path: Path) -> None:
    job.write(hard_rows())
    reference = undisturbed(job, tmp_path / "reference", ["--shard", "2/2"])
    killed_until_done(["run", job.toml(), "--shard", "2/2"], 10, random.Random(3))
    assert job.outputs() == without_timings(reference / "outputs.jsonl")
    same_content(reference, job.output)


@pytest.mark.slow
def test_kills_of_a_job_over_standard_input_change_no_byte(job: JobMaker, tmp_path: Path) -> None:
    job.write(hard_rows())
    reference = undisturbed(job, tmp_path / "reference", [])
    killed_until_done(["run", job.toml(), "--input", "-"], 20, random.Random(4), stdin=job.input)
    assert job.outputs() == without_timings(reference / "outputs.jsonl")
    letters = read_lines(reference / "errors.jsonl")
    assert job.errors() == [{**letter, "source": str(job.output / "input.spool")} for letter in letters]
    assert {path.name for path in job.output.iterdir()} == {path.name for path in reference.iterdir()}


def test_two_runs_at_once_one_wins_and_the_other_exits_5(job: JobMaker, tmp_path: Path) -> None:
    job.write(hard_rows())
    reference = undisturbed(job, tmp_path / "reference", [])
    others_have_ended = tmp_path / "others-have-ended"
    processes = [start(["run", job.toml()], load_until=str(others_have_ended)) for _ in range(3)]
    while sum(process.poll() is None for process in processes) > 1:
        time.sleep(0.05)
    others_have_ended.touch()
    ends = sorted(finish(process) for process in processes)
    assert [code for code, _ in ends] == [3, 5, 5], ends
    same_content(reference, job.output)


def test_an_input_changed_between_runs_is_refused_and_nothing_is_lost(job: JobMaker, tmp_path: Path) -> None:
    rows = hard_rows()
    job.write(rows)
    reference = undisturbed(job, tmp_path / "reference", [])
    process = start(["run", job.toml(), "--max-total-tokens", "3000"], step_s=0.002)
    assert finish(process)[0] == 75
    job.write([*rows[:-1], "changed"])
    code, said = finish(start(["run", job.toml()]))
    assert code == 2
    assert "input" in said
    job.write(rows)
    assert finish(start(["run", job.toml()]))[0] == 3
    same_content(reference, job.output)

"""Jobs with constrained rows: stopped, killed, in shards and tried again they end with the bytes of one run.

With the sample model's own engine; rows of every grammar among free ones, some refused, some of forced tokens alone.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import ENVIRONMENT, MODEL, JobMaker, finish, quiet, read_lines, rows_of, without_timings
from structured import GRAMMARS, LIST

from batchgen.config.job import JobSpec
from batchgen.core.shard import Shard
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.merge import merge
from batchgen.run.retry import retry_job

COUNT = 20
REFUSED = 4, {"structured_outputs": {"regex": "a(?=b)"}}  # the index of a row, and what it asks for
JOB_WIDE = {"json": LIST}


def rows() -> list[dict[str, Any]]:
    """Rows that ask for each grammar or take the job's; some are free, some samples, scored or drawn."""
    kinds: list[Any] = [None, *GRAMMARS.values(), {}]
    extras: list[dict[str, Any]] = [{}, {"n": 3}, {"logprobs": 1, "prompt_logprobs": 0}, {"stop": ["er"]}, {"seed": 1}]
    made = rows_of(COUNT)
    for i, row in enumerate(made):
        kind = kinds[i % len(kinds)]
        row["sampling"] = extras[i % len(extras)] | ({} if kind is None else {"structured_outputs": kind})
    made[REFUSED[0]]["sampling"] = REFUSED[1]
    return made


def spec(job: JobMaker, output: str = "out", **engine: int) -> JobSpec:
    sampling = {"max_tokens": 30, "temperature": 1.0, "structured_outputs": JOB_WIDE}
    return job.spec(output={"path": str(job.folder / output)}, sampling=sampling, engine={"threads": 1} | engine)


@pytest.fixture
def whole(job: JobMaker) -> list[dict[str, Any]]:
    """The records of an undisturbed run."""
    job.write(rows())
    assert run_job(spec(job, "whole"), quiet()).exit_code == 3
    (letter,) = read_lines(job.folder / "whole" / "errors.jsonl")
    assert (letter["index"], letter["code"]) == (REFUSED[0], "bad_param")
    records = without_timings(job.folder / "whole" / "outputs.jsonl")
    assert len(records) == COUNT - 1
    return records


@pytest.mark.usefixtures("threads_as_before")
def test_a_job_stopped_again_and_again_ends_with_the_same_bytes(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    small = spec(job, max_num_seqs=3, max_num_batched_tokens=19, block_size=8)
    codes = []
    while not codes or codes[-1] == 75:
        codes.append(run_job(small, quiet(max_total_tokens=100)).exit_code)
    assert len(codes) > 5, codes
    assert codes[-1] == 3
    assert without_timings(job.output / "outputs.jsonl") == whole


@pytest.mark.usefixtures("threads_as_before")
def test_shards_join_to_the_same_bytes(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    parts = [job.folder / "part1", job.folder / "part2"]
    for number, part in enumerate(parts, 1):
        run_job(spec(job, part.name), RunOptions(progress="quiet", shard=Shard(number, 2)))
    merge(parts, job.output)
    assert without_timings(job.output / "outputs.jsonl") == whole


@pytest.mark.usefixtures("threads_as_before")
def test_a_row_whose_schema_was_mended_joins_the_outputs(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    folder = job.folder / "whole"
    (letter,) = read_lines(folder / "errors.jsonl")
    letter["row"]["sampling"] = {"structured_outputs": {"regex": "a(b)"}}
    (folder / "errors.jsonl").write_text(json.dumps(letter) + "\n", encoding="utf-8")
    assert retry_job(folder, RunOptions(progress="quiet"), {}).exit_code == 0
    records = without_timings(folder / "outputs.jsonl")
    mended = records.pop(REFUSED[0])
    assert (mended["text"], mended["finish_reason"]) == ("ab", "stop")
    assert records == whole


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_before")
def test_processes_that_are_killed_or_told_to_stop_lose_no_token(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    rng = random.Random(5)
    command = [sys.executable, "-m", "batchgen", "run", "--model", str(MODEL), "--input", str(job.input), "--id", "id"]
    command += ["--prompt", "{question}", "--max-tokens", "30", "--temperature", "1", "--threads", "1"]
    command += ["--structured-outputs", json.dumps(JOB_WIDE), "--max-num-seqs", "2", "--output"]

    def start(folder: Path) -> subprocess.Popen[str]:
        words = [*command, str(folder)]
        return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    started_at = time.monotonic()
    code, said = finish(start(job.folder / "alone"), timeout=300)
    assert code == 3, said
    whole_s = time.monotonic() - started_at
    for number in range(10):
        process = start(job.output)
        time.sleep(rng.uniform(0.4, 1) * whole_s)
        process.send_signal((signal.SIGKILL, signal.SIGTERM)[number % 2])
        process.communicate()
    code, said = finish(start(job.output), timeout=300)
    assert code == 3, said
    assert without_timings(job.output / "outputs.jsonl") == whole

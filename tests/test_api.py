"""The commands as functions of Python: a job file, its keys and the options of the command as arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, rows_of, without_timings
from stub_engine import stub_factory

import batchgen


@pytest.fixture
def toml(job: JobMaker) -> Path:
    job.write(rows_of(12))
    return job.toml()


def test_a_job_file_runs_with_keys_and_options_and_again_finds_itself_done(job: JobMaker, toml: Path) -> None:
    given: dict[str, Any] = {"quiet": True, "engine_factory": stub_factory()}
    with pytest.raises(batchgen.RunStopped, match=r"max total tokens of 40\)"):
        batchgen.run_job(toml, limit=9, max_total_tokens=40, **given)
    run = batchgen.run_job(toml, limit=9, max_runtime="55m", **given)
    assert (len(run), run[3]["id"], run.path) == (9, "q-3", job.output)
    assert without_timings(job.output / "outputs.jsonl") == [
        {k: v for k, v in r.items() if k != "timings"} for r in run
    ]
    assert batchgen.run_job(job.output, **given).rows == run.rows
    assert batchgen.read_report(job.output) == json.loads((job.output / "report.json").read_text())
    with pytest.raises(batchgen.ResumeMismatch):
        batchgen.run_job(toml, limit=9, temperature=0.5, **given)
    assert batchgen.run_job(toml, limit=9, temperature=0.5, overwrite=True, **given)[0] != run[0]


def test_a_plan_is_what_the_command_prints(toml: Path) -> None:
    plan = batchgen.plan_job(toml, limit=5)
    assert plan["rows"] == {"total": 5, "good": 5, "bad": 0}


def test_what_is_no_report_or_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(batchgen.UsageError, match="not a run directory"):
        batchgen.read_report(tmp_path)
    with pytest.raises(batchgen.UsageError, match="cannot read the job file"):
        batchgen.run_job(tmp_path / "job.toml")
    with pytest.raises(batchgen.UsageError, match="unknown argument 'max_new_tokens'"):
        batchgen.run_job(tmp_path / "job.toml", max_new_tokens=3)

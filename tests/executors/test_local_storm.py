"""Workers and drivers killed at random moments: no row is lost, none comes twice, all bytes are those of one process.

See ``storm_runs`` for how. ``BATCHGEN_STORM_KILLS`` is half of how many processes are killed.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import storm_runs
from run_helpers import JobMaker, quiet, rows_of, survived

from batchgen.executors.backend import run_job

SEED = 23
NUM_KILLS = 2 * int(os.environ.get("BATCHGEN_STORM_KILLS", "100"))


@pytest.mark.slow
def test_a_storm_of_kills_of_workers_and_drivers_changes_no_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counter(survived(storm_runs.__file__, tmp_path, NUM_KILLS, SEED, 40, "workers")["counts"])
    with capsys.disabled():
        print(f"\nsignals survived: {dict(counts)}", end=" ")
    assert sum(count for name, count in counts.items() if name.startswith("kill")) >= NUM_KILLS
    assert counts["kill of a worker"] >= NUM_KILLS // 5


@pytest.mark.slow
def test_workers_take_the_steps_of_one_process_with_the_models_own_engine(tmp_path: Path) -> None:
    jobs = JobMaker(tmp_path)
    jobs.write(rows_of(3000))
    steps, found = {}, {}
    for workers in ("", "1", "2"):
        jobs.output = tmp_path / f"on-{workers}"
        spec = jobs.spec(cluster={"workers": workers}, engine={"max_num_seqs": 64, "threads": 1})
        report = run_job(spec, quiet()).report
        assert report is not None
        steps[workers], found[workers] = report["engine"]["num_steps"], jobs.outputs()
    assert found["1"] == found["2"] == found[""]
    assert steps["1"] <= 1.05 * steps[""], "but for the first ones, which may come one by one"
    assert steps["2"] <= 1.3 * steps[""]

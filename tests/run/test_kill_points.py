"""An update that is killed: at each point of its way every command finds a folder that it can make sense of.

The job before (A) has 9 rows, one of them bad; this one (B) has 10, of which two are new and another one is bad. See
``helpers/kill_points.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from repeats import slow
from run_helpers import ENVIRONMENT

SCRIPT = Path(__file__).parents[1] / "helpers" / "kill_points.py"
FINISHED, INTERRUPTED = "finished", "interrupted; run again to resume; the outputs are from the previous job"
NO_SOURCE = "is between two jobs: run its job again first"


class Point(NamedTuple):
    """What is found after a kill: whose files, rows that each job computes at its next start, and what status says."""

    outputs: str
    errors: str
    b_computes: int
    a_computes: int
    state: str
    is_source: bool = True


POINTS = {
    "folder": Point("A", "A", 2, 0, FINISHED),
    "journal": Point("A", "A", 2, 0, INTERRUPTED),
    "mid pass": Point("A", "A", 2, 0, INTERRUPTED),
    "pass ended": Point("A", "A", 2, 0, INTERRUPTED),
    "computing": Point("A", "A", 1, 0, INTERRUPTED),
    "whole": Point("A", "A", 0, 0, INTERRUPTED),
    "staged": Point("A", "A", 0, 0, INTERRUPTED),
    "errors placed": Point("A", "B", 0, 0, INTERRUPTED, is_source=False),
    "outputs placed": Point("B", "B", 0, 2, INTERRUPTED, is_source=False),
    "report": Point("B", "B", 0, 2, INTERRUPTED, is_source=False),
    "job.json": Point("B", "B", 0, 2, FINISHED),
    "half removed": Point("B", "B", 0, 2, FINISHED),
}
FORMS = [pytest.param("jsonl"), slow("parquet")]


@cache
def found_points(form: str) -> dict[str, dict[str, Any]]:
    """What the script has found; it asserts what holds at all points."""
    command = [sys.executable, str(SCRIPT), form]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return points


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", POINTS)
def test_an_update_killed_here_goes_on_and_the_job_before_is_still_there(form: str, point: str) -> None:
    expected, found = POINTS[point], found_points(form)[point]
    if form == "parquet" and not expected.is_source:
        expected = expected._replace(a_computes=0)  # the journal of its outputs is kept beside them
    whose = (found["outputs"], found["errors"], found["B computes"], found["A computes"])
    assert whose == expected[:4]
    assert expected.state in found["status"].splitlines()[0]
    assert ("unfinished job" in found["report"]) == (expected.state == INTERRUPTED)
    assert f"{8 - expected.b_computes} kept, {expected.b_computes} to compute" in found["plan"]
    assert (found["reuse"], NO_SOURCE in found["reuse says"]) == ((3, False) if expected.is_source else (2, True))


def test_every_point_is_held_here() -> None:
    assert found_points("jsonl").keys() == POINTS.keys()

"""After any history of starts, kills and edits a folder holds what its job says, and no result is computed twice.

``helpers/histories.py`` says what that means. ``BATCHGEN_HISTORY_SEED=N`` does the history of that seed alone, with the
``flags`` of the history that failed behind it: ``BATCHGEN_HISTORY_SEED="1803 workers"``.
"""

import os
from pathlib import Path

import pytest
from repeats import further, nightly, share_of, slow
from run_helpers import survived

SCRIPT = str(Path(__file__).parents[1] / "helpers" / "histories.py")
SEED = os.environ.get("BATCHGEN_HISTORY_SEED", "").split()


@pytest.mark.parametrize(("first", "count"), [("0", 1)] if SEED else [("0", 6), further("6", 10), further("16", 8)])
def test_after_any_history_a_folder_holds_what_its_job_says(first: str, count: int) -> None:
    first, *flags = SEED or [first]
    counts = survived(SCRIPT, first, count, *flags)["counts"]
    if not SEED:
        assert counts["exact"] >= 12, counts  # starts of which the number of computed rows is known
        assert counts["elsewhere"] >= 4, counts
        assert {kind for kind in ("kill", "torn", "power") if counts[f"{kind} 137"]} == {"kill", "torn", "power"}


@pytest.mark.parametrize(
    ("first", "count", "flags"),
    [
        *(slow(1000, 900, ""), nightly(2000, 900, ""), slow(3000, 70, "workers"), slow(4000, 70, "real")),
        slow(5000, 60, "workers real"),
    ],
)
def test_two_thousand_histories(first: int, count: int, flags: str) -> None:
    count = share_of(count)
    counts = survived(SCRIPT, first, count, *flags.split())["counts"]
    assert counts["histories"] == count

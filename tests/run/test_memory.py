"""Memory does not grow with the number of rows: 50,000 rows more, the same process but for a bounded rest.

Input, ids, journal, outputs and report are the real ones; only the engine is a stub. Each run is a process of its own,
whose peak resident memory is read when it is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from large_inputs import write_input
from repeats import nightly, slow
from run_helpers import ENVIRONMENT, MODEL

MAX_GROWTH_BYTES = 24 << 20  # less than 520 for each row that is more; measured: 8 to 14 MiB

PROGRAM = """
import json, resource, sys
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.config.load import load_job
from stub_engine import stub_factory
flags = json.loads(sys.argv[1])
outcome = run_job(load_job(None, flags), RunOptions(progress="quiet"), engine_factory=stub_factory(max_num_seqs=256))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"code": outcome.exit_code, "rows": outcome.report["rows"], "seconds": outcome.report["seconds"],
                  "peak_bytes": peak}))
"""


def peak_bytes(folder: Path, form: str, count: int) -> int:
    """Peak resident memory of a whole run over so many rows."""
    source = folder / f"input.{form}"
    write_input(source, count)
    flags = {
        "model": {"path": str(MODEL)},
        "input": {"path": [str(source)], "id": "id", "prompt_token_ids": "prompt_token_ids", "columns": ["topic"]},
        "output": {"path": str(folder / f"out-{count}"), "format": form},
        "sampling": {"max_tokens": 2},
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(flags)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"\n{form}, {count:,} rows: peak {found['peak_bytes'] / 2**20:,.0f} MiB, seconds {found['seconds']}")
    assert found["rows"]["total"] == count
    return int(found["peak_bytes"])


@pytest.mark.parametrize("form", [nightly("jsonl"), slow("parquet")])
def test_eighty_thousand_rows_take_little_more_memory_than_thirty_thousand(tmp_path: Path, form: str) -> None:
    small = peak_bytes(tmp_path, form, 30_000)  # more than a row group of Parquet
    large = peak_bytes(tmp_path, form, 80_000)
    assert large - small <= MAX_GROWTH_BYTES

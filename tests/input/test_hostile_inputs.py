"""Hundreds of inputs that no one should write: each ends in its exit code, each row once, in bounded time and memory.

See ``hostile_inputs`` for the cases and ``hostile_runs`` for the promises.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hostile_runs
import pytest
from hostile_inputs import SOUND, Case
from run_helpers import ENVIRONMENT, survived

SEED = 19
NUM_CASES = int(os.environ.get("BATCHGEN_HOSTILE_CASES", "550"))


def attack(folder: Path, count: int, seed: int) -> Counter[str]:
    """How many cases of each kind were run; fails the test with those that broke a promise."""
    return Counter(survived(hostile_runs.__file__, folder, count, seed)["kinds"])


@pytest.mark.slow
def test_hundreds_of_hostile_inputs_end_in_their_exit_codes_with_each_row_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = attack(tmp_path, NUM_CASES, SEED)
    with capsys.disabled():
        print(f"\nhostile inputs: {dict(kinds)}; {kinds.total()} in all", end=" ")
    assert kinds.total() == NUM_CASES


JOB = """
[model]
path = "{model}"
[input]
path = "in.jsonl.gz"
prompt = "question"
[sampling]
max_tokens = 4
[output]
path = "out"
"""

ONE_CASE = """
import json, sys
from pathlib import Path
import hostile_runs
from hostile_inputs import Case
print(json.dumps(hostile_runs.run(Case("bomb", b""), Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_a_small_file_that_unpacks_to_a_line_of_800_megabytes_is_an_error_row_in_bounded_memory(tmp_path: Path) -> None:
    sound = json.dumps(SOUND).encode() + b"\n"
    block = b"a" * (64 << 20)
    folder = tmp_path / "case"
    case = Case("bomb", JOB.encode(), num_rows=3)
    hostile_runs.prepare(case, folder)
    with gzip.open(folder / "in.jsonl.gz", "wb") as file:
        file.write(sound + b'{"question": "')
        for _ in range(12):
            file.write(block)
        file.write(b'"}\n' + sound)
    command = [sys.executable, "-c", ONE_CASE, str(folder)]  # not a fork, whose peak of memory begins at ours
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    code, said, rss_bytes = json.loads(done.stdout)
    assert code == hostile_runs.FAILED_ROWS, said
    hostile_runs.check_rows(case, folder / "out", code)
    assert rss_bytes < hostile_runs.MAX_RSS_BYTES

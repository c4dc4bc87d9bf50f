"""Damaged tokenizer files, of which ``tokenizer_mutations`` makes any number: none does more harm than a clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import ENVIRONMENT

FIRST_SEED, NUM_SEEDS = 1000, 3000


@pytest.mark.slow
def test_a_damaged_tokenizer_is_refused_in_one_line_or_works(tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "helpers" / "tokenizer_mutations.py"
    command = [sys.executable, str(program), str(FIRST_SEED), str(NUM_SEEDS), str(tmp_path)]
    done = subprocess.run(
        command, env={**ENVIRONMENT, "RUST_BACKTRACE": "0"}, capture_output=True, text=True, check=False, timeout=1200
    )
    lines = done.stdout.splitlines()
    assert done.returncode == os.EX_OK, lines[-1:]
    assert len(lines) == NUM_SEEDS
    assert [line for line in lines if not line.endswith((" ok", " refused"))] == []
    assert {line.rpartition(" ")[2] for line in lines} == {"ok", "refused"}

"""Damaged tokenizer files, of which ``tokenizer_mutations`` makes any number: none does more harm than a clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import ENVIRONMENT


@pytest.mark.parametrize(
    ("first", "count"), [(0, 120), pytest.param(1000, 3000, marks=pytest.mark.slow)], ids=["120 seeds", "3,000 seeds"]
)
def test_a_damaged_tokenizer_is_refused_in_one_line_or_works(first: int, count: int, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "helpers" / "tokenizer_mutations.py"
    command = [sys.executable, str(program), str(first), str(count), str(tmp_path)]
    done = subprocess.run(
        command, env={**ENVIRONMENT, "RUST_BACKTRACE": "0"}, capture_output=True, text=True, check=False, timeout=1200
    )
    lines = done.stdout.splitlines()
    assert done.returncode == os.EX_OK, lines[-1:]
    assert len(lines) == count
    assert [line for line in lines if not line.endswith((" ok", " refused"))] == []
    assert {line.rpartition(" ")[2] for line in lines} == {"ok", "refused"}

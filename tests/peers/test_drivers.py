"""The drivers of batchgen run with the package as it is; those of other engines need environments of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE, REPOSITORY = Path(__file__).parent, Path(__file__).parents[2]
MODEL = REPOSITORY / "sample_data" / "tiny-lfm2"


@pytest.mark.parametrize(
    ("driver", "form", "row", "field"),
    [
        ("drivers.py", "w8a8-kv-int8", {"prompt_token_ids": [1, 5, 6]}, "output_tokens"),
        ("quality_drivers.py", "w8a8-float32", {"prompt_token_ids": [1, 5], "answer_token_ids": [6, 7]}, "answers"),
    ],
)
def test_a_driver_measures_batchgen(driver: str, form: str, row: dict[str, Any], field: str, tmp_path: Path) -> None:
    (tmp_path / "work.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["batchgen", "--model", str(MODEL), "--workload", str(tmp_path / "work.jsonl"), "--dtype", form]
    done = subprocess.run(
        [sys.executable, str(HERE / driver), *arguments], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dtype"] == form and found[field]

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import JobMaker


@pytest.fixture
def jobs(tmp_path: Path) -> JobMaker:
    return JobMaker(tmp_path)

"""Fixtures shared by all tests. That this file is here also puts tests/ on the path, for the helpers beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import JobMaker


@pytest.fixture
def job(tmp_path: Path) -> JobMaker:
    """Makes jobs over rows written to ``tmp_path``; see ``JobMaker``."""
    return JobMaker(tmp_path)

"""Fixtures shared by all tests. That this file is here also puts tests/ on the path, for the helpers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import JobMaker


@pytest.fixture
def job(tmp_path: Path) -> JobMaker:
    """Makes jobs over rows written to ``tmp_path``; see ``JobMaker``."""
    return JobMaker(tmp_path)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """For what sets the threads of its process, which tests share."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

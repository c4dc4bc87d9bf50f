from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine import self_test


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that a test has changed must neither be found nor be remembered as this machine's."""
    monkeypatch.setattr(self_test, "find_fault", lambda *_: "")
    monkeypatch.setattr(self_test, "cache_folder", lambda: tmp_path)

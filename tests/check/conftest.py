from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine import proof


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that a test has changed must neither be found nor be remembered as this machine's."""
    monkeypatch.setattr(proof, "find_faults", lambda *_: {})
    monkeypatch.setattr(proof, "cache_folder", lambda: tmp_path)

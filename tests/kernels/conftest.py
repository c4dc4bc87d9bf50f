from __future__ import annotations

import pytest
import torch
from tiny_model import one_thread

from batchgen.kernels.cpu import backend

__all__ = ["one_thread"]  # applies to every test here


@pytest.fixture
def attention_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of bfloat16 by tiles on any processor, for heads of whole tiles."""
    monkeypatch.setitem(backend._ATTENTION_KINDS, (torch.bfloat16, torch.bfloat16, True), "bf16_tiles")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter multiplies what is beyond a sequence's end too, before it is masked: NaN and inf."""
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.filterwarnings("ignore:(invalid|overflow|divide|All-NaN).*:RuntimeWarning"))

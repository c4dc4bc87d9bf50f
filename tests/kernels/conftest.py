from __future__ import annotations

import pytest
from tiny_model import one_thread

__all__ = ["one_thread"]  # applies to every test here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter multiplies what is beyond a sequence's end too, before it is masked: NaN and inf."""
    for item in items:
        if item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.filterwarnings("ignore:(invalid|overflow|divide|All-NaN).*:RuntimeWarning"))

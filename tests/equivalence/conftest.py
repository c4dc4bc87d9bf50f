from pathlib import Path

import pytest
from tiny_model import one_thread

__all__ = ["one_thread"]  # applies to every test here
SHARED = {"model": "lfm2", "rows": "greedy", "dtype": "float32", "kv_cache_dtype": "auto"}  # with usual values


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compare with the same rows alone are neighbours, so that few processes compute these."""

    def shared(item: pytest.Item) -> list[str]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        is_here = item.path.parent == Path(__file__).parent
        return [str(params.get(name, usual)) for name, usual in SHARED.items()] if is_here else []

    items.sort(key=shared)

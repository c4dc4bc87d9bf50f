"""Language models from a folder, a Hub id or a published shape's name.

``load_model`` imports torch on first use; ``load_config`` needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.model.config import ModelConfig
from batchgen.model.registry import is_dummy, load_config

if TYPE_CHECKING:
    from batchgen.model.load import load_model

__all__ = ["ModelConfig", "is_dummy", "load_config", "load_model"]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from batchgen.model.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

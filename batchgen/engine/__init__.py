"""The continuous batcher. ``Engine`` and ``EngineConfig`` are its whole public surface.

Modules that need torch are imported on first use, so that the scheduler and its tests can do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.config.job import EngineConfig

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from batchgen.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

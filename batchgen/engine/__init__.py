"""The continuous batcher. ``Engine``, ``make_engine`` and ``EngineConfig`` are its whole public surface.

What needs torch is imported when first used: the scheduler and its tests do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen.engine.config import EngineConfig

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine
    from batchgen.engine.pipeline import make_engine

__all__ = ["Engine", "EngineConfig", "make_engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from batchgen.engine.engine import Engine

        return Engine
    if name == "make_engine":
        from batchgen.engine.pipeline import make_engine

        return make_engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

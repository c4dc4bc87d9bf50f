"""The continuous batcher. ``Engine`` and ``EngineConfig`` are its whole public surface."""

from batchgen.engine.config import EngineConfig
from batchgen.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]

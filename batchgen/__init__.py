"""batchgen: run a language model over a whole dataset, offline, and never lose or repeat a row.

The public names are imported when first used, so that ``import batchgen`` and ``batchgen --help`` load no torch.
"""

from __future__ import annotations

from batchgen.core.version import __version__

TYPE_CHECKING = False  # typing takes a while to import, and until it is there no signal is answered
if TYPE_CHECKING:
    from typing import Any

    from batchgen.api import Run, generate
    from batchgen.config.job import JobSpec
    from batchgen.config.load import load_job
    from batchgen.core.errors import (
        BatchgenError,
        GateFailed,
        InputError,
        LockedError,
        ModelError,
        OutOfMemory,
        RemoteError,
        ResumeMismatch,
        RunStopped,
        StorageError,
        UsageError,
    )
    from batchgen.core.records import Request, Result, SamplingParams
    from batchgen.core.shard import Shard
    from batchgen.engine import Engine, EngineConfig
    from batchgen.executors.backend import run_job
    from batchgen.model.load import load_model
    from batchgen.run.invocation import RunOptions
    from batchgen.text.tokenizer import Tokenizer


_HOME = {
    "BatchgenError": "batchgen.core.errors",
    "Engine": "batchgen.engine",
    "EngineConfig": "batchgen.engine",
    "GateFailed": "batchgen.core.errors",
    "InputError": "batchgen.core.errors",
    "JobSpec": "batchgen.config.job",
    "LockedError": "batchgen.core.errors",
    "ModelError": "batchgen.core.errors",
    "OutOfMemory": "batchgen.core.errors",
    "RemoteError": "batchgen.core.errors",
    "Request": "batchgen.core.records",
    "Result": "batchgen.core.records",
    "ResumeMismatch": "batchgen.core.errors",
    "Run": "batchgen.api",
    "RunOptions": "batchgen.run.invocation",
    "RunStopped": "batchgen.core.errors",
    "SamplingParams": "batchgen.core.records",
    "Shard": "batchgen.core.shard",
    "StorageError": "batchgen.core.errors",
    "Tokenizer": "batchgen.text.tokenizer",
    "UsageError": "batchgen.core.errors",
    "generate": "batchgen.api",
    "load_job": "batchgen.config.load",
    "load_model": "batchgen.model.load",
    "run_job": "batchgen.executors.backend",
}

__all__ = [
    "BatchgenError",
    "Engine",
    "EngineConfig",
    "GateFailed",
    "InputError",
    "JobSpec",
    "LockedError",
    "ModelError",
    "OutOfMemory",
    "RemoteError",
    "Request",
    "Result",
    "ResumeMismatch",
    "Run",
    "RunOptions",
    "RunStopped",
    "SamplingParams",
    "Shard",
    "StorageError",
    "Tokenizer",
    "UsageError",
    "__version__",
    "generate",
    "load_job",
    "load_model",
    "run_job",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""batchgen: run a language model over a whole dataset, offline, and never lose or repeat a row.

The public names are imported when first used, so that ``import batchgen`` and ``batchgen --help`` load no torch.
"""

from __future__ import annotations

from batchgen.core.version import __version__

TYPE_CHECKING = False  # typing takes a while to import, and until it is there no signal is answered
if TYPE_CHECKING:
    from typing import Any

    from batchgen.api import Run, generate, plan_job, read_report, run_job
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
    from batchgen.engine import Engine, EngineConfig
    from batchgen.llm import LLM
    from batchgen.model.load import load_model
    from batchgen.text.tokenizer import Tokenizer


_HOME = {
    "LLM": "batchgen.llm",
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
    "RunStopped": "batchgen.core.errors",
    "SamplingParams": "batchgen.core.records",
    "StorageError": "batchgen.core.errors",
    "Tokenizer": "batchgen.text.tokenizer",
    "UsageError": "batchgen.core.errors",
    "generate": "batchgen.api",
    "load_job": "batchgen.config.load",
    "load_model": "batchgen.model.load",
    "plan_job": "batchgen.api",
    "read_report": "batchgen.api",
    "run_job": "batchgen.api",
}

__all__ = [
    "LLM",
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
    "RunStopped",
    "SamplingParams",
    "StorageError",
    "Tokenizer",
    "UsageError",
    "__version__",
    "generate",
    "load_job",
    "load_model",
    "plan_job",
    "read_report",
    "run_job",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""batchgen: run a language model over a whole dataset, offline, and never lose or repeat a row.

The public names are imported when first used, so that ``import batchgen`` and ``batchgen --help`` load no torch.
"""

from __future__ import annotations

from batchgen.core.version import __version__

TYPE_CHECKING = False  # importing typing takes a while, and signals are not handled before that
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


_NAMES = {  # public names by their module
    "api": "Run generate plan_job read_report run_job",
    "config.job": "JobSpec",
    "config.load": "load_job",
    "core.errors": "BatchgenError GateFailed InputError LockedError ModelError OutOfMemory RemoteError ResumeMismatch "
    "RunStopped StorageError UsageError",
    "core.records": "Request Result SamplingParams",
    "engine": "Engine EngineConfig",
    "llm": "LLM",
    "model.load": "load_model",
    "text.tokenizer": "Tokenizer",
}
_MODULES = {name: f"batchgen.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = [  # the same names as literal strings, for type checkers
    "LLM", "BatchgenError", "Engine", "EngineConfig", "GateFailed", "InputError", "JobSpec", "LockedError",
    "ModelError", "OutOfMemory", "RemoteError", "Request", "Result", "ResumeMismatch", "Run", "RunStopped",
    "SamplingParams", "StorageError", "Tokenizer", "UsageError", "__version__", "generate", "load_job",
    "load_model", "plan_job", "read_report", "run_job",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

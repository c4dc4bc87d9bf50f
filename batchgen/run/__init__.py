"""One invocation: run, retry, merge or status of a run directory. Its public names are imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.run.invocation import Outcome, RunOptions
    from batchgen.run.job import run_job
    from batchgen.run.stop import Limits

__all__ = ["Limits", "Outcome", "RunOptions", "run_job"]

_HOME = {
    "Limits": "batchgen.run.stop",
    "Outcome": "batchgen.run.invocation",
    "RunOptions": "batchgen.run.invocation",
    "run_job": "batchgen.run.job",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

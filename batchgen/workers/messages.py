"""Messages between the driver and its workers, frozen and pickled: a task is a row, an answer its result.

Driver and workers trust each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.core.records import Result, Row
from batchgen.output.journal import JournalEntry

Answer = JournalEntry | Result  # the result of a row; a ``Result`` only for a row that workers could not run


@dataclass(frozen=True, slots=True)
class Assignment:
    """Message of the driver to a worker.

    ``tasks`` are to be run after earlier ones. With ``stop``, the worker ends the step under way and gives back all its
    tasks.
    """

    tasks: tuple[Row, ...] = ()
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a worker, equal for all workers of a run, so that rows do not depend on the worker.

    ``weights`` are the digests of ``ModelFiles.fingerprint``, for ``numerics`` see ``LoadedEngine``.
    """

    weights: Mapping[str, Any]
    numerics: Mapping[str, str]
    version: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is ready: its model is loaded and its kernels are compiled. ``place`` is the name of its machine."""

    identity: Identity
    max_num_seqs: int
    threads: int
    place: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """Message of a worker to the driver, at least every ``HEARTBEAT_S``.

    ``progress`` counts steps, launches of kernels and rows made into requests: a worker with rows hangs if it does not
    grow. ``finished`` are answers; ``partials`` are the tokens so far of half-done tasks by key, in place of earlier
    ones. ``stats`` are ``EngineStats.counts`` or None. With ``stopped`` unfinished tasks are given back.
    """

    finished: tuple[Answer, ...] = ()
    partials: Mapping[int, tuple[int, ...]] | None = None
    stats: Mapping[str, Any] | None = None
    stopped: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    progress: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone. ``error`` ended it, and would also have ended a run in a single process."""

    reason: str
    error: Exception | None = None


WorkerEvent = WorkerReady | WorkerUpdate | WorkerLost
HEARTBEAT_S = 0.25

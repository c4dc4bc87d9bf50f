"""Interface between an invocation and an engine, in this process or elsewhere, and the context that creates one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol


class Stats(Protocol):
    """Counts since an engine was created, which are read while it runs; see ``EngineStats``."""

    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def to_dict(self) -> dict[str, Any]: ...


class EngineLike(Protocol):
    """The methods of ``batchgen.engine.Engine`` that an invocation calls."""

    @property
    def stats(self) -> Stats: ...

    def run(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Results in order of completion, pulling requests (or rows) lazily.

        ``requests`` yields None if its next request needs a result first.
        """

    def stop(self) -> None:
        """Make ``run`` return after the step under way."""

    def unfinished(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens generated so far for each unfinished request, by key."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with its weights; ``close`` releases resources outside this process.

    ``numerics`` may not change in a run: they decide tokens. ``facts`` are sizes for the report, complete once the
    engine has run; ``prepare`` waits for the kernels, then ``notes`` are shown. An engine that ``takes_rows`` returns
    journal entries. ``num_launches`` tells a long step from one that hangs. ``workers`` describes the current
    workers: name, place, state, rows, tokens_per_s, in_flight.
    """

    engine: EngineLike
    numerics: dict[str, str]
    threads: int
    facts: Callable[[], Mapping[str, Any]] = dict
    notes: Sequence[str] = ()
    prepare: Callable[[], None] = lambda: None
    takes_rows: bool = False
    close: Callable[[], None] = lambda: None
    num_launches: Callable[[], int] = lambda: 0
    workers: Callable[[], Sequence[Mapping[str, Any]]] = tuple


@dataclass(frozen=True, slots=True)
class RunContext:
    """Facts of a run at the time when its engine is loaded, so that workers elsewhere can load the same.

    ``rendered_at`` is the time that chat templates print. ``weights`` are the digests of ``ModelFiles.fingerprint``,
    ``digests`` are ``Digests.to_plain``. ``numerics`` (see ``LoadedEngine``) produced the job's rows so far;
    ``num_rows`` are this shard's, if they were counted. ``may_mix_kernels``: rows may come from other kernels too.
    """

    rendered_at: datetime | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, Any] = field(default_factory=dict)
    numerics: Mapping[str, str] | None = None
    num_rows: int | None = None
    note: Callable[[str], object] = lambda line: None
    may_mix_kernels: bool = False


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import torch so that the garbage collector skips its hundreds of thousands of objects, now and later.

    Collecting them takes a tenth of a short run. If the calling program has imported torch, this does nothing.
    """
    is_first, was_enabled = "torch" not in sys.modules, gc.isenabled()
    if is_first:
        gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
        if was_enabled:
            gc.enable()

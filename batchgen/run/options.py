"""What a user decides about one invocation, as opposed to the job: none of it changes a row's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchgen.core.records import WHOLE, Shard
from batchgen.run.stop import Limits


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``batchgen run``.

    ``max_error_rate`` is a share of one; ``shard`` is the part of the rows to run. With ``allow_mixed_kernels`` a run
    may go on where the last bits of its sums come out otherwise. ``progress`` is a bar on a
    terminal and lines every ``heartbeat_s`` seconds elsewhere ("auto"), JSON lines ("json"), or nothing ("quiet").
    """

    overwrite: bool = False
    strict: bool = False
    max_error_rate: float | None = None
    shard: Shard = WHOLE
    allow_mixed_kernels: bool = False
    limits: Limits = field(default_factory=Limits)
    progress: Literal["auto", "json", "quiet"] = "auto"
    heartbeat_s: float = 30.0

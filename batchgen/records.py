"""The types that travel along the pipeline: Record -> Request -> Result. All frozen, none knows torch.

They are the only vocabulary the data layer and the engine share, so neither needs to import the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from batchgen.errors import RowError


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two input rows from which reading can go on.

    ``file`` counts the input's files from 0; ``offset`` is what that file's format can seek to (a byte
    offset of the uncompressed text, a row group); ``row`` counts rows inside that unit; ``index`` is the
    input-wide position of the row that starts here.
    """

    file: int
    offset: int
    row: int
    index: int


@dataclass(frozen=True, slots=True)
class Record:
    """One input row, untouched.

    ``index`` is its 0-based position in the whole input and its stable key; ``line`` is the 1-based line
    (or row) in ``source``; ``after`` is where the next row starts.
    """

    index: int
    source: str
    line: int
    columns: dict[str, Any]
    after: Cursor


@dataclass(frozen=True, slots=True)
class BadRow:
    """An input row that cannot become a request; ``raw`` is what could be read of it, for the dead-letter file."""

    index: int
    source: str
    line: int
    error: RowError
    raw: Any
    after: Cursor
    id: str | int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and meanings are vLLM's.

    ``temperature == 0`` is greedy. ``top_k == 0`` and ``top_p == 1`` and ``min_p == 0`` switch a filter off.
    ``seed`` keys the randomness together with the request's key, sample and position, so tokens never
    depend on the batch. Values are checked where they enter (``spec``, ``data``), not here.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


SAMPLING_KEYS: tuple[str, ...] = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenized row, ready for the engine.

    ``key`` is the row's index. ``output_token_ids`` are tokens an earlier, interrupted run already
    generated: the engine continues after them.
    """

    key: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds of one monotonic clock; everything here depends on the schedule.

    ``queue_s`` runs from submission to the first scheduling, ``prefill_s`` from there to the first token,
    ``decode_s`` from the first token to the last; ``ttft_s`` and ``total_s`` count from submission;
    ``tpot_s`` is decode time over (completion tokens - 1).
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What the engine made of a request: all generated token ids, the end token included, or an error."""

    key: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    error: RowError | None = None

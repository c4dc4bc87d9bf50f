"""One pass over the rows of a job: what they are, how long, which are bad, what they have in common.

Memory is bounded whatever the number of rows: lengths are counted, repeats are found by hashes (``plan_distinct``),
and of the rows themselves only samples and the longest are kept. It knows no weights and no engine.
"""

from __future__ import annotations

import heapq
import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from batchgen.core.records import BadRow, Record, Request, SamplingParams
from batchgen.input.rows import chunked
from batchgen.input.validator import Pending, Screen
from batchgen.plan.distinct import Distinct

MAX_LISTED_BAD_ROWS = 10_000
NUM_LONGEST = 10
PREFIX_BLOCK = 32  # tokens: prefixes are compared in steps of this, as a paged cache would share them
_NUM_SAMPLED = 2000
_NUM_PROMPTS = 256
T = TypeVar("T")


class Reservoir(Generic[T]):
    """A uniform sample of a stream; the whole stream, in order, while that is no larger than ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen = 0
        self._rng = random.Random(0)  # the same rows give the same plan
        self.items: list[T] = []

    def offer(self) -> int | None:
        """The place in ``items`` that the next item of the stream takes, None if it is passed over."""
        self._seen += 1
        if self._seen <= self._size:
            return self._seen - 1
        place = int(self._rng.random() * self._seen)
        return place if place < self._size else None

    def put(self, place: int, item: T) -> None:
        """Take an item in at a place that ``offer`` gave."""
        self.items[place : place + 1] = [item]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one row: its prompt, the most it may generate, and whether it will generate just that many.

    A row that only scores choices has them in its prompt and generates nothing.
    """

    prompt: int
    max_output: int
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A real row for a calibration to run; ``params.max_tokens`` is what its context leaves room for."""

    token_ids: array[int]
    params: SamplingParams


@dataclass(order=True, frozen=True, slots=True)
class LongRow:
    """One of the longest rows; a later row of equal length counts as shorter."""

    tokens: int
    minus_index: int
    id: str | int = field(compare=False)
    source: str = field(compare=False)
    line: int = field(compare=False)


class Survey:
    """What has been seen so far; ``take`` everything, then read the fields.

    ``prompt_lengths`` counts rows by prompt tokens, ``outputs`` by (most output tokens, whether fixed);
    ``common_prefix`` holds the tokens all prompts begin with; ``read_s`` is how long reading and tokenizing took.
    """

    def __init__(self, screen: Screen, max_model_len: int) -> None:
        self._screen = screen
        self._max_model_len = max_model_len
        self.errors: Counter[str] = Counter()
        self.bad_rows: list[BadRow] = []
        self.prompt_lengths: Counter[int] = Counter()
        self.outputs: Counter[tuple[int, bool]] = Counter()
        self.prompts = Distinct()
        self.blocks = Distinct()
        self.common_prefix: tuple[int, ...] | None = None
        self.sample: Reservoir[Lengths] = Reservoir(_NUM_SAMPLED)
        self.sampled_prompts: Reservoir[SampledPrompt] = Reservoir(_NUM_PROMPTS)
        self.read_s = 0.0
        self._longest: list[LongRow] = []
        self._is_greedy = True

    @property
    def num_good(self) -> int:
        """Rows that can run."""
        return self.prompt_lengths.total()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(length * count for length, count in self.prompt_lengths.items())

    @property
    def computed_rows(self) -> int:
        """Rows the engine has to compute: where all are greedy, those of one prompt are computed once."""
        return self.num_good - self._spared[0]

    @property
    def shared_tokens_per_row(self) -> int:
        """Tokens, on the mean of ``computed_rows``, with which an earlier prompt began too, in whole blocks."""
        shared = self.blocks.repeated()[0] * PREFIX_BLOCK - self._spared[1]
        return max(0, shared) // max(self.computed_rows, 1)

    @property
    def _spared(self) -> tuple[int, int]:
        """Rows that need not be computed, and the tokens of their prompts."""
        return self.prompts.repeated() if self._is_greedy else (0, 0)

    @property
    def longest(self) -> list[LongRow]:
        """The longest prompts, longest first."""
        return sorted(self._longest, reverse=True)

    def take(self, rows: Iterable[Record | BadRow]) -> None:
        """Read, check and tokenize ``rows``."""
        start = time.monotonic()
        for chunk in chunked(rows):
            for answer in self._screen.screen(chunk):
                if isinstance(answer, BadRow):
                    self._add_bad(answer)
                else:
                    self._add(*answer)
        self.read_s += time.monotonic() - start

    def _add_bad(self, row: BadRow) -> None:
        self.errors[str(row.error.code)] += 1
        if len(self.bad_rows) < MAX_LISTED_BAD_ROWS:
            self.bad_rows.append(row)

    def _add(self, pending: Pending, request: Request) -> None:
        token_ids, params = request.prompt_token_ids, request.params
        length = len(token_ids)
        is_scored = bool(request.choices)
        is_fixed = params.has_fixed_length or is_scored
        max_output = 0 if is_scored else min(params.max_tokens, self._max_model_len - length)
        self.prompt_lengths[length] += 1
        self.outputs[max_output, is_fixed] += 1 if params.is_greedy else params.n
        self._is_greedy &= params.is_greedy
        self._compare(token_ids)
        if (place := self.sample.offer()) is not None:
            self.sample.put(place, Lengths(length + sum(map(len, request.choices)), max_output, is_fixed))
        if not is_scored and (place := self.sampled_prompts.offer()) is not None:
            params = replace(params, max_tokens=max_output)
            self.sampled_prompts.put(place, SampledPrompt(array("i", token_ids), params))
        if len(self._longest) < NUM_LONGEST or length > self._longest[0].tokens:
            self._note_long(pending, length)

    def _note_long(self, pending: Pending, length: int) -> None:
        record = pending.record
        row_id = record.index if pending.id is None else pending.id
        heapq.heappush(self._longest, LongRow(length, -record.index, row_id, record.source, record.line))
        if len(self._longest) > NUM_LONGEST:
            heapq.heappop(self._longest)

    def _compare(self, token_ids: tuple[int, ...]) -> None:
        """Count what the prompt shares with those before it: all of it, leading blocks, the beginning of all."""
        self.prompts.add(hash(token_ids), len(token_ids))
        known = 0
        for end in range(PREFIX_BLOCK, len(token_ids) + 1, PREFIX_BLOCK):
            known = hash((known, token_ids[end - PREFIX_BLOCK : end]))
            self.blocks.add(known)
        prefix = token_ids if self.common_prefix is None else self.common_prefix
        if token_ids[: len(prefix)] != prefix:
            pairs = zip(prefix, token_ids, strict=False)
            prefix = prefix[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prefix), len(token_ids)))]
        self.common_prefix = prefix

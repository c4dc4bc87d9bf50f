"""Survey of a job's rows: counts, lengths and bad rows, in one pass over the input, without weights or engine.

Memory is bounded: lengths are counted, and only a random sample of the rows is kept.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from batchgen.core.chat_rows import ChatRow
from batchgen.core.records import Request, Row
from batchgen.input.ids import RowValidator
from batchgen.input.rows import prepared

MAX_LISTED_BAD_ROWS = 10_000
_NUM_SAMPLED = 64  # rows that a calibration runs


class Reservoir:
    """Uniform random sample of a stream; all of the stream, in order, while it has at most ``size`` items."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        self._rng = random.Random(0)  # the same rows give the same plan
        self.items: list[Any] = []

    def add(self, item: Any) -> None:
        self._num_seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := int(self._rng.random() * self._num_seen)) < self._size:
            self.items[place] = item


class Survey:
    """Everything counted so far: ``take`` the rows, then read the attributes.

    ``prompt_lengths`` counts rows by prompt tokens, ``outputs`` by (most output tokens, whether fixed);
    ``label_tokens`` counts tokens of labels to be scored; ``read_s`` is the time of reading and tokenizing. Reused rows
    only count in ``num_reused``. A chat generated turn by turn has the tokens of its last prompt, with answers of one
    letter, and an output per turn.
    """

    def __init__(
        self, validator: RowValidator, max_model_len: int, is_reused: Callable[[Row], bool] = lambda row: False
    ) -> None:
        self._validator = validator
        self._is_reused = is_reused
        self.num_reused = 0
        self._max_model_len = max_model_len
        self.errors: Counter[str] = Counter()
        self.bad_rows: list[Row] = []
        self.prompt_lengths: Counter[int] = Counter()
        self.outputs: Counter[tuple[int, bool]] = Counter()
        self.turns: Counter[int] = Counter()
        self.label_tokens = 0
        self.logprob_bytes = self.max_logprob_bytes = 0  # in all records, and in the largest
        self.sampled = Reservoir(_NUM_SAMPLED)
        self.read_s = 0.0
        self.empty_fields: Counter[str] = Counter()  # of the prompt's template: rows that can run without them

    @property
    def num_good(self) -> int:
        """Rows that can run and are not reused."""
        return self.prompt_lengths.total()

    @property
    def prompt_tokens(self) -> int:
        return sum(length * count for length, count in self.prompt_lengths.items())

    def take(self, rows: Iterable[Row]) -> None:
        """Read, validate and tokenize ``rows``."""
        start = time.monotonic()
        for row, request in prepared(rows, self._validator.validate):
            if row.error is not None:
                self.errors[str(row.error.code)] += 1
                if len(self.bad_rows) < MAX_LISTED_BAD_ROWS:
                    self.bad_rows.append(row)
            elif self._is_reused(row):
                self.num_reused += 1
            elif request is not None:
                self._add(row, request)
        self.read_s += time.monotonic() - start

    def _add(self, row: Row, request: Request) -> None:
        length, params = len(request.prompt_token_ids), request.params
        num_outputs = 1 if params.is_greedy else params.n
        if isinstance(row, ChatRow):
            length, num_outputs = row.num_tokens, row.num_turns
            self.turns[num_outputs] += 1
        is_scored = bool(request.labels)
        is_fixed = params.has_fixed_length or is_scored
        max_output = 0 if is_scored else min(params.max_tokens, max(self._max_model_len - length, 0))
        if template := self._validator.builder.finder.template:
            self.empty_fields.update(template.empty_fields(row.columns))
        self.prompt_lengths[length] += 1
        self.outputs[max_output, is_fixed] += num_outputs
        self.label_tokens += sum(map(len, request.labels))
        if params.has_logprobs:
            size = self._validator.builder.logprob_bytes(params, length)
            self.logprob_bytes += size
            self.max_logprob_bytes = max(self.max_logprob_bytes, size)
        self.sampled.add(request)

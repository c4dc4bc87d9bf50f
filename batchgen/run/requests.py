"""Stream of requests: reads input rows in chunks, records those that cannot run, and yields the others lazily.

Where workers make rows into requests, it yields the rows instead, with their ids claimed.

The engine pulls requests as it needs them, so an input of any size takes little memory. The stream knows nothing
else about the engine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from batchgen.core.records import Request, Row
from batchgen.input.rows import CHUNK_ROWS, chunked
from batchgen.input.validator import RowValidator
from batchgen.run.results import Charge, ResultSink
from batchgen.run.stop import Stopper

_CLAIMED_ROWS = 4096  # at once where workers take rows: an fsync of their ids each, which may take 200 ms
_SLOW_CHUNK_S = 2.0  # a chat template may take seconds per row, and a stop loses the chunk that it interrupts


class RequestStream:
    """The requests of one invocation.

    ``pending`` holds the rows that are with the engine, by index. ``is_exhausted`` says that the input has no more
    rows. Once ``gives_rows`` is set, ``tasks`` yields rows. Reading, checking and tokenizing are charged to "read".
    """

    def __init__(self, sink: ResultSink, validator: RowValidator, stopper: Stopper, charge: Charge) -> None:
        self._sink = sink
        self._validator = validator
        self._stopper = stopper
        self._charge = charge
        self.pending: dict[int, Row] = {}
        self.is_exhausted = False
        self.gives_rows = False

    def tasks(self, rows: Iterable[Row]) -> Iterator[Request | Row]:
        """The requests of ``rows`` in order, with the tokens of earlier invocations; ends early on a stop."""
        max_rows = 1
        chunks = chunked(rows, lambda: max_rows)
        while not self._stopper.requested:
            began_at = time.monotonic()
            with self._charge("read"):
                chunk = next(chunks, [])
                claimed = ((row, None) for row in self._validator.claim(chunk))
                answers = claimed if self.gives_rows else self._validator.validate(chunk)
                answer = next(answers, None)
            limit = _CLAIMED_ROWS if self.gives_rows else CHUNK_ROWS
            max_rows = min(2 * max_rows, limit) if time.monotonic() - began_at < _SLOW_CHUNK_S else 1
            if not chunk:
                self.is_exhausted = True
                return
            if answer is not None:  # without rows left the run is over, whatever its error rate
                self._sink.check_error_rate(self._stopper)
            num_read = self._sink.journal.done.num_below(chunk[-1].index + 1)
            self._sink.num_read = max(self._sink.num_read, num_read)
            while answer is not None and not self._stopper.requested:
                row, request = answer
                if row.error is not None:
                    self._sink.fail(row)
                else:
                    yield self._hand_out(row, request or row)
                with self._charge("read"):
                    answer = next(answers, None)

    def _hand_out(self, row: Row, task: Request | Row) -> Request | Row:
        self.pending[row.key] = row
        tokens = self._sink.journal.partials.get(task.key, ())
        return dataclasses.replace(task, output_token_ids=tokens) if tokens else task

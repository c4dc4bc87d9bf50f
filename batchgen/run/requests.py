"""From input rows to requests: read in chunks, settle what can never run, hand out the rest as the engine asks.

Error rows go straight to the journal; for every request handed out it remembers the row until the result comes. It
knows nothing of the engine but that somebody pulls, and stops handing out as soon as it is told to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

from batchgen.core.records import BadRow, Record, Request
from batchgen.input.rows import CHUNK_ROWS, chunked
from batchgen.input.validator import Pending, RowValidator
from batchgen.run.clock import Clock
from batchgen.run.results import Ledger
from batchgen.run.stop import Stopper

_SLOW_CHUNK_S = 2.0  # chat templates may take seconds for each row, and a stop loses the chunk it interrupts


class Feed:
    """The requests of a run, lazily.

    ``pending`` holds the rows whose requests are with the engine, by index; ``is_exhausted`` says that there are no
    more rows. Reading, checking and tokenizing is charged to the clock's "read".
    """

    def __init__(self, ledger: Ledger, validator: RowValidator, stopper: Stopper, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._validator = validator
        self._stopper = stopper
        self.pending: dict[int, Pending] = {}
        self.is_exhausted = False

    def requests(self, rows: Iterable[Record | BadRow]) -> Iterator[Request]:
        """The requests of ``rows`` in order, tokens of an earlier run included; ends early on a stop."""
        most = 1
        chunks = chunked(rows, lambda: most)
        while not self._stopper.requested:
            began_at = time.monotonic()
            with self._clock.on("read"):
                chunk = next(chunks, [])
                answers = self._validator.validate(chunk)
            most = min(2 * most, CHUNK_ROWS) if time.monotonic() - began_at < _SLOW_CHUNK_S else 1
            if not chunk:
                self.is_exhausted = True
                return
            if answers:  # with no row left the run is over, whatever its error rate
                self._ledger.check_error_rate(self._stopper)
            num_read = len(self._validator.shard.rows(chunk[-1].index + 1))
            self._ledger.num_read = max(self._ledger.num_read, num_read)
            for answer in answers:
                if self._stopper.requested:
                    return
                if isinstance(answer, BadRow):
                    self._ledger.fail(answer)
                else:
                    yield self._hand_out(*answer)

    def _hand_out(self, pending: Pending, request: Request) -> Request:
        self.pending[request.key] = pending
        tokens = self._ledger.journal.partials.get(request.key, ())
        return dataclasses.replace(request, output_token_ids=tokens) if tokens else request

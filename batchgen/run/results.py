"""What has become of the rows: every finished one goes through here into the journal and into the counts.

The counts are what progress, limits and the final word look at. It decides when too many rows have failed, and
nothing else about the run.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from batchgen.core.errors import RowError, RowErrorCode, StorageError, TokenizerError
from batchgen.core.records import BadRow, Record, Result
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.payloads import Payloads, RowId
from batchgen.run.clock import Clock
from batchgen.run.stop import Stopper

MIN_ROWS_FOR_RATE = 100  # an error rate means nothing over fewer rows, so it is taken as if there were that many


class Ledger:
    """The finished rows of a run; ``num_done`` and ``num_failed`` include those of earlier invocations.

    Token counts are those of rows finished by this invocation.
    """

    def __init__(self, journal: Journal, payloads: Payloads, max_error_rate: float | None, clock: Clock) -> None:
        self.journal = journal
        self._clock = clock
        self._is_open = True
        self._lock = threading.Lock()  # of the journal, while ``tick`` may come from another thread
        self._payloads = payloads
        self._max_error_rate = max_error_rate
        self.num_done_before = self.num_done  # by earlier invocations
        self.num_read = journal.done.num_passed  # rows read of the input so far, by this or earlier invocations
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0

    def finish(self, record: Record, row_id: RowId, result: Result, choices: tuple[str, ...] = ()) -> None:
        """Enter what the engine made of a row, be it a result or an error; ``choices`` are the texts it scored.

        Raises StorageError.
        """
        error = result.error
        if error is None:
            try:
                payload = self._payloads.result(record, row_id, result, choices)
            except TokenizerError as problem:
                error = RowError(RowErrorCode.INTERNAL, str(problem))
        if error is not None:
            where = (record.index, record.source, record.line)
            self.fail(BadRow(*where, error, record.columns, record.after, row_id))
            return
        self._append(JournalEntry(record.index, record.after, "result", payload))
        self.num_prompt_tokens += result.num_prompt_tokens
        self.num_completion_tokens += result.num_completion_tokens

    def fail(self, row: BadRow) -> None:
        """Enter a row that cannot run. Raises StorageError."""
        self._append(JournalEntry(row.index, row.after, "error", self._payloads.error(row)))

    def tick(self) -> None:
        """Let the journal write what waits in it, from another thread: rows may be long in coming.

        A disk that refuses is not reported here: the journal takes nothing more, and the next row says why.
        """
        with self._lock, suppress(StorageError):
            if self._is_open:
                self.journal.tick()

    def close(self) -> None:
        """End of the rows: from here on the journal belongs to the caller alone."""
        with self._lock:
            self._is_open = False

    @property
    def num_done(self) -> int:
        """Rows that ended in a result."""
        return self.journal.counts.results

    @property
    def num_failed(self) -> int:
        """Rows that ended in an error."""
        return self.journal.counts.errors

    @property
    def has_too_many_errors(self) -> bool:
        """Whether more rows failed than the user allows, of the rows read or of a hundred if they are fewer."""
        limit = self._max_error_rate
        return limit is not None and self.num_failed > limit * max(self.num_read, MIN_ROWS_FOR_RATE)

    def check_error_rate(self, stopper: Stopper) -> None:
        """Ask to stop if more rows failed than the user allows."""
        if self.has_too_many_errors and self._max_error_rate is not None:
            few = f" of at least {MIN_ROWS_FOR_RATE}" if self.num_read < MIN_ROWS_FOR_RATE else ""
            stopper.give_up(
                f"{self.num_failed:,} of {self.num_read:,} rows read have failed, "
                f"more than --max-error-rate {100 * self._max_error_rate:g}%{few}",
                "give a higher --max-error-rate to go on",
            )

    def _append(self, entry: JournalEntry) -> None:
        with self._clock.on("write"), self._lock:
            self.journal.append(entry)

"""Results on their way from the engine: the turns of chats, and the sink that writes every finished row to the journal.

An engine only knows requests; the sink counts rows and tokens, and limits the error rate.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from batchgen.core.chat_rows import ChatRow
from batchgen.core.errors import BatchgenError, RowError, RowErrorCode, StorageError, TokenizerError
from batchgen.core.json_line import encode_json
from batchgen.core.records import Request, Result, Row
from batchgen.core.units import one_line
from batchgen.input.requests import RequestBuilder
from batchgen.input.template import Template
from batchgen.input.turns import TurnBuilder
from batchgen.output.journal import Journal, JournalEntry
from batchgen.output.record_builder import RecordBuilder
from batchgen.run.stop import Stopper

MIN_ROWS_FOR_RATE = 100  # fewer rows count as this many, since a rate over a few rows means nothing
Charge = Callable[[str], AbstractContextManager[None]]  # charges the time inside to an account (``Clock.on``)
_Task = TypeVar("_Task")  # a request, or a row that workers make into one


def entry_of(row: Row, result: Result, record_builder: RecordBuilder) -> JournalEntry:
    """The journal entry for the engine's result of a row, which may be an error.

    If processing the model's text raises an error, only this row fails, since each resume would raise it again.
    Errors of memory, of the disk and of starting processes are not the row's fault, and are raised.
    """
    error = result.error
    if error is None:
        try:
            payload = record_builder.result(row, result)
            counts = result.num_prompt_tokens, result.num_generated_tokens, result.num_computed_tokens
            return JournalEntry(row.index, row.after, "result", encode_json(payload), *counts)
        except TokenizerError as problem:
            error = RowError(RowErrorCode.INTERNAL, str(problem))
        except (MemoryError, OSError, BatchgenError):
            raise
        except Exception as problem:
            what = f"the answer cannot be made a record ({type(problem).__name__}: {one_line(problem)})"
            error = RowError(RowErrorCode.INTERNAL, f"{what}; this is a bug, please report it")
    return failed_entry(row.failed(error), record_builder)


def failed_entry(row: Row, record_builder: RecordBuilder) -> JournalEntry:
    """The journal entry for a row with an error."""
    return JournalEntry(row.index, row.after, "error", encode_json(record_builder.error(row)))


class ResultSink:
    """The finished rows of a run; ``num_done`` and ``num_failed`` include rows of earlier invocations.

    Token counts cover the rows that this invocation finished. Writing is charged to "write".
    """

    def __init__(
        self,
        journal: Journal,
        record_builder: RecordBuilder,
        max_error_rate: float | None,
        charge: Charge,
        template: Template | None = None,
    ) -> None:
        self.journal = journal
        self._charge = charge
        self._template = template
        self._is_open = True
        self._lock = threading.Lock()  # guards the journal: ``tick`` is called from the progress thread
        self.record_builder = record_builder
        self._max_error_rate = max_error_rate
        self.num_done_before = self.num_done  # by earlier invocations and jobs
        self.num_read = journal.done.num_passed  # input rows read so far, by this and earlier invocations
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_computed_tokens = 0
        self.cut_at: int | None = None  # see ``RequestBuilder``
        self.num_cut = 0  # rows that this invocation finished with a prompt of ``cut_at`` tokens
        self.empty_fields: Counter[str] = Counter()  # by template field: finished rows without a text

    @property
    def num_done(self) -> int:
        return self.journal.counts.results

    @property
    def num_failed(self) -> int:
        return self.journal.counts.errors

    def finish(self, row: Row, answer: Result | JournalEntry) -> None:
        """Record the result of a row, which may be an error. Raises StorageError."""
        entry = answer if isinstance(answer, JournalEntry) else entry_of(row, answer, self.record_builder)
        self._append(entry)
        if self._template is not None and entry.kind == "result":
            self.empty_fields.update(self._template.empty_fields(row.columns))

    def save_turns(self, row: ChatRow) -> None:
        """Save the finished turns of a row that has more turns. Raises StorageError."""
        if not row.output_token_ids:  # else the journal has them
            with self._charge("write"), self._lock:
                self.journal.add_partial(row.index, row.generated_token_ids)

    def keep(self, row: Row, record: Mapping[str, Any]) -> None:
        """Record the result of an earlier job. Raises StorageError."""
        self.finish(row, JournalEntry(row.index, row.after, "result", encode_json(record)))
        self.num_done_before += 1

    def fail(self, row: Row) -> None:
        """Record a row that cannot run. Raises StorageError."""
        self._append(failed_entry(row, self.record_builder))

    def _append(self, entry: JournalEntry) -> None:
        with self._charge("write"), self._lock:
            self.journal.append(entry)
        self.num_prompt_tokens += entry.num_prompt_tokens
        self.num_cut += entry.num_prompt_tokens == self.cut_at
        self.num_generated_tokens += entry.num_generated_tokens
        self.num_computed_tokens += entry.num_computed_tokens

    def tick(self) -> None:
        """Let the journal sync if it is time to, since the next row may take long; safe in any thread.

        A storage error is not raised here: the journal raises it for the next row.
        """
        with self._lock, suppress(StorageError):
            if self._is_open:
                self.journal.tick()

    def close(self) -> None:
        """From now on ``tick`` does nothing: the journal is about to be closed."""
        with self._lock:
            self._is_open = False

    def check_error_rate(self, stopper: Stopper) -> None:
        """Ask to stop if a larger share of the rows read has failed than ``max_error_rate`` allows."""
        limit = self._max_error_rate
        if limit is not None and self.num_failed > limit * max(self.num_read, MIN_ROWS_FOR_RATE):
            few = f" of the first {MIN_ROWS_FOR_RATE}" if self.num_read < MIN_ROWS_FOR_RATE else ""
            stopper.give_up(
                f"{self.num_failed:,} of {self.num_read:,} rows read have failed, "
                f"more than --max-error-rate {100 * limit:g}%{few}",
                "give a higher --max-error-rate to continue",
            )


class Turns:
    """Gives an engine the requests of rows, and takes its results; rows with one request pass through.

    ``builder`` makes the requests; None if workers do. ``pending`` holds the rows that are with the engine, by key.
    ``on_turn`` gets each row whose next turn begins.
    """

    def __init__(
        self,
        builder: RequestBuilder | None,
        pending: dict[int, Row],
        on_turn: Callable[[ChatRow], object] = lambda row: None,
    ) -> None:
        self._builder, self._pending, self._on_turn = builder, pending, on_turn
        self._next: deque[Request] = deque()

    def requests(self, first: Iterable[_Task]) -> Iterator[_Task | Request | None]:
        """Requests of rows in ``pending``: next turns first, then the first turns of further rows in order.

        None says that all rows are with the engine and that more turns may follow.
        """
        if not isinstance(self._builder, TurnBuilder):
            yield from first
            return
        source = iter(first)
        while True:
            request = self._next.popleft() if self._next else next(source, None)
            if request is None and not self._pending:
                return
            yield request

    def take(self, result: Result | JournalEntry) -> tuple[Row, Result | JournalEntry] | None:
        """The row that an engine's result ends, and the result of all its turns; None if another turn follows.

        Workers give a ``JournalEntry`` for all turns, which is returned as it is.
        """
        row = self._pending.pop(result.key)
        if not isinstance(self._builder, TurnBuilder) or isinstance(result, JournalEntry):
            return row, result
        row, whole = self._builder.after(row, result)
        if whole is not None:
            return row, whole
        [(row, request)] = self._builder.build([row])
        if request is None:
            return row, replace(result, error=row.error)
        self._pending[row.key] = row
        self._next.append(request)
        self._on_turn(row)
        return None

    def unfinished(self, tokens: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """``tokens`` of unfinished requests, by key, preceded by the tokens of earlier turns."""
        rows = {key: row for key, row in self._pending.items() if isinstance(row, ChatRow) and row.turns}
        return {**tokens, **{key: row.token_ids_with(tokens.get(key)) for key, row in rows.items()}}

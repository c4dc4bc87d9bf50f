"""Turns of chats on their way through an engine, which only knows requests: a result leads to the next turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from batchgen.core.chat_rows import ChatRow
from batchgen.core.records import Request, Result, Row
from batchgen.input.requests import RequestBuilder
from batchgen.input.turns import TurnBuilder

_Task = TypeVar("_Task")  # a request, or a row that workers make into one


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

    def take(self, result: Result) -> tuple[Row, Result] | None:
        """The row that ends with a result of the engine, with the result of all its turns; None if a turn follows."""
        row = self._pending.pop(result.key)
        if not isinstance(self._builder, TurnBuilder):
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

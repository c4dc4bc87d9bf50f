"""Rows as tasks: a worker's part of the work on a row beside its engine's.

The driver reads a row, claims its id and journals what comes back; template, tokenizer, output record and its JSON are
made here, where there are as many cores as workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchgen.core.json_line import encode_json
from batchgen.core.records import BadRow, Request, Result
from batchgen.input.requests import RequestBuilder
from batchgen.input.validator import Pending, build_requests
from batchgen.output.payloads import Payloads
from batchgen.run.results import Finished


class RowMaker:
    """A ``TaskMaker`` for rows; rows are built by one thread and finished by another."""

    def __init__(self, builder: RequestBuilder, payloads: Payloads) -> None:
        self._builder = builder
        self._payloads = payloads
        self._rows: dict[int, Pending] = {}  # whose requests are with the engine

    def build(self, tasks: Sequence[Pending]) -> Iterator[Request | Finished]:
        """The request of each row, or the row as failed."""
        for answer in build_requests(self._builder, tasks):
            if isinstance(answer, BadRow):
                yield _encoded(Finished.failed(answer, self._payloads))
            else:
                row, request = answer
                self._rows[request.key] = row
                yield request

    def finish(self, result: Result) -> Finished:
        """The row of a result, ready for the journal."""
        return _encoded(Finished.of(self._rows.pop(result.key), result, self._payloads))


def _encoded(done: Finished) -> Finished:
    entry = done.entry
    if isinstance(entry.payload, bytes):
        return done
    return replace(done, entry=replace(entry, payload=encode_json(entry.payload)))

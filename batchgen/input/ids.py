"""The unique ids of a run, exact and in constant memory; the validator makes requests of the rows that claim them.

A temporary SQLite table maps each id, or a digest of a long one, to its row; a resume claims them again in order.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile

from batchgen.config.job import InputSpec
from batchgen.core.errors import RowError, RowErrorCode, StorageError
from batchgen.core.records import Request, Row
from batchgen.core.units import WHOLE, Shard
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import chunked, with_id

_CACHE_KIB = 32 << 10
_MAX_KEY_BYTES = 64
_CLAIMED_AT_ONCE = 4096  # in one transaction
Claim = tuple[int, str | int]


def may_have_ids(spec: InputSpec) -> bool:
    """Whether rows can have ids other than their index: in a column that the job names, or as OpenAI Batch lines."""
    return spec.id is not None or spec.format == "openai-batch" or (spec.format == "auto" and not spec.is_mapped)


class UniqueIds:
    """The ids claimed so far, in a temporary table; close it.

    ``1`` and ``"1"`` are different ids, except ``as_text``, for outputs whose ids are all texts. Raises StorageError
    if the disk has no room for the table.
    """

    def __init__(self, *, as_text: bool = False) -> None:
        self.as_text = as_text
        with _storage():
            self._db = sqlite3.connect("", isolation_level=None)
            self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._db.execute("PRAGMA journal_mode = OFF")
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID")

    def claim(self, rows: Iterable[Claim]) -> dict[int, int]:
        """Claim ids for rows ``(index, id)``, in this order; repeating a claim is harmless.

        Returns the duplicates: index -> index of the row that had the id first.
        """
        duplicates = {}
        keys = ((self._key(row_id), index) for index, row_id in rows)
        while keyed := list(islice(keys, _CLAIMED_AT_ONCE)):
            with _storage():
                self._db.execute("BEGIN")
                num_new = self._db.executemany("INSERT OR IGNORE INTO ids VALUES (?, ?)", keyed).rowcount
                for key, index in keyed if num_new < len(keyed) else ():
                    (owner,) = self._db.execute("SELECT row FROM ids WHERE id = ?", (key,)).fetchone()
                    if owner != index:
                        duplicates[index] = owner
                self._db.execute("COMMIT")
        return duplicates

    def close(self) -> None:
        self._db.close()

    def _key(self, row_id: str | int) -> bytes:
        """The id as JSON, or a digest of a long one. Keys that sort like ids keep neighbours on one page."""
        text = json.dumps(str(row_id) if self.as_text else row_id).encode()
        return text if len(text) <= _MAX_KEY_BYTES else b"#" + blake2b(text, digest_size=32).digest()


@contextmanager
def _storage() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(f"cannot record ids in a temporary file: {error}; fix that, then run again") from error


@dataclass(frozen=True, slots=True)
class RowValidator:
    """Makes requests of rows that have claimed their ids; rows of other shards only claim ids."""

    spec: InputSpec
    builder: RequestBuilder
    ids: UniqueIds
    shard: Shard = WHOLE

    def build(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Request | None]]:
        """One answer per row of the shard, in order; see ``RequestBuilder.build``.

        The first answer takes longest: before it, all rows claim their ids and are tokenized.
        """
        yield from self.builder.build(self.claim(rows))

    def claim(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of the shard with their ids, see ``claim_ids``; nothing is tokenized."""
        own = self.shard.rows()
        return [row for row in self.claim_ids(rows) if row.index in own]

    def claim_ids(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their ids; a row whose id is missing, invalid or taken by an earlier row gets an error."""
        named = [with_id(row, self.spec) for row in rows]
        ids = [(row.index, self._id_of(row)) for row in named if row.error is None]
        claims = [(index, row_id) for index, row_id in ids if row_id is not None]
        duplicates = self.ids.claim(claims) if claims else {}
        return [self._duplicate(row, duplicates[row.index]) if row.index in duplicates else row for row in named]

    def _duplicate(self, row: Row, first: int) -> Row:
        message = f"row {first} already has the id {self._id_of(row)!r}"
        return row.failed(RowError(RowErrorCode.DUPLICATE_ID, message))

    def _id_of(self, row: Row) -> str | int | None:
        """The row's id. A row without one has None, or its index as text if another row's id may be that text.

        A ``custom_id`` is never a number, so an index can only equal it as text.
        """
        is_mixed = self.ids.as_text and self.spec.format == "auto" and not self.spec.is_mapped
        return str(row.index) if row.id is None and is_mixed else row.id


def rebuild_ids(rows: Iterable[Row], last: int, validator: RowValidator) -> None:
    """Before a resume: claim the ids of all input rows up to ``last``, the last finished row.

    The journal has ids too, but not which row claimed an id first: that may be an unfinished row.
    """
    for chunk in chunked(takewhile(lambda row: row.index <= last, rows)):
        validator.claim_ids(chunk)

"""The unique ids of a run: which row had an id first, exact, in constant memory.

A temporary SQLite table maps each id, or a digest of a long one, to the row that claimed it. A resume has the rows that
were read so far claim theirs again, in input order, before others do (``validator.rebuild_ids``). It knows no columns.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice

from batchgen.config.job import InputSpec
from batchgen.core.errors import StorageError

_CACHE_KIB = 32 << 10
_MAX_KEY_BYTES = 64
_CLAIMED_AT_ONCE = 4096  # in one transaction
Claim = tuple[int, str | int]


def may_have_ids(spec: InputSpec) -> bool:
    """Whether rows can have ids of their own: by a column the job names, or as OpenAI Batch lines."""
    return spec.id is not None or spec.format == "openai-batch" or (spec.format == "auto" and not spec.is_mapped)


class UniqueIds:
    """The ids claimed so far, in a temporary table; close it.

    ``1`` and ``"1"`` are different ids, unless ids are compared ``as_text``, as an output that has only texts needs.
    Raises StorageError where there is no room for the table.
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
        """Claim ids for rows ``(index, id)``, the first one first; repeating a claim is harmless.

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
        """The id as JSON, or a digest of it where it is long. Keys that sort like ids keep neighbours on one page."""
        text = json.dumps(str(row_id) if self.as_text else row_id).encode()
        return text if len(text) <= _MAX_KEY_BYTES else b"#" + blake2b(text, digest_size=32).digest()


@contextmanager
def _storage() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(f"cannot record ids in a temporary file: {error}; fix that, then run again") from error

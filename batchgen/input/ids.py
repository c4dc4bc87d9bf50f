"""The unique ids of a run: which row had an id first, exact, across interruptions, in constant memory.

A SQLite file beside the journal maps each id, or a digest of a long one, to the row that claimed it. A claim is on
disk before the row can reach the journal, so a row in the journal never loses its id. If the file gets lost all the
same, its ids are claimed again in input order before others are (``validator.rebuild_ids``). It knows no columns.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from batchgen.config.job import InputSpec
from batchgen.core.errors import StorageError

_CACHE_KIB = 32 << 10
_MAX_KEY_BYTES = 64
_CLAIMED_AT_ONCE = 4096  # in one transaction
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY_CODE = 0xFF  # the bits of an extended code that say what kind of error it is
Claim = tuple[int, str | int]


def may_have_ids(spec: InputSpec) -> bool:
    """Whether rows can have ids of their own: by a column the job names, or as OpenAI Batch lines."""
    return spec.id is not None or spec.format == "openai-batch" or (spec.format == "auto" and not spec.is_mapped)


class UniqueIds:
    """The ids claimed so far, in the file ``path``, or in a temporary one if it is None.

    ``1`` and ``"1"`` are different ids, unless ids are compared ``as_text``, as an output that has only texts needs.
    A damaged file is removed: if it is found on opening, a new one takes its place at once. Raises StorageError where
    the file cannot be written, or turns out to be damaged later.
    """

    def __init__(self, path: Path | None, *, as_text: bool = False) -> None:
        self._path = path
        self.as_text = as_text
        self._complete = 2 if as_text else 1  # the version of a file that holds the ids of all rows read so far
        try:
            self._open()
        except StorageError:
            if path is None or path.exists():
                raise
            self._open()  # it was damaged, and is removed by now

    def _open(self) -> None:
        with self._storage():
            self._db = sqlite3.connect(self._path or "", isolation_level=None)
            self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no shared memory: works on any file system
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS ids (id BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID")
            if not self.is_complete:  # claims of a file that was never complete, or compared ids in another way
                self._db.execute("PRAGMA user_version = 0")
                self._db.execute("DELETE FROM ids")

    @property
    def is_complete(self) -> bool:
        """Whether all rows read so far have claimed their ids: false for a new file until ``mark_complete``."""
        with self._storage():
            return bool(self._db.execute("PRAGMA user_version").fetchone()[0] == self._complete)

    def mark_complete(self) -> None:
        """Record that all rows read so far have claimed their ids; it outlives an interruption."""
        with self._storage():
            self._db.execute(f"PRAGMA user_version = {self._complete}")

    def claim(self, rows: Iterable[Claim]) -> dict[int, int]:
        """Claim ids for rows ``(index, id)``, the first one first; repeating a claim is harmless.

        Returns the duplicates: index -> index of the row that had the id first.
        """
        duplicates = {}
        keys = ((self._key(row_id), index) for index, row_id in rows)
        while keyed := list(islice(keys, _CLAIMED_AT_ONCE)):
            with self._storage():
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
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            place, advice = self._path or "a temporary file", "fix that, then run again"
            if self._path is not None and getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE in _DAMAGED:
                self._db.close()
                for path in self._path.parent.glob(f"{self._path.name}*"):
                    with suppress(OSError):
                        path.unlink()
                advice = "the damaged file was removed: run again to rebuild it"
            raise StorageError(f"cannot record ids in {place}: {error}; {advice}") from error

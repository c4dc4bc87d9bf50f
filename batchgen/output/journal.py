"""The journal: append-only record of finished rows, written during a run, read on resume and for the final files.

It never writes to older segments except to cut a torn tail. Payloads are opaque to this module.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchgen.core.errors import StorageError
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor
from batchgen.core.storage import RUN_AGAIN, make_folder, storage_error, storage_errors, sync_file, sync_folder
from batchgen.core.units import WHOLE, Shard
from batchgen.output.segments import (
    ERROR,
    PARTIAL,
    RESULT,
    Damage,
    Line,
    RowIndex,
    SegmentReader,
    encode_line,
    next_segment,
    scan,
    segments,
)

SEGMENT_BYTES = 8 << 20  # a growing file is copied from its start each time, as by jobs/sync_to_s3.sh
# Between two fsyncs; a hundred times their duration if they are slow, so that syncing takes about 1 % of a run.
SYNC_SECONDS = 0.5
MAX_SYNC_SECONDS = 30.0
SYNC_COST_FACTOR = 100


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One finished row. ``payload`` is its output record ("result") or its line of ``errors.jsonl`` ("error"), as JSON.

    The token counts are for the run's progress; they are not written.
    """

    index: int
    after: Cursor
    kind: Literal["result", "error"]
    payload: bytes
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0

    @property
    def key(self) -> int:
        """The name of the row in tasks and requests."""
        return self.index


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of rows that ended in a result, and in an error."""

    results: int = 0
    errors: int = 0


class Journal:
    """An open journal. Not thread-safe; the run directory's lock admits one process at a time.

    A row is durable once its whole line, newline included, and the file's name are fsynced. The system has it when
    ``append`` returns, so kill -9 loses nothing; a power loss costs the rows since the last fsync, which run again.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._folder = folder
        self._segments: list[Path] = []  # oldest first; ``done`` knows one by its position here
        self._reader = SegmentReader(self._segments)
        self._fd: int | None = None  # of the segment this process appends to
        self._size = 0  # of that segment in bytes
        self._unsynced = False
        self._synced_at = time.monotonic()
        self._sync_every = SYNC_SECONDS
        self._failed: StorageError | None = None
        self.done = RowIndex(shard)
        self.partials: dict[int, tuple[int, ...]] = {}
        self.recovery: list[str] = []  # a line per damage that was found when it was opened

    @classmethod
    def open(cls, folder: Path, shard: Shard = WHOLE) -> Journal:
        """Open or create the journal in ``folder`` and recover what is in it.

        A torn tail is cut off, records that fail their checksum are left out, and ``recovery`` reports both. Memory: 8
        bytes per row and the partials; time: about 1.5 s per million rows of 600 bytes. Raises StorageError.
        """
        journal = cls(folder, shard)
        with storage_errors("open the journal", folder):
            make_folder(folder)
            journal._recover()
        return journal

    @classmethod
    def read(cls, folder: Path, shard: Shard = WHOLE) -> Journal:
        """The journal in ``folder`` as it is now, read-only: another process may be writing it."""
        journal = cls(folder, shard)
        with storage_errors("read the journal", folder):
            journal._recover(repair=False)
        return journal

    @property
    def counts(self) -> Counts:
        """Rows finished so far, earlier runs included."""
        return Counts(self.done.num_results, self.done.num_errors)

    @property
    def resume_cursor(self) -> Cursor | None:
        """The place in the input from which the first unfinished row can be read; None for the start.

        All rows of this shard before it are finished, and some after it may be.
        """
        last = self.done.previous(self.done.first_gap)
        return None if last is None else self._line(last).cursor

    def append(self, entry: JournalEntry) -> None:
        """Add a finished row: it survives a kill from now on, and a power loss from the next commit on.

        Raises ValueError for a row of another shard or a row with a result (an error may be replaced), StorageError if
        the disk refuses.
        """
        if entry.index not in self.done.shard_rows:
            raise ValueError(f"row {entry.index} is not in this shard")
        if entry.index in self.done and not self.done.location(entry.index).is_error:
            raise ValueError(f"row {entry.index} is in the journal already")
        is_error = entry.kind == "error"
        offset = self._append(encode_line(ERROR if is_error else RESULT, entry.index, entry.after, entry.payload))
        self.done.add(entry.index, len(self._segments) - 1, offset, is_error)
        self.partials.pop(entry.index, None)
        self.tick()

    def add_partial(self, index: int, token_ids: tuple[int, ...]) -> None:
        """Store the tokens of a half-done row for the next run, in place of earlier ones; they survive as rows do.

        If they begin with the earlier tokens, as each turn of a chat does, only the rest is written.
        """
        before = self.partials.get(index, ())
        start = len(before) if token_ids[: len(before)] == before else 0
        payload = {"start": start, "token_ids": token_ids[start:]} if start else token_ids
        self._append(encode_line(PARTIAL, index, None, encode_json(payload)))
        self.partials[index] = token_ids
        self.tick()

    def save_partials(self, tokens: Mapping[int, tuple[int, ...]]) -> None:
        """Store the tokens of half-done rows, see ``add_partial``, and commit."""
        for index, token_ids in tokens.items():
            self.add_partial(index, token_ids)
        self.commit()

    def tick(self) -> None:
        """Commit if it is time to. ``append`` calls it; call it from time to time while no row finishes."""
        if time.monotonic() - self._synced_at >= self._sync_every:
            self.commit()

    def commit(self) -> None:
        """Make every appended row durable. After a StorageError the journal accepts no more rows: reopen it."""
        if self._failed is not None:
            raise self._failed
        started_at = time.monotonic()
        if self._unsynced and self._fd is not None:
            with self._failing():
                sync_file(self._fd)
            self._unsynced = False
        self._synced_at = time.monotonic()
        cost_s = self._synced_at - started_at
        self._sync_every = min(max(SYNC_SECONDS, SYNC_COST_FACTOR * cost_s), MAX_SYNC_SECONDS)

    def close(self) -> None:
        """Commit and release the files; after a failure only release them, so that a ``finally`` can call it."""
        try:
            if self._failed is None:
                self._end_segment()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            self._reader.close()

    def payload(self, index: int) -> bytes:
        """The JSON text of a finished row. Raises KeyError, or StorageError if it fails its checksum."""
        return self._line(index).payload

    def _line(self, index: int) -> Line:
        location = self.done.location(index)
        return self._reader.read(location.segment, location.offset)

    def _recover(self, *, repair: bool = True) -> None:
        """Index the rows of all segments, later records replacing earlier ones; cut the torn tail, note damage."""
        for path in segments(self._folder):
            self._segments.append(path)
            with path.open("rb", buffering=1 << 20) as file:
                for line in scan(file):
                    if isinstance(line, Line):
                        self._index(path, line)
                    elif repair:
                        self._note(path, line)

    def _index(self, path: Path, line: Line) -> None:
        if line.kind == PARTIAL:
            if line.row not in self.done:
                self._index_partial(line.row, json.loads(line.payload))
        elif line.row not in self.done.shard_rows:
            raise StorageError(f"{path}: row {line.row} is not of this shard; the journal is another run's")
        else:
            self.done.add(line.row, len(self._segments) - 1, line.offset, line.kind == ERROR)
            self.partials.pop(line.row, None)

    def _index_partial(self, row: int, payload: Any) -> None:
        """Take the tokens of a half-done row; a dict continues an earlier record, and is dropped if that is damaged."""
        before: tuple[int, ...] = ()
        if isinstance(payload, dict):
            before = self.partials.pop(row, ())
            if len(before) != payload["start"]:
                return
            payload = payload["token_ids"]
        self.partials[row] = (*before, *payload)

    def _note(self, path: Path, damage: Damage) -> None:
        if not damage.torn:
            self.recovery.append(
                f"journal: {path.name} is damaged at byte {damage.offset} ({damage.size} bytes fail their checksum); "
                "the rows recorded there run again; check the disk"
            )
            return
        with path.open("r+b") as file:
            file.truncate(damage.offset)
            sync_file(file.fileno())
        self.recovery.append(f"journal: cut {damage.size} bytes of an unfinished record; its row runs again")

    def _append(self, line: bytes) -> int:
        """Write a line, opening or rotating the segment as needed; returns its offset there.

        A line that fails half written becomes a torn tail, which reopening cuts.
        """
        if self._failed is not None:
            raise self._failed
        if self._size >= SEGMENT_BYTES:
            self._end_segment()
        with self._failing():
            fd = self._begin_segment() if self._fd is None else self._fd
            written = os.write(fd, line)
            while written < len(line):
                written += os.write(fd, line[written:])
        offset = self._size
        self._size += len(line)
        self._unsynced = True
        return offset

    def _begin_segment(self) -> int:
        path = next_segment(self._folder, self._segments[-1] if self._segments else None)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        sync_folder(self._folder)
        self._segments.append(path)
        return self._fd

    def _end_segment(self) -> None:
        self.commit()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._size = 0

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an exception inside, the file's content is undefined, and further writes are refused."""
        try:
            yield
        except OSError as error:
            self._failed = storage_error("write to the journal", self._folder, error)
            raise self._failed from error
        except BaseException:
            self._failed = StorageError(f"{self._folder}: writing was interrupted; {RUN_AGAIN}")
            raise

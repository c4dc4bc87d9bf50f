"""Mirror of an unfinished run in an object store, from which a machine with an empty run directory goes on.

A background thread copies what has grown every half minute: ``job.json`` first, then whole lines of the journal's
segments, each time as a new file ``journal/SEGMENT.OFFSET``, and ``progress.json``. Nothing is appended to or replaced
there, so a copy that breaks off costs only its own lines. Ids are not copied: they are read again. When the run is
finished, its files take the place of the journal. Standard input is not copied: it is piped in again.

What is here and what is there are two parts of one run: a run directory fetches the segments that it lacks. Segments
are told apart by their numbers, so a directory that takes over leaves a gap of ``_GAP`` numbers to a holder that is
thought dead and may yet write. A mirror that fails never stops a run.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from batchgen.core.errors import LockedError, UsageError
from batchgen.core.fingerprint import file_digest
from batchgen.core.remote import RemoteError
from batchgen.core.storage import (
    publish,
    remove_folder,
    staged_file,
    storage_errors,
    sync_folder,
    temporary_name,
)
from batchgen.core.units import counted
from batchgen.output.bucket import Bucket
from batchgen.output.manifest import Manifest
from batchgen.output.publish import MARKER, Marker, Publication, identity
from batchgen.output.remote_lock import RemoteLock
from batchgen.output.rundir import IDS_NAME, OUTPUT_NAMES, PROGRESS_NAME, RunDir
from batchgen.output.segments import segment_path, segments

EVERY_S = 30.0
FLUSH_S = 4.0  # the last copy of a run that stops; 10 s are promised for all of it
_PART_BYTES = 8 << 20
_GAP = 1000  # segments, 64 GB
_JOURNAL = "journal"
_PART_NAME = re.compile(r"journal/(\d{6,7})\.(\d{12})", re.ASCII)


class _Part(NamedTuple):
    """A copied part of a segment: where it begins and ends there, and its name in the bucket."""

    offset: int
    end: int
    name: str


class Mirror:
    """The mirror of the run in ``run_dir``, whose lock this process holds.

    ``note`` takes a line for the user; ``on_lost`` is called, in the mirror's thread, when another machine has taken
    the run over.
    """

    def __init__(
        self, address: str, run_dir: RunDir, note: Callable[[str], None], on_lost: Callable[[str], None]
    ) -> None:
        self._run_dir = run_dir
        self._note = note
        self._on_lost = on_lost
        self._bucket = Bucket(address)
        self._brief = Bucket(address, is_patient=False)  # for the thread, which comes again anyhow
        self._lock = RemoteLock(self._brief, run_dir.path)
        self.manifest: Manifest | None = None  # of the run that is there
        self.marker: Marker | None = None  # of its finished files
        self._there: dict[int, int] = {}  # bytes of each segment, as far as copied
        self._contents: dict[str, bytes] = {}  # of the other files, as last copied
        self._is_copying = False
        self._is_failing = False
        self._beaten_at = time.monotonic()
        self._busy = threading.Lock()  # held while the thread copies
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="batchgen-mirror", daemon=True)

    def open(self, local: Manifest | None, *, overwrite: bool) -> None:
        """Take the lock and see which run is there.

        Raises LockedError if another process has it, UsageError if the folder holds another run than ``local``, or
        files that no run wrote.
        """
        self._look()  # before the lock is written into what may be another program's folder
        if note := self._lock.acquire():
            self._note(note)
        self._look()
        found = self.manifest
        if found and local and not overwrite and identity(found) != identity(local):
            raise UsageError(
                f"{self._bucket.address} holds another run, begun {found.created_at}: choose another output.mirror, or "
                "start anew with --overwrite"
            )
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the files of the finished run are there."""
        return self.manifest is not None and self.marker is not None and self.marker.complete

    def restore(self) -> None:
        """Fetch what the run directory lacks of the run that is there; ``job.json`` first, outputs last."""
        if self.manifest is None:
            return
        if not self._run_dir.manifest.exists():
            self._run_dir.write_manifest(self.manifest)
        if not self.is_finished:
            self._fetch_segments()
        elif not self._run_dir.is_complete():
            self._fetch_finished()

    def progress(self) -> bytes:
        """The ``progress.json`` that is there, b"" if none is."""
        return self._bucket.read(PROGRESS_NAME) or b""

    def clear(self) -> None:
        """Remove the run that is there, for one that starts anew; ``job.json`` before the journal."""
        self._bucket.remove([MARKER, *self._run_dir.finished_names, self._run_dir.manifest.name, PROGRESS_NAME])
        self._remove_journal()
        self.manifest = self.marker = None

    def begin(self) -> int:
        """Copy the run from now on. Returns the number that the journal's next segment must be above."""
        self._there = {number: max(part.end for part in parts) for number, parts in self._parts().items()}
        last = max([0, *self._there, *(number for number, _ in segments(self._run_dir.journal))])
        self._is_copying = True
        self._wake.set()
        return last + (_GAP if last and self._lock.has_moved else 0)

    def finish(self, manifest: Manifest) -> None:
        """Put the files of the finished run in the place of its journal. Raises RemoteError."""
        with self._busy:
            self._is_copying = False
        Publication(self._bucket, self._run_dir, manifest).publish(with_manifest=True)
        self._bucket.remove([PROGRESS_NAME])
        self._remove_journal()

    def close(self) -> None:
        """Copy what is left, for ``FLUSH_S`` seconds at most, and free the lock."""
        self._end.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(FLUSH_S)

    def _look(self) -> None:
        """Find the run that is there. Raises UsageError for files that are none."""
        bucket, name = self._bucket, self._run_dir.manifest.name
        files = bucket.find("")
        others = [other for other in (MARKER, *self._run_dir.finished_names) if other in files]
        if others and name not in files:
            what = f"{bucket.address} holds {others[0]} but no {name}"
            raise UsageError(f"{what}, so it is no mirror: choose another output.mirror")
        try:
            self.manifest = Manifest.from_bytes(bucket.read(name) or b"") if name in files else None
        except ValueError as error:
            raise UsageError(
                f"{bucket.address}/{name} is not of a run ({error}): choose another output.mirror"
            ) from None
        self.marker = Marker.from_bytes(bucket.read(MARKER) or b"") if MARKER in files else None

    def _parts(self) -> dict[int, list[_Part]]:
        """What is there of each segment, by its number, in order."""
        found: dict[int, list[_Part]] = {}
        for name, entry in self._bucket.find(_JOURNAL).items():
            if match := _PART_NAME.fullmatch(name):
                offset = int(match[2])
                found.setdefault(int(match[1]), []).append(_Part(offset, offset + entry.size, name))
        return {number: sorted(parts) for number, parts in sorted(found.items())}

    def _remove_journal(self) -> None:
        self._bucket.remove([part.name for parts in self._parts().values() for part in parts])

    def _fetch_segments(self) -> None:
        """Fetch the segments that are not here. Each part consists of whole lines, whatever lies between them."""
        journal = self._run_dir.journal
        here = {number for number, _ in segments(journal)}
        lacking = {number: parts for number, parts in self._parts().items() if number not in here}
        if not lacking:
            return
        with storage_errors("write", journal):
            journal.mkdir(exist_ok=True)
            sync_folder(journal.parent)
            for path in journal.glob(f"{IDS_NAME}*"):  # which lacks the ids of rows that were read elsewhere
                path.unlink()
        for number, parts in lacking.items():
            path = segment_path(journal, number)
            with staged_file(path) as file:
                file.write(b"".join(self._bucket.read_all([part.name for part in parts])))
            publish(path)
        self._note(f"{counted(len(lacking), 'segment')} of the journal restored from {self._bucket.address}")

    def _fetch_finished(self) -> None:
        """Fetch the files of the finished run; a journal that is here is of an earlier state, and goes once all are."""
        run_dir, marker = self._run_dir, self.marker
        if self.manifest is not None:
            run_dir.write_manifest(self.manifest)  # which has the number of rows by now
        names = [name for name in run_dir.finished_names if marker and name in marker.files]
        for path in [run_dir.path / name for name in names]:
            temporary = temporary_name(path)
            self._bucket.download(path.name, temporary)
            if marker and file_digest(temporary) != marker.files[path.name]["sha256"]:
                temporary.unlink()
                what = f"{self._bucket.address}/{path.name} is not what was written there; nothing of it is used"
                raise RemoteError(f"{what}: choose another output.mirror, or start anew with --overwrite")
            with storage_errors("write", path), temporary.open("rb") as file:
                os.fsync(file.fileno())
        for name in names:
            if name in OUTPUT_NAMES.values():
                remove_folder(run_dir.journal)
            publish(run_dir.path / name)
        self._note(f"restored from {self._bucket.address}: the run is finished")

    def _watch(self) -> None:
        """The thread: a copy every half minute, when there is news, and one of all that is there at the end."""
        try:
            while not self._end.is_set():
                self._try_copy()
                self._wake.wait(EVERY_S)
                self._wake.clear()
            self._try_copy()
            if not self._is_failing:
                with suppress(RemoteError):
                    self._lock.release()
        except LockedError as error:
            self._on_lost(str(error))

    def _try_copy(self) -> None:
        try:
            self._beat()
            with self._busy:
                if self._is_copying:
                    self._copy()
        except (RemoteError, OSError) as error:  # OSError: the journal went away, which comes again or is the end
            if isinstance(error, RemoteError) and not self._is_failing:
                self._note(f"the mirror falls behind, the run goes on: {error}")
                self._is_failing = True
        else:
            if self._is_failing:
                self._note(f"the mirror has caught up: {self._bucket.address}")
            self._is_failing = False

    def _beat(self) -> None:
        self._lock.beat()
        self._beaten_at = time.monotonic()

    def _copy(self) -> None:
        """Copy what is new, the manifest before all else."""
        self._copy_file(self._run_dir.manifest)
        for number, path in segments(self._run_dir.journal):
            self._copy_segment(number, path)
        with suppress(FileNotFoundError):
            self._copy_file(self._run_dir.path / PROGRESS_NAME)

    def _copy_file(self, path: Path) -> None:
        content = path.read_bytes()
        if self._contents.get(path.name) != content:
            self._brief.write(path.name, content)
            self._contents[path.name] = content

    def _copy_segment(self, number: int, path: Path) -> None:
        """Copy the whole lines of a segment that are new."""
        size = path.stat().st_size
        while (begin := self._there.get(number, 0)) < size:
            with path.open("rb") as file:
                file.seek(begin)
                lines = file.read(_PART_BYTES)
                if len(lines) == _PART_BYTES:
                    lines += file.readline()
            lines = lines[: lines.rfind(b"\n") + 1]
            if not lines:
                return
            if time.monotonic() - self._beaten_at >= EVERY_S:  # much to copy, slowly
                self._beat()
            self._brief.write(f"{_JOURNAL}/{number:06d}.{begin:012d}", lines)
            self._there[number] = begin + len(lines)

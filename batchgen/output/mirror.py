"""Mirror of an unfinished run in an object store, from which a machine with an empty run directory goes on.

A background thread copies what has grown every half minute: ``job.json`` first, then whole lines of the journal's
segments, each time as a new file ``journal/RUN/SEGMENT.OFFSET``, and ``progress.json``. Nothing is appended to or
replaced there, so a copy that breaks off costs only its own lines. Ids are not copied: they are read again. When the
run is finished, its files take the place of the journal. Standard input is not copied: it is piped in again.

What is here and what is there are two parts of one run: a run directory fetches the segments that it lacks.
``heartbeat`` turns a second machine away, but no step is atomic: two machines may write for a moment, and lose no row,
since their segments differ in name, and the folders of two runs too. A mirror that fails never stops a run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from batchgen.core.errors import LockedError, UsageError
from batchgen.core.remote import RemoteError
from batchgen.core.units import counted
from batchgen.output.bucket import Bucket, Entry
from batchgen.output.heartbeat import Heartbeat, read_heartbeat
from batchgen.output.manifest import Manifest, OtherVersion
from batchgen.output.publish import PUBLISHED, Publication, PublishManifest, identity
from batchgen.output.restore import fetch_finished, fetch_segments, part_name, parts_in
from batchgen.output.rundir import OUTPUT_NAMES, PROGRESS_NAME, RunDir
from batchgen.output.segments import segments

EVERY_S = 30.0
LOOK_AGAIN_S = 300.0  # after which files that were removed there are missed
FLUSH_S = 4.0  # at most, for the last copy of a run that ends
_PART_BYTES = 8 << 20


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
        self._heart = Heartbeat(run_dir.path)
        self.manifest: Manifest | None = None  # of the run that is there
        self._published: PublishManifest | None = None  # of its finished files
        self._files: Mapping[str, Entry] = {}  # all that is there, as of the last look
        self._run = ""  # the folder of the journal's parts
        self._there: dict[str, int] = {}  # bytes of each segment, as far as copied
        self._manifest_there = b""  # as last copied
        self._known: set[str] = set()  # names that are there unless they were removed
        self._is_copying = self._is_failing = self._is_over = self._is_closed = False
        self._beaten_at = self._looked_at = time.monotonic()
        self._busy = threading.Lock()  # held while the thread copies
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="batchgen-mirror", daemon=True)

    def open(self, local: Manifest | None, *, overwrite: bool) -> None:
        """Take the mirror and see which run is there.

        Raises LockedError if another process works on it, UsageError if the folder holds another run than ``local``,
        or files that no run wrote.
        """
        self._look(local, overwrite=overwrite)  # before a word is written into what may be another program's folder
        if note := self._heart.take(self._bucket):
            self._note(note)
        self._look(local, overwrite=overwrite)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        """Whether the files of the finished run are there."""
        if self.manifest is None or not self._files.keys() & {*OUTPUT_NAMES.values()}:
            return False
        if self._published is None:  # it was removed; outputs appear only when the rows have been counted
            return self.manifest.num_rows is not None
        return self._published.complete and self._published.files.keys() <= self._files.keys()

    def restore(self) -> None:
        """Fetch what the run directory lacks of the run that is there; ``job.json`` first, outputs last."""
        if self.manifest is None or self._run_dir.has_outputs():
            return
        if not self._run_dir.manifest.exists():
            self._run_dir.write_manifest(self.manifest)
        if not self.is_finished:
            if found := fetch_segments(self._bucket, self._run_dir, _run_of(self.manifest)):
                self._note(f"{counted(found, 'segment')} of the journal restored from {self._bucket.address}")
        else:
            self._run_dir.write_manifest(self.manifest)  # which has the number of rows by now
            digests = dict.fromkeys(self._files, "")
            if self._published is not None:
                digests = {name: str(state["sha256"]) for name, state in self._published.files.items()}
            fetch_finished(self._bucket, self._run_dir, digests)
            self._note(f"restored from {self._bucket.address}: the run is finished")

    def progress(self) -> bytes:
        """The ``progress.json`` of earlier machines, b"" if there was none."""
        return json.dumps(self._heart.before).encode() if self._heart.before else b""

    def clear(self) -> None:
        """Remove the run that is there, for one that starts anew. Raises LockedError if it was taken over meanwhile.

        The outputs go first and ``job.json`` last: what a kill leaves is no finished run, and known as a run's.
        """
        self._heart.beat(self._bucket)
        outputs, manifest = {*OUTPUT_NAMES.values()}, self._run_dir.manifest.name
        there = self._bucket.find("").keys()
        self._bucket.remove([*outputs & there])
        self._bucket.remove([name for name in (PUBLISHED, *self._run_dir.finished_names) if name in there - outputs])
        self._remove_journal()
        self._bucket.remove([*{manifest} & there])
        self.manifest = self._published = None

    def begin(self, manifest: Manifest) -> None:
        """Copy the run from now on, whose ``job.json`` is in the run directory."""
        self._run = _run_of(manifest)
        for part in parts_in(self._bucket.find("journal")):
            if part.run == self._run:
                self._known.add(part.name)
                end = self._there.get(part.segment, 0)
                self._there[part.segment] = max(end, part.end) if part.offset <= end else end
        self._is_copying = True
        self._wake.set()

    def finish(self, manifest: Manifest) -> None:
        """Put the files of the finished run in the place of its journal.

        Raises RemoteError, LockedError if another machine has taken the run over.
        """
        with self._busy:
            self._is_copying = False
        self._heart.beat(self._bucket)
        Publication(self._bucket, self._run_dir, manifest, is_mirror=True).publish()
        with self._busy:
            self._is_over = True
        self._remove_journal()
        self._heart.end(self._bucket)

    def close(self, left_s: float) -> None:
        """Copy what is left and say that this process leaves; ``left_s`` is how long it may still run."""
        self._end.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(min(FLUSH_S, left_s))
        self._is_closed = True  # a thread that is late does nothing more: the directory is another's to take

    def _look(self, local: Manifest | None, *, overwrite: bool) -> None:
        """Find the run that is there. Raises UsageError for files that are none, and for another run than ``local``."""
        bucket, name = self._bucket, self._run_dir.manifest.name
        self._files = files = bucket.find("")  # once: another machine may be writing
        self._published = PublishManifest.read(bucket)
        if name not in files:
            self.manifest = None
            self._refuse_strangers(local, overwrite=overwrite)
            return
        try:
            self.manifest = found = Manifest.from_bytes(bucket.read(name) or b"")
        except OtherVersion as error:
            self.manifest = None
            if overwrite:
                return
            advice = "use the batchgen that began it, choose another output.mirror, or start anew with --overwrite"
            raise UsageError(f"{bucket.address}/{name}: {error}: {advice}") from None
        except ValueError as error:
            raise UsageError(
                f"{bucket.address}/{name} is not of a run ({error}): choose another output.mirror"
            ) from None
        if local and not overwrite and identity(found) != identity(local):
            raise UsageError(
                f"{bucket.address} holds another run, begun {found.created_at}: choose another output.mirror, or "
                "start anew with --overwrite"
            )

    def _refuse_strangers(self, local: Manifest | None, *, overwrite: bool) -> None:
        """Raises UsageError for files without a ``job.json``, unless they are those of the run ``local``."""
        files, address, published = self._files, self._bucket.address, self._published
        is_ours = published and local and published.is_of(PublishManifest(*identity(local)))
        is_begun = published and not published.complete  # a run was killed at its end, before there was a file
        names = (*self._run_dir.finished_names, *(() if is_begun else (PUBLISHED,)))
        others = [name for name in names if name in files and not is_ours]
        if PROGRESS_NAME in files and not read_heartbeat(self._bucket)[1]:
            others.append(PROGRESS_NAME)
        if others:
            what = f"{address} holds {others[0]} but no {self._run_dir.manifest.name}"
            raise UsageError(f"{what}, so it is no mirror: choose another output.mirror")
        runs = {part.run for part in parts_in(files)}
        if runs - {_run_of(local) if local else ""} and not overwrite:
            raise UsageError(
                f"{address}/journal holds rows of a run whose job.json was removed there: run it again on the "
                "machine that has its run directory, start anew with --overwrite, or choose another output.mirror"
            )

    def _remove_journal(self) -> None:
        self._bucket.remove([part.name for part in parts_in(self._bucket.find("journal"))])

    def _watch(self) -> None:
        """The thread: a copy every half minute, when there is news, and one of all that is there at the end."""
        try:
            while not self._end.is_set():
                self._try_copy()
                self._wake.wait(EVERY_S)
                self._wake.clear()
            self._try_copy(is_last=True)
        except LockedError as error:
            if not self._is_closed:
                self._on_lost(str(error))

    def _try_copy(self, *, is_last: bool = False) -> None:
        try:
            with self._busy:
                if self._is_over:
                    return
                self._beat()
                if self._is_copying:
                    self._copy()
                if is_last:
                    self._leave()
        except (RemoteError, OSError) as error:  # OSError: the journal went away, which comes again or is the end
            if isinstance(error, RemoteError) and not self._is_failing and not self._is_closed:
                self._note(f"the mirror falls behind, the run goes on: {error}")
                self._is_failing = True
        else:
            if self._is_failing:
                self._note(f"the mirror has caught up: {self._bucket.address}")
            self._is_failing = False

    def _beat(self) -> None:
        """Raises LockedError if another machine has taken the run over, or has finished it."""
        was_there = self._heart.beat(self._brief)
        self._beaten_at = time.monotonic()
        if self._is_copying and (
            not was_there or self._is_failing or self._beaten_at - self._looked_at >= LOOK_AGAIN_S
        ):
            self._look_again()

    def _look_again(self) -> None:
        """See whether what was copied is still there, and copy everything again if not."""
        files, published = self._brief.find(""), PublishManifest.read(self._brief)
        if published is not None and published.complete and published != self._published:
            raise LockedError(f"{self._brief.address} was finished by another process")
        if not self._known <= files.keys():
            self._note(f"files of the mirror {self._brief.address} were removed there: all are copied again")
            self._known, self._there, self._manifest_there = set(), {}, b""
        self._looked_at = self._beaten_at

    def _leave(self) -> None:
        """Say that this process works on the run no more."""
        if self.is_finished:
            self._heart.end(self._brief)
        else:
            self._heart.beat(self._brief, is_released=True)

    def _copy(self) -> None:
        """Copy what is new, the manifest before all else."""
        manifest = self._run_dir.manifest.read_bytes()
        if self._manifest_there != manifest:
            self._write(self._run_dir.manifest.name, manifest)
            self._manifest_there = manifest
        for path in segments(self._run_dir.journal):
            self._copy_segment(path)

    def _copy_segment(self, path: Path) -> None:
        """Copy the whole lines of a segment that are new."""
        size = path.stat().st_size
        while (begin := self._there.get(path.stem, 0)) < size:
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
            self._write(part_name(self._run, path.stem, begin), lines)
            self._there[path.stem] = begin + len(lines)

    def _write(self, name: str, content: bytes) -> None:
        if self._is_closed:
            raise RemoteError("the mirror is closed")
        self._brief.write(name, content)
        self._known.add(name)


def _run_of(manifest: Manifest) -> str:
    """The folder of a run's parts, which keeps the rows of runs apart that follow each other in one mirror."""
    return sha256(" ".join(identity(manifest)).encode()).hexdigest()[:16]

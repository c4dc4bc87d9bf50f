"""The run directory: names of its files, who holds it, and its manifest.

It knows where things lie and how they are replaced safely, not what the rows, the report or the job mean.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from batchgen.core.errors import LockedError, UsageError
from batchgen.core.storage import (
    doomed_name,
    remove_file,
    remove_folder,
    storage_errors,
    sync_folder,
    temporary_name,
    write_atomic,
)
from batchgen.output.manifest import Manifest

PROGRESS_NAME = "progress.json"  # where a run is, for ``status``
IDS_NAME = "ids.sqlite"  # in the journal's folder; SQLite adds endings. Without rows it holds nothing of worth
OUTPUT_NAMES = {"jsonl": "outputs.jsonl", "parquet": "outputs.parquet", "openai-batch": "outputs.jsonl"}
_LOCK_HEAD = b'{"pid": '
_LOCK_TRIES = 4  # status looks at the lock for an instant; that must not turn a run away
_LOCK_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run directory."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """``run.lock``, held from construction until ``release``; the system frees it however the process ends.

    Raises LockedError naming the holder, StorageError where the file system cannot lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        for attempt in range(_LOCK_TRIES):
            fd = self._try()
            if fd is not None:
                break
            if attempt < _LOCK_TRIES - 1:
                time.sleep(_LOCK_PAUSE_S)
        else:
            raise LockedError(
                f"{path.parent} is in use by {_read_holder(path) or 'another process'}; wait for it or stop it"
            )
        self._fd = fd
        if not _is_lock(os.pread(fd, len(_LOCK_HEAD), 0)):
            os.close(fd)
            raise UsageError(f"{path} was not written by a run; choose another output.path")
        with storage_errors("write", path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)

    def release(self) -> None:
        """Let others in. The file goes while the lock is still held, so nobody can lock a name that is about to go."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _try(self) -> int | None:
        """A descriptor that holds the lock, or None while another process does."""
        with storage_errors("lock", self._path):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._path.stat()):
                    return fd
            except (BlockingIOError, FileNotFoundError):  # held; or removed by a holder between our open and our lock
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            return None


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run directory; making the object touches nothing on disk."""

    path: Path

    @property
    def manifest(self) -> Path:
        """``job.json``."""
        return self.path / "job.json"

    @property
    def errors(self) -> Path:
        """``errors.jsonl``, the dead letters; absent when no row failed."""
        return self.path / "errors.jsonl"

    @property
    def report(self) -> Path:
        """``report.json``."""
        return self.path / "report.json"

    @property
    def journal(self) -> Path:
        """The folder of the journal; there until the outputs are."""
        return self.path / "journal"

    @property
    def retry(self) -> Path:
        """The folder of the journal of a ``retry`` that is under way."""
        return self.path / "retry"

    @property
    def lock_file(self) -> Path:
        """``run.lock``."""
        return self.path / "run.lock"

    @property
    def spool(self) -> Path:
        """``input.spool``: standard input, kept until the run is finished so that a resume can read it again."""
        return self.path / "input.spool"

    def outputs(self, output_format: str) -> Path:
        """The final outputs in a format of the job file."""
        return self.path / OUTPUT_NAMES[output_format]

    def is_complete(self) -> bool:
        """Whether the outputs have appeared: the one mark of a finished run."""
        return any((self.path / name).is_file() for name in OUTPUT_NAMES.values())

    def owns(self, path: Path) -> bool:
        """Whether writing this run could replace or remove ``path``; an input must not be such a file."""
        root, target = self.path.resolve(), path.resolve()
        folders, files = self._folders(), self._files()
        mine = [*files, *map(temporary_name, files), self.lock_file, *folders, *map(doomed_name, folders)]
        return target.is_relative_to(root) and target.relative_to(root).parts[:1] in {(own.name,) for own in mine}

    def create(self) -> None:
        """Make the folder and its parents.

        Raises UsageError if that cannot be, or as ``refuse_strays`` does. While another process holds the folder,
        it may only seem to be foreign: then ``lock`` has the word.
        """
        if self.path == self.path.parent:
            raise UsageError(f"output.path = {self.path} is the root of the file system; name a folder for the run")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(f"output.path = {self.path}: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error
        if self.holder() is None:
            self.refuse_strays()

    def refuse_strays(self) -> None:
        """Raises UsageError if the folder holds files of a run but no ``job.json``: another program wrote them."""
        if (strays := self._strays()) and not self.manifest.exists():
            raise UsageError(
                f"{self.path} holds {strays[0].relative_to(self.path)} but no job.json, so it is not one of our runs; "
                "choose another output.path"
            )

    def refuse_foreign_manifest(self) -> None:
        """Raises UsageError for a ``job.json`` alone that no run wrote, such as a job file or another program's."""
        try:
            found = json.loads(self.manifest.read_bytes())
            is_ours = isinstance(found, dict) and {"version", "job", "output_keys"} <= found.keys()
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError):
            is_ours = False
        if not is_ours and not self._strays():
            raise UsageError(f"{self.manifest} was not written by a run; choose another output.path")

    def _strays(self) -> list[Path]:
        """The files of a run besides ``job.json``; what is left by one that was killed as it began does not count."""
        try:
            mine = [*(self.path / name for name in OUTPUT_NAMES.values()), self.errors, self.report, self.retry]
            mine += [path for path in [self.path / PROGRESS_NAME] if not _is_progress(path)]
            mine += [path for path in [self.journal] if not path.is_dir()]
            journal = [path for path in sorted(self.journal.glob("*")) if not path.name.startswith(IDS_NAME)]
            return [path for path in mine if path.exists()] + journal
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error

    def lock(self) -> RunLock:
        """Take the directory for this process. Raises LockedError naming the holder's pid and host."""
        return RunLock(self.lock_file)

    def holder(self) -> Holder | None:
        """Who holds the directory now, if anybody; disturbs nobody."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(self.lock_file)
        finally:
            os.close(fd)
        return None

    def read_manifest(self) -> Manifest | None:
        """The manifest on disk, None if there is none. Raises UsageError if it cannot be read."""
        try:
            return Manifest.from_bytes(self.manifest.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {self.manifest}: {error}; --overwrite starts anew") from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, atomically and durably."""
        write_atomic(self.manifest, manifest.to_bytes())

    def sweep(self) -> None:
        """Remove what a killed process left half written or half removed; for the holder of the lock."""
        for file in self._files():
            with suppress(OSError):
                temporary_name(file).unlink(missing_ok=True)
        for folder in self._folders():
            shutil.rmtree(doomed_name(folder), ignore_errors=True)

    def clear_beginnings(self) -> None:
        """Remove what is left of a run that was killed before it wrote its ``job.json``."""
        remove_folder(self.journal)

    def clear(self) -> None:
        """Remove all that a run wrote, the manifest last: a crash in between leaves a run that starts from nothing.

        A staged spool stays: it is the input of the run that takes this one's place.
        """
        for name in set(OUTPUT_NAMES.values()):
            remove_file(self.path / name)
        for path in (self.errors, self.report):
            remove_file(path)
        for folder in self._folders():
            remove_folder(folder)
        self.remove_spool()
        remove_file(self.manifest)

    def remove_spool(self) -> None:
        """Remove ``input.spool``, durably."""
        with storage_errors("remove", self.spool):
            self.spool.unlink(missing_ok=True)
            sync_folder(self.path)

    def _files(self) -> list[Path]:
        mine = [self.path / name for name in dict.fromkeys(OUTPUT_NAMES.values())]
        return [*mine, self.errors, self.report, self.manifest, self.path / PROGRESS_NAME, self.spool]

    def _folders(self) -> list[Path]:
        return [self.retry, self.journal]


def _is_progress(path: Path) -> bool:
    """Whether a file is what a run that died before it wrote ``job.json`` left of its progress.

    It is never synced, so power loss may leave it empty, or of zeros.
    """
    try:
        content = path.read_bytes()
        if not content.strip(b"\0"):
            return True
        found = json.loads(content)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"version", "pid", "phase", "spent"} <= found.keys()


def _is_lock(head: bytes) -> bool:
    """Whether a file that begins so was written by a ``RunLock``, perhaps one whose machine failed as it wrote."""
    return _LOCK_HEAD.startswith(head.rstrip(b"\0"))


def _read_holder(path: Path) -> Holder | None:
    try:
        data = json.loads(path.read_bytes())
        return Holder(int(data["pid"]), str(data["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None

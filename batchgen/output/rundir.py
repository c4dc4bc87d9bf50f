"""The run directory: the names of its files, checks that a run wrote them, and their replacement and removal.

The content of rows and report is not known here.
"""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path

from batchgen.core.errors import StorageError, UsageError
from batchgen.core.storage import (
    make_folder,
    read_regular,
    remove_file,
    remove_folder,
    storage_errors,
    sync_folder,
    temporary_name,
    trash_name,
    write_atomic,
)
from batchgen.output.lock import Holder, RunLock, lock_holder
from batchgen.output.manifest import Manifest, OtherVersion

PROGRESS_NAME = "progress.json"  # where a run is, for ``status``
_PROGRESS_HEAD = b'{"version": 1, "state": "'
IDS_NAME = "ids.sqlite"  # in the journal's folder; SQLite adds endings. It is of no use without rows
OUTPUT_NAMES = {"jsonl": "outputs.jsonl", "parquet": "outputs.parquet", "openai-batch": "outputs.jsonl"}


class RunDir:
    """The files of one run directory; making the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "job.json"
        self.errors = path / "errors.jsonl"  # failed rows; absent where there are none
        self.report = path / "report.json"
        self.journal = path / "journal"  # folder; there until the outputs are
        self.retry = path / "retry"  # folder of the journal of a retry under way
        self.spool = path / "input.spool"  # standard input, kept until the end so that a resume can read it again
        self.lock_file = path / "run.lock"
        self._progress = path / PROGRESS_NAME
        self._outputs = [path / name for name in dict.fromkeys(OUTPUT_NAMES.values())]
        self.finished_names = [path.name for path in (self.errors, self.report, *self._outputs)]
        self._files = [*self._outputs, self.errors, self.report, self.manifest, self._progress, self.spool]
        self._folders = [self.retry, self.journal]

    def outputs(self, output_format: str) -> Path:
        """The final outputs in a format of the job file."""
        return self.path / OUTPUT_NAMES[output_format]

    def has_outputs(self) -> bool:
        """Whether the outputs have appeared, of a run that was finished at least once."""
        return any(path.is_file() for path in self._outputs)

    def is_complete(self) -> bool:
        """Whether the run is finished: the outputs hold all rows, and none that the input grew by is left."""
        return self.has_outputs() and ((manifest := self.read_manifest()) is None or manifest.num_rows is not None)

    def finished_files(self, *, with_manifest: bool = False) -> list[Path]:
        """The files that a finished run consists of, the outputs last."""
        first = [self.manifest] if with_manifest else []
        return [path for path in (*first, self.errors, self.report, *self._outputs) if path.is_file()]

    def owns(self, path: Path) -> bool:
        """Whether writing this run could replace or remove ``path``; an input must not be such a file."""
        root, target = self.path.resolve(), path.resolve()
        files, folders = self._files, self._folders
        mine = [*files, *map(temporary_name, files), self.lock_file, *folders, *map(trash_name, folders)]
        return target.is_relative_to(root) and target.relative_to(root).parts[:1] in {(own.name,) for own in mine}

    def create(self) -> None:
        """Make the folder and its parents, durably.

        Raises UsageError if that fails, or as ``refuse_foreign_files`` does. A folder that another process holds is not
        judged, since it may still lack its ``job.json``: ``lock`` refuses it. Nor is one accepted whose journal is a
        symbolic link or a mount point: folders are removed by renaming them, which these cannot be part of.
        """
        if self.path == self.path.parent:
            raise UsageError(f"output.path = {self.path} is the root of the file system; name a folder for the run")
        try:
            make_folder(self.path)
        except FileExistsError as error:
            raise UsageError(f"output.path = {self.path}: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error
        for folder in self._folders:
            if folder.is_symlink() or folder.is_mount():
                what = "a symbolic link" if folder.is_symlink() else "a mount point"
                raise UsageError(f"{folder} is {what}: put the whole run there, as output.path, or remove it")
        if self.holder() is None:
            self.refuse_foreign_files()

    def refuse_foreign_files(self) -> None:
        """Raises UsageError if the folder holds files of a run but no ``job.json``: another program wrote them."""
        if (foreign := self._foreign_files()) and not self.manifest.exists():
            raise UsageError(
                f"{self.path} holds {foreign[0].relative_to(self.path)} but no job.json: batchgen did not write it; "
                "choose another output.path"
            )

    def refuse_foreign_manifest(self) -> None:
        """Raises UsageError for a ``job.json`` alone that no run wrote, such as a job file or another program's."""
        try:
            found = json.loads(read_regular(self.manifest))
            is_ours = isinstance(found, dict) and {"version", "job", "output_keys"} <= found.keys()
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError):
            is_ours = False
        if not is_ours and not self._foreign_files():
            raise UsageError(f"{self.manifest} was not written by a run; choose another output.path")

    def _foreign_files(self) -> list[Path]:
        """The files of a run besides ``job.json``, without those that a run killed at its beginning may leave."""
        try:
            mine = [path for path in (*self._outputs, self.errors, self.report, self.retry) if path.exists()]
            if self._progress.exists() and not _is_progress(self._progress):
                mine.append(self._progress)
            if self.journal.exists() and not self.journal.is_dir():
                mine.append(self.journal)
            return mine + [path for path in sorted(self.journal.glob("*")) if not path.name.startswith(IDS_NAME)]
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error

    def lock(self) -> AbstractContextManager[object]:
        """Take the directory for this process. Raises LockedError naming the holder's pid and host.

        A finished run on a file system that takes no writes needs no lock: it is only looked at.
        """
        try:
            return closing(RunLock(self.lock_file))
        except StorageError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno == errno.EROFS and self.is_complete()):
                raise
            return nullcontext()

    def holder(self) -> Holder | None:
        """The process that holds the directory now, if any."""
        return lock_holder(self.lock_file)

    def read_manifest(self) -> Manifest | None:
        """The manifest on disk, None if there is none. Raises UsageError if it cannot be read, OtherVersion too."""
        try:
            return Manifest.from_bytes(read_regular(self.manifest))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OtherVersion as error:
            words = f"cannot read {self.manifest}: {error}: use the batchgen that began it"
            raise OtherVersion(error.version, f"{words}; batchgen run --overwrite starts anew") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot read {self.manifest}: {why}; batchgen run --overwrite starts anew") from error

    def write_manifest(self, manifest: Manifest) -> None:
        write_atomic(self.manifest, manifest.to_bytes())

    def sweep(self) -> None:
        """Remove files that a killed process left half written or half removed; only for the holder of the lock."""
        for file in self._files:
            with suppress(OSError):
                temporary_name(file).unlink(missing_ok=True)
        for folder in self._folders:
            shutil.rmtree(trash_name(folder), ignore_errors=True)

    def clear_beginnings(self) -> None:
        """Remove the rest of a run that was killed before it wrote its ``job.json``."""
        remove_folder(self.journal)

    def clear(self) -> None:
        """Remove all that a run wrote, the manifest last: a crash in between leaves a run that starts from nothing.

        A staged spool stays: it is the input of the run that replaces this one.
        """
        remove_folder(self.retry)  # which belongs to the outputs
        for path in (*self._outputs, self.errors, self.report):
            remove_file(path)
        for folder in self._folders:
            remove_folder(folder)
        self.remove_spool()
        remove_file(self.manifest)

    def forget_ids(self) -> None:
        """Remove the file of ids, which the next start makes anew from the rows."""
        with storage_errors("remove", self.journal / IDS_NAME):
            for path in self.journal.glob(f"{IDS_NAME}*"):
                path.unlink()

    def remove_spool(self) -> None:
        """Remove ``input.spool``, durably."""
        with storage_errors("remove", self.spool):
            self.spool.unlink(missing_ok=True)
            sync_folder(self.path)


def _is_progress(path: Path) -> bool:
    """Whether a run wrote this ``progress.json``. It is never synced, so power loss may cut it, or leave zeros."""
    try:
        return _PROGRESS_HEAD.startswith(read_regular(path)[: len(_PROGRESS_HEAD)].rstrip(b"\0"))
    except OSError:
        return False

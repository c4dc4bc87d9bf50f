"""The run directory: the names of its files, checks that a run wrote them, and their replacement and removal.

Each unfinished job has a separate folder in ``journal/``, so its files cannot be mistaken for another job's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from batchgen.core.errors import BatchgenError, StorageError, UsageError
from batchgen.core.file_digests import Digests
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
from batchgen.output.manifest import Manifest

JOURNALS_NAME = "journal"  # a folder in it for each job that is begun and not finished
PROGRESS_NAME = "progress.json"  # where a run is, for ``status``
_PROGRESS_HEAD = b'{"version": 1, "state": "'
_JOURNAL_NAME = re.compile(r"(\d{4,9})-[0-9a-f]{8}", re.ASCII)
OUTPUT_NAMES = {
    "jsonl": "outputs.jsonl",
    "csv": "outputs.csv",
    "parquet": "outputs.parquet",
    "openai-batch": "outputs.jsonl",
}


class JournalledJob(NamedTuple):
    """A job of a run directory: its folder below ``journal/``, and its ``job.json``."""

    folder: Path
    manifest: Manifest

    @property
    def has_all_rows(self) -> bool:
        """Whether all rows were in the folder when the writing of outputs began."""
        return self.manifest.num_rows is not None


class RunDir:
    """The files of one run directory; the constructor does not access the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "job.json"
        self.errors = path / "errors.jsonl"  # failed rows; absent if no row failed
        self.report = path / "report.json"
        self.journals = path / JOURNALS_NAME
        self.spool = path / "input.spool"  # standard input, kept so that it can be read again
        self.lock_file = path / "run.lock"
        self._progress = path / PROGRESS_NAME
        self._outputs = [path / name for name in dict.fromkeys(OUTPUT_NAMES.values())]
        self.finished_names = [path.name for path in (self.errors, self.report, *self._outputs)]
        self._files = [*self._outputs, self.errors, self.report, self.manifest, self._progress, self.spool]

    def outputs(self, output_format: str) -> Path:
        """The final outputs in a format of the job file."""
        return self.path / OUTPUT_NAMES[output_format]

    def has_outputs(self) -> bool:
        """Whether there are outputs, of whatever job."""
        return any(path.is_file() for path in self._outputs)

    def is_complete(self) -> bool:
        """Whether the folder has the outputs of a finished job; another one may be under way."""
        return self.has_outputs() and self.manifest.is_file()

    def finished_files(self) -> list[Path]:
        """The files that a finished run consists of, the outputs last."""
        return [path for path in (self.errors, self.report, *self._outputs) if path.is_file()]

    def owns(self, path: Path) -> bool:
        """Whether writing this run could replace or remove ``path``; an input must not be such a file."""
        root, target = self.path.resolve(), path.resolve()
        files, folder = self._files, self.journals
        owned = [*files, *map(temporary_name, files), self.lock_file, folder, trash_name(folder)]
        return target.is_relative_to(root) and target.relative_to(root).parts[:1] in {(own.name,) for own in owned}

    def create(self) -> None:
        """Make the folder and its parents durably. If another process holds the folder, ``lock`` refuses it later.

        A journal that is a link or a mount point is refused, since folders are removed by renaming them. Raises
        UsageError, also as ``refuse_foreign_files`` does.
        """
        if self.path == self.path.parent:
            raise UsageError(f"output.path = {self.path} is the root of the file system; name a folder for the run")
        try:
            make_folder(self.path)
        except FileExistsError as error:
            raise UsageError(f"output.path = {self.path}: {error.filename} is a file, not a folder") from error
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error
        if self.journals.is_symlink() or self.journals.is_mount():
            what = "a symbolic link" if self.journals.is_symlink() else "a mount point"
            raise UsageError(f"{self.journals} is {what}: put the whole run there, as output.path, or remove it")
        if self.holder() is None:
            self.refuse_foreign_files()

    def refuse_foreign_files(self) -> None:
        """Raises UsageError if the folder holds files of a run but no ``job.json``: another program wrote them."""
        if (foreign := self._foreign_files()) and not self.manifest.exists() and not self.journalled():
            raise UsageError(
                f"{self.path} holds {foreign[0].relative_to(self.path)} but no job.json: batchgen did not write it; "
                "choose another output.path"
            )

    def refuse_foreign_manifest(self) -> None:
        """Raises UsageError for a ``job.json`` that was not written by a run, such as another program's."""
        try:
            content = json.loads(read_regular(self.manifest))
            is_ours = isinstance(content, dict) and {"version", "job", "output_keys"} <= content.keys()
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError):
            is_ours = False
        if not is_ours and not self._foreign_files():
            raise UsageError(f"{self.manifest} was not written by a run; choose another output.path")

    def _foreign_files(self) -> list[Path]:
        """The files of a run except ``job.json`` and files that a run killed at its start may leave."""
        try:
            files = [path for path in (*self._outputs, self.errors, self.report) if path.exists()]
            if self._progress.exists() and not _is_progress(self._progress):
                files.append(self._progress)
            if self.journals.exists() and not self.journals.is_dir():
                files.append(self.journals)
            return files + [path for path in sorted(self.journals.glob("*")) if not _number(path)]
        except OSError as error:
            raise UsageError(f"output.path = {self.path}: cannot use {error.filename}: {error.strerror}") from error

    def lock(self) -> AbstractContextManager[object]:
        """Take the directory for this process. Raises LockedError naming the holder's pid and host."""
        return closing(RunLock(self.lock_file))

    def holder(self) -> Holder | None:
        """The process that holds the directory now, if any."""
        return lock_holder(self.lock_file)

    def read_manifest(self) -> Manifest | None:
        """The manifest on disk, None if it does not exist. Raises UsageError if it cannot be read."""
        try:
            return Manifest.from_bytes(read_regular(self.manifest))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot read {self.manifest}: {why}; batchgen run --overwrite starts again") from error

    def journalled(self) -> list[JournalledJob]:
        """The jobs that have a folder in ``journal/``, the earliest first. Raises as ``read_manifest``."""
        paths = [path for path in self.journals.glob("*") if _number(path) and path.is_dir()]
        read = [(path, RunDir(path).read_manifest()) for path in sorted(paths, key=lambda path: (_number(path), path))]
        return [JournalledJob(path, manifest) for path, manifest in read if manifest is not None]

    def is_begun(self) -> bool:
        """Whether a run has written here, even if only its progress. Raises as ``read_manifest``."""
        return self.manifest.exists() or bool(self.journalled()) or _is_progress(self._progress)

    def unfinished(self) -> list[JournalledJob]:
        """The jobs that were begun since the outputs appeared, the earliest first. Raises as ``read_manifest``."""
        return [job for job in self.journalled() if _number(job.folder) > self._num_finished()]

    def last_manifest(self) -> Manifest:
        """The manifest of the job that was begun last: an unfinished one, or else the job of the outputs.

        Its output path is this folder, even if the folder has been moved. Raises UsageError for a folder without a job.
        """
        manifests = [*filter(None, [self.read_manifest()]), *(job.manifest for job in self.unfinished())]
        if not manifests:
            raise UsageError(f"{self.path} is not a run directory: it has no job.json")
        job = manifests[-1].job
        return replace(manifests[-1], job={**job, "output": {**job["output"], "path": str(self.path)}})

    def kept_job(self) -> JournalledJob | None:
        """The job of the outputs with its rows in a journal, which is kept if the outputs are not JSON Lines."""
        last = self.read_manifest()
        return next((job for job in self.journalled() if last and job.folder.name == last.journal), None)

    def begin(self, manifest: Manifest) -> JournalledJob:
        """Make the folder of a new job, with its ``job.json``. Raises StorageError."""
        number = 1 + max([self._num_finished(), *map(_number, self.journals.glob("*"))])
        job = JournalledJob(self.journals / f"{number:04d}-{token_hex(4)}", manifest)
        with storage_errors("begin a journal in", job.folder):
            make_folder(job.folder)
        self.write_job(job)
        return job

    def write_job(self, job: JournalledJob) -> None:
        """Replace the ``job.json`` of a job that is not finished."""
        write_atomic(job.folder / self.manifest.name, job.manifest.to_bytes())

    def remove_job(self, job: JournalledJob) -> None:
        """Remove the folder of a job, as if it had never begun."""
        remove_folder(job.folder)
        with suppress(OSError):
            self.journals.rmdir()

    def changed_files(self, manifest: Manifest, digests: Digests) -> list[str]:
        """The names of outputs and ``errors.jsonl`` that are not the files of the finished job ``manifest``.

        Raises UsageError for a file that cannot be read.
        """
        return [
            path.name
            for path in (*self._outputs, self.errors)
            if manifest.files.get(path.name) != (_named(path, digests) if path.is_file() else None)
        ]

    def finish(self, job: JournalledJob, digests: Digests, *, keeps_rows: bool) -> Manifest:
        """Write the ``job.json`` of a finished job, which names its outputs, and delete the folders of all jobs.

        Its own folder stays if it ``keeps_rows``. Jobs that were begun later were abandoned for it: they go first,
        since after a crash they would count as newer than the outputs. Raises UsageError, StorageError.
        """
        for other in self.journalled():
            if _number(other.folder) > _number(job.folder):
                remove_folder(other.folder)
        fresh = Digests()  # the earlier digests may be of files that these have replaced
        files = {path.name: _named(path, fresh) for path in (*self._outputs, self.errors) if path.is_file()}
        states = digests.to_plain() | fresh.to_plain()
        finished = replace(job.manifest, files=files, journal=job.folder.name, file_states=states)
        self.write_manifest(finished)
        self._remove_finished(keeps_rows=keeps_rows)
        return finished

    def remove_other_outputs(self, output_format: str) -> None:
        """Remove the outputs of other formats than this one, durably."""
        for path in self._outputs:
            if path != self.outputs(output_format) and path.exists():
                remove_file(path)

    def write_manifest(self, manifest: Manifest) -> None:
        write_atomic(self.manifest, manifest.to_bytes())

    def sweep(self) -> None:
        """Remove the half-written and half-removed files of a killed process; only for the holder of the lock."""
        for file in self._files:
            with suppress(OSError):
                temporary_name(file).unlink(missing_ok=True)
        for trash in (trash_name(self.journals), *self.journals.glob(".*")):
            shutil.rmtree(trash, ignore_errors=True)
        for path in self.journals.glob("*"):
            if _number(path) and path.is_dir() and not (path / self.manifest.name).exists():
                shutil.rmtree(path, ignore_errors=True)  # its job.json would have been its first file
        with suppress(UsageError, StorageError):
            last = self.read_manifest()
            self._remove_finished(keeps_rows=last is None or last.job["output"]["format"] != "jsonl")

    def clear(self) -> None:
        """Remove all files of a run, the manifest last: after a crash in between the run starts from scratch.

        A staged copy of standard input stays: the run that replaces this one reads it.
        """
        for path in (*self._outputs, self.errors, self.report):
            remove_file(path)
        remove_folder(self.journals)
        remove_file(self.manifest)
        with storage_errors("remove", self.spool):
            self.spool.unlink(missing_ok=True)
            sync_folder(self.path)

    def _num_finished(self) -> int:
        """The number of the last finished job; folders up to it belong to it and to earlier jobs."""
        manifest = self.read_manifest()
        return _number(Path(manifest.journal)) if manifest else 0

    def _remove_finished(self, *, keeps_rows: bool) -> None:
        last, kept = self._num_finished(), self.kept_job() if keeps_rows else None
        for path in [*self.journals.glob("*")]:
            if 0 < _number(path) <= last and not (kept and path == kept.folder):
                remove_folder(path)
        with suppress(OSError):
            self.journals.rmdir()


@contextmanager
def tidy_on_failure(folder: Path) -> Iterator[None]:
    """Remove folders that were created for a run which then fails, if they are empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BatchgenError:
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise


def _number(folder: Path) -> int:
    """The number in the name of a job's folder in ``journal/``; 0 for a folder with another name."""
    match = _JOURNAL_NAME.fullmatch(folder.name)
    return int(match[1]) if match else 0


def _named(path: Path, digests: Digests) -> dict[str, Any]:
    return {name: value for name, value in digests.fingerprint(path).items() if name != "file"}


def _is_progress(path: Path) -> bool:
    """Whether a run wrote this ``progress.json``. It is never synced, so a power loss may truncate or zero it."""
    try:
        return _PROGRESS_HEAD.startswith(read_regular(path)[: len(_PROGRESS_HEAD)].rstrip(b"\0"))
    except OSError:
        return False

"""The input of a job as one run of rows, whatever files and formats it comes in, readable from any row on.

It knows which files there are and in what order; how a file is read is its format's business, and what the rows mean
is not known here at all.
"""

from __future__ import annotations

import glob
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.config.job import InputSpec
from batchgen.core.errors import BatchgenError, InputChanged, UsageError
from batchgen.core.fingerprint import TRIES, Digests
from batchgen.core.records import BadRow, Cursor, Record
from batchgen.core.storage import publish, staged_file, temporary_name
from batchgen.input.formats.detect import resolve_format
from batchgen.input.formats.hf import PREFIX, DatasetFile, is_saved_dataset
from batchgen.input.formats.interface import InputFile, Rows, Wanted
from batchgen.input.formats.jsonl import parse_jsonl
from batchgen.input.formats.lines import LinesFile
from batchgen.input.formats.parquet import ParquetFile
from batchgen.input.formats.text import parse_text
from batchgen.input.rows import chunked

_START = Cursor(0, 0, 0, 0)


class Source:
    """The rows of an input; made by ``open_source``. Memory use does not grow with their number.

    Once it was asked for its ``fingerprint``, it hands out no row that may have come of another content.
    """

    def __init__(self, files: Sequence[InputFile], limit: int | None) -> None:
        self._files = tuple(files)
        self._limit = limit
        self._digests: Digests | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The local files and folders that are read: no output may overwrite them."""
        return tuple(file.path for file in self._files if file.path is not None)

    def read(self, start: Cursor | None = None, wanted: Wanted | None = None) -> Rows:
        """The rows from ``start`` on, in input order, up to the job's limit.

        Rows whose index is not ``wanted`` are passed over without being parsed. A row's ``after`` is a ``start``
        from which exactly the rows behind it come. Returns the index after the last row it passed. Raises UsageError
        when a file has become unreadable, InputChanged when it is not what its fingerprint says.
        """
        at = start or _START
        for number in range(at.file, len(self._files)):
            if number != at.file:
                at = Cursor(number, 0, 0, at.index)
            index = yield from self._read_file(self._files[number], at, wanted)
            at = Cursor(number, 0, 0, index)
        return at.index

    def _read_file(self, file: InputFile, at: Cursor, wanted: Wanted | None) -> Rows:
        """The rows of one file. A chunk that may be of another content than was fingerprinted is read again."""
        if self._digests is None:
            return (yield from file.read(at, self._limit, wanted))
        number, tries = at.file, TRIES
        while tries:
            reading = Reading(file.read(at, self._limit, wanted))
            for chunk in chunked(self._explained(reading, file)):
                if not self._is_unchanged(file):
                    break
                yield from chunk
                at, tries = chunk[-1].after, TRIES
            else:
                if self._is_unchanged(file):
                    return reading.end
            if at.file != number:
                return at.index
            tries -= 1
        raise InputChanged(f"{file.path} changes all the time; run again to resume when nothing writes to it any more")

    def _is_unchanged(self, file: InputFile) -> bool:
        """See ``Digests.is_unchanged``; looks at all of its files, so that each is known anew."""
        digests = self._digests
        return digests is None or False not in [digests.is_unchanged(path) for path in file.local_files]

    def _explained(self, rows: Iterable[Record | BadRow], file: InputFile) -> Iterator[Record | BadRow]:
        """``rows``; where reading fails because the file has changed, that is what is raised."""
        try:
            yield from rows
        except BatchgenError:
            self._is_unchanged(file)
            raise

    def check_unchanged(self) -> None:
        """Raises InputChanged if a file is no longer what its fingerprint says."""
        for file in self._files:
            self._is_unchanged(file)

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """What a resume is held against: for each file its name, size in bytes and ``sha256``.

        It reads the local files whose digests are not known from end to end; modification times do not count. From
        here on what is read is held against ``digests``. Raises UsageError when a file cannot be read.
        """
        self._digests = digests
        return {"files": [file.fingerprint(digests) for file in self._files]}

    def num_rows(self) -> int | None:
        """The number of rows, the limit applied, where it is known without reading them all."""
        counts = [file.num_rows() for file in self._files]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        return sum(known) if self._limit is None else min(sum(known), self._limit)

    def num_bytes(self) -> int | None:
        """The size of all files as stored, compressed or not; None where some of them are not local."""
        sizes = [file.num_bytes() for file in self._files]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


class Reading:
    """Rows to iterate once; ``end`` is what their generator returned."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.end = 0

    def __iter__(self) -> Iterator[Record | BadRow]:
        self.end = yield from self._rows


def _no_file(path: Path) -> bool:
    return False


def open_source(spec: InputSpec, is_left_out: Callable[[Path], bool] = _no_file) -> Source:
    """Find and open what ``spec.path`` names: files, globs, folders, ``hf:`` datasets.

    Files come in the order of the list, those of a glob or folder sorted by name, without what ``is_left_out``: a
    run's own files, where its folder lies among its inputs. Standard input must have been spooled to a file. Raises
    UsageError when something is missing, unreadable, named twice or of no known format.
    """
    files: dict[str, InputFile] = {}
    for entry in spec.path:
        for item in _expand(entry, spec.format, is_left_out):
            name = item if isinstance(item, str) else str(item.resolve())
            if name in files:
                raise UsageError(f"input {item} is named twice in input.path")
            files[name] = _open_file(item, spec.format)
    return Source(list(files.values()), spec.limit)


@contextmanager
def stdin_as_file(spec: InputSpec) -> Iterator[InputSpec]:
    """``spec`` with a temporary copy of standard input in place of ``-``. Raises as ``stage_stdin`` does."""
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        if spec.path == ("-",):
            spool = Path(folder) / "stdin"
            spool_stdin(spool)
            spec = replace(spec, path=(str(spool),))
        yield spec


def spool_stdin(target: Path, stdin: BinaryIO | None = None) -> None:
    """Copy standard input to ``target``, which appears atomically. Raises as ``stage_stdin`` does."""
    stage_stdin(target, stdin)
    publish(target)


def stage_stdin(target: Path, stdin: BinaryIO | None = None) -> Path:
    """Copy standard input to a file beside ``target`` and return that file; ``publish(target)`` puts it in place.

    Raises UsageError when standard input is a terminal or closed, StorageError when the copy cannot be written.
    """
    if stdin is None and sys.stdin is None:
        raise UsageError("input.path is - and standard input is closed; pipe rows into it")
    source = stdin or sys.stdin.buffer
    if source.isatty():
        raise UsageError("input.path is - and standard input is a terminal; pipe rows into it")
    with staged_file(target) as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return temporary_name(target)


def _expand(entry: str, form: str, is_left_out: Callable[[Path], bool]) -> list[Path | str]:
    """The files one entry of ``input.path`` stands for; an ``hf:`` entry stays as it is."""
    if entry.startswith(PREFIX):
        return [entry]
    path = Path(entry)
    try:
        if path.is_dir():
            if form in ("auto", "hf") and is_saved_dataset(path):
                return [path]
            return _parquet_files(path, is_left_out)
        if path.exists():
            return [path]
        found = map(Path, glob.iglob(entry, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(path for path in found if path.is_file() and not is_left_out(path))
    except OSError as error:
        raise UsageError(f"cannot read input {entry}: {error.strerror}") from error
    if matches:
        return list(matches)
    if glob.has_magic(entry):
        raise UsageError(f"no file matches input {entry}")
    hint = "; a dataset on the Hub is written hf:NAME" if form == "hf" else ""
    raise UsageError(f"no input file {entry}{hint}")


def _parquet_files(folder: Path, is_left_out: Callable[[Path], bool]) -> list[Path | str]:
    """The Parquet files in a folder and below, hidden ones and ``_metadata`` left out as Arrow does."""
    names = sorted(path for path in folder.rglob("*.parquet") if not is_left_out(path))
    visible = [name for name in names if not any(part[0] in "._" for part in name.relative_to(folder).parts)]
    if not visible:
        raise UsageError(f"input {folder} is a folder without .parquet files; name files, as in '{folder}/*.jsonl'")
    return list(visible)


def _open_file(item: Path | str, form: str) -> InputFile:
    if isinstance(item, str):
        return DatasetFile(item)
    if item.is_dir():
        return DatasetFile(str(item))
    if not item.is_file():
        raise UsageError(f"input {item} is not a regular file; pipe it to standard input and name it -")
    try:
        resolved = resolve_format(item, form)
        if resolved == "parquet":
            return ParquetFile(item)
        return LinesFile(item, parse_text if resolved == "text" else parse_jsonl)
    except OSError as error:
        raise UsageError(f"cannot read input {item}: {error.strerror or error}") from error

"""The input of a job as one sequence of rows over all its files, readable from any row on.

It knows the files, their order, and which rows are still to be run; columns are opaque to it.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.config.job import InputSpec
from batchgen.core.addresses import scheme_of
from batchgen.core.errors import BatchgenError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.records import Cursor, Row
from batchgen.core.remote import attempt, open_store, refusals_as_usage
from batchgen.core.units import Shard
from batchgen.input.formats import InputFile, Rows, Wanted
from batchgen.input.formats.hf import PREFIX, is_saved_dataset
from batchgen.input.formats.select import open_file
from batchgen.input.rows import chunked

COUNT_BYTES = 4 << 30  # larger inputs are not counted beforehand: it would take too long
_START = Cursor(0, 0, 0, 0)


class Source:
    """The rows of an input, from ``open_source``, in constant memory; once fingerprinted, files may not change."""

    def __init__(self, files: Sequence[InputFile], limit: int | None) -> None:
        self._files = tuple(files)
        self._limit = limit
        self._digests: Digests | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The local files and folders that are read: no output may overwrite them."""
        return tuple(file.path for file in self._files if file.path is not None)

    @property
    def output_format(self) -> str:
        """The format for ``output.format = "auto"``: the format of the files, if all have the same."""
        formats = {file.output_format for file in self._files}
        return formats.pop() if len(formats) == 1 else "jsonl"

    def read(self, start: Cursor | None = None, wanted: Wanted | None = None) -> Rows:
        """The rows from ``start`` on, in input order, up to the job's limit; those not ``wanted`` are not parsed.

        Reading from a row's ``after`` gives exactly the rows that follow it. Returns the index after the last row read
        or left out. Raises UsageError if a file has become unreadable, InputError if its fingerprint no longer matches.
        """
        at = start or _START
        for number in range(at.file, len(self._files)):
            if number != at.file:
                at = Cursor(number, 0, 0, at.index)
            index = yield from self._read_file(self._files[number], at, wanted)
            at = Cursor(number, 0, 0, index)
        return at.index

    def _read_file(self, file: InputFile, at: Cursor, wanted: Wanted | None) -> Rows:
        """The rows of one file. Raises InputError once its content differs from the fingerprint."""
        if (digests := self._digests) is None:
            return (yield from file.read(at, self._limit, wanted))
        reading = Reading(file.read(at, self._limit, wanted))
        try:
            for chunk in chunked(reading):
                file.check_local_files(digests)
                yield from chunk
        except BatchgenError:  # perhaps since it has changed
            file.check_local_files(digests)
            raise
        file.check_local_files(digests)
        return reading.end

    @property
    def unread(self) -> frozenset[str]:
        """The columns with cells that could not be read so far and are null in their rows."""
        return frozenset().union(*(file.unread for file in self._files))

    def check_unchanged(self) -> None:
        """Raises InputError if a file has changed since its fingerprint was taken."""
        if self._digests is not None:
            for file in self._files:
                file.check_unchanged(self._digests)

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """Fingerprint for a start: name, bytes and ``sha256`` (or remote version) of each file, and their ``types``.

        Local files of unknown digest are read from end to end; modification times do not count. From here on ``read``
        compares files with ``digests``. Raises UsageError if a file cannot be read.
        """
        self._digests = digests
        files = [file.fingerprint(digests) for file in self._files]
        types = self._files[0].types.items() if self._files else ()
        shared = {name: kind for name, kind in types if all(file.types.get(name) == kind for file in self._files)}
        return {"files": files, "types": shared} if shared else {"files": files}

    def num_rows(self) -> int | None:
        """The number of rows, at most the limit, if it is known without reading them all; otherwise None."""
        total = _sum(file.num_rows() for file in self._files)
        return total if total is None or self._limit is None else min(total, self._limit)

    def num_bytes(self) -> int | None:
        """The size of all files as stored, compressed or not; None if reading them twice would cost too much."""
        return _sum(file.num_bytes() for file in self._files)


def _sum(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of them is unknown."""
    all_numbers = [*numbers]
    return None if None in all_numbers else sum(filter(None, all_numbers))


class Reading:
    """Rows to iterate once; then ``end`` is the return value of their generator."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.end = 0

    def __iter__(self) -> Iterator[Row]:
        self.end = yield from self._rows


@dataclass
class RowRange:
    """The rows of ``shard`` that are not ``done``; all rows before the cursor ``start`` are done.

    If rows have ids, the ids of other shards are read too: of two equal ids the first one is valid, in whichever shard
    it is. ``num_rows`` counts the input's rows over all shards, once ``read`` has come to its end.
    """

    source: Source
    shard: Shard
    done: Collection[int] = ()
    start: Cursor | None = None
    has_ids: bool = False
    num_rows: int = 0

    def read(self) -> Iterator[Row]:
        """The rows, from the first unfinished one on."""
        own = self.shard.rows()

        def is_wanted(index: int) -> bool:
            return index not in self.done if index in own else self.has_ids

        self.num_rows = yield from self.source.read(self.start, is_wanted)

    def count(self) -> int | None:
        """Number of rows of the shard; None if counting would take too long."""
        total = self.source.num_rows()
        if total is None:
            size = self.source.num_bytes()
            if size is None or size > COUNT_BYTES:
                return None
            total = self.pass_over()
        return len(self.shard.rows(total))

    def pass_over(self) -> int:
        """Count the rows of the input by reading it to its end without parsing."""
        reading = Reading(self.source.read(None, lambda index: False))
        for _ in reading:
            pass
        return reading.end


def open_source(spec: InputSpec, is_left_out: Callable[[Path], bool] = lambda path: False) -> Source:
    """Find and open what ``spec.path`` names: files, globs, folders, here or at an address, and ``hf:`` datasets.

    Files come in the order of the list, files of a glob or folder by name; files of a run, which ``is_left_out``
    accepts, are left out. Standard input must have been copied to a file. Raises UsageError if something is missing,
    unreadable, named twice or of an unknown format, and RemoteError if a server cannot be reached.
    """
    files: dict[str, InputFile] = {}
    for entry in spec.path:
        for item in _expand(entry, spec.format, is_left_out):
            name = item if isinstance(item, str) else str(item.resolve())
            if name in files:
                raise UsageError(f"input {item} is named twice in input.path")
            files[name] = open_file(item, spec)
    return Source(list(files.values()), spec.limit)


def _expand(entry: str, form: str, is_left_out: Callable[[Path], bool]) -> list[Path | str]:
    """The files that one entry of ``input.path`` names; an ``hf:`` entry stays as it is."""
    if scheme_of(entry):
        return [*_find_files(entry)]
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
        paths = map(Path, glob.iglob(entry, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(path for path in paths if path.is_file() and not is_left_out(path))
    except OSError as error:
        raise UsageError(f"cannot read input {entry}: {error.strerror}") from error
    if matches:
        return list(matches)
    if glob.has_magic(entry):
        raise UsageError(f"no file matches input {entry}")
    hint = "; a dataset on the Hub is written hf:NAME" if form == "hf" else ""
    raise UsageError(f"no input file {entry}{hint}")


def _find_files(address: str) -> list[str]:
    """The addresses of the files that one address names: itself, the matches of a glob, or a folder's Parquet files.

    They are sorted; hidden files are left out of a folder, as Arrow does. Raises UsageError if none is found.
    """
    scheme = str(scheme_of(address))
    if scheme in ("http", "https"):  # web servers cannot list files
        return [address]
    store, path = open_store(address)
    with refusals_as_usage():
        names = attempt("find", address, lambda: _listed(store, path))
    if not names:
        if glob.has_magic(path):
            raise UsageError(f"no file matches input {address}")
        folder = address.rstrip("/")
        raise UsageError(f"input {address} is a folder without .parquet files; name files, as in '{folder}/*.jsonl'")
    return [f"{scheme}://{name}" for name in sorted(names)]


def _listed(store: Any, path: str) -> list[str]:
    """The names of the files that a path in a store names; see ``_find_files``."""
    store.invalidate_cache()
    try:
        if store.info(path)["type"] == "file":
            return [path]
    except FileNotFoundError:
        if not glob.has_magic(path):
            raise
        return [name for name, info in store.glob(path, detail=True).items() if info["type"] == "file"]
    names = [name for name in store.find(path) if name.endswith(".parquet")]
    return [name for name in names if not any(part[:1] in ("", ".", "_") for part in name[len(path) + 1 :].split("/"))]


def _parquet_files(folder: Path, is_left_out: Callable[[Path], bool]) -> list[Path | str]:
    """The Parquet files in a folder and below, hidden ones and ``_metadata`` left out as Arrow does."""
    names = sorted(path for path in folder.rglob("*.parquet") if not is_left_out(path))
    visible = [name for name in names if not any(part[0] in "._" for part in name.relative_to(folder).parts)]
    if not visible:
        raise UsageError(f"input {folder} is a folder without .parquet files; name files, as in '{folder}/*.jsonl'")
    return list(visible)

"""Input formats: how one file is read, starting at any row. ``input.source`` decides which files are read.

``docs/internals.md`` says how to add one; tests run on ``FORMATS`` of ``tests/helpers/input_helpers.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchgen.core.file_digests import Digests
from batchgen.core.records import Cursor, Row
from batchgen.input.input_bytes import InputBytes

Wanted = Callable[[int], bool]
Rows = Generator[Row, None, int]


class InputFile(ABC):
    """One file of the input, or one dataset; ``output_format`` is the most similar ``output.format``.

    ``path`` is the local file or folder that is read (outputs may not overwrite it), or None; ``local_files`` hold the
    rows. ``unread`` columns have unreadable cells, which are null in their rows. ``types`` are the Arrow types of
    columns with a type that JSON lacks.
    """

    output_format = "jsonl"
    unread: frozenset[str] = frozenset()
    types: Mapping[str, str] = MappingProxyType({})
    path: Path | None
    local_files: tuple[Path, ...]

    @abstractmethod
    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        """Yield the rows from ``at`` on with an index below ``stop``, leaving out those not ``wanted``.

        The ``after`` of each row is the place to continue from: an ``offset`` and ``row`` that this format can seek to;
        0 and 0 are the start. Returns the index after the last row read or left out. Raises UsageError if the file can
        no longer be read at all; damage inside it becomes rows with an ``error``.
        """

    @abstractmethod
    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """Fingerprint that a resume compares; see ``Source.fingerprint``."""

    def check_local_files(self, digests: Digests) -> None:
        """Raises InputError if a local file has changed since its fingerprint was taken."""
        for path in self.local_files:
            digests.check_unchanged(path)

    def check_unchanged(self, digests: Digests) -> None:
        """Like ``check_local_files``, for remote files too; called once, at the end."""
        self.check_local_files(digests)

    def num_rows(self) -> int | None:
        """Rows in the file, None if the file must be read to know."""
        return None

    def num_bytes(self) -> int | None:
        """Size of the stored file; None if reading it only to count its rows would cost too much."""
        return None


class StoredFile(InputFile):
    """An input that is one file, local or remote."""

    def __init__(self, content: InputBytes) -> None:
        self.content = content
        self.path = content.path
        self.local_files = () if content.path is None else (content.path,)

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        return self.content.fingerprint(digests)

    def check_unchanged(self, digests: Digests) -> None:
        super().check_unchanged(digests)
        self.content.check_version()

    def num_bytes(self) -> int | None:
        return self.content.countable_bytes()

"""One module per input format, each able to start reading at any row: seek, read on, say where the next row starts.

A format knows one file (or dataset); which files there are and in what order is ``reader``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

from batchgen.core.fingerprint import Digests
from batchgen.core.records import BadRow, Cursor, Record

Wanted = Callable[[int], bool]
Rows = Generator[Record | BadRow, None, int]


class InputFile(Protocol):
    """One file of the input. ``path`` is None where it is no local file."""

    @property
    def path(self) -> Path | None:
        """The local file or folder that is read, which no output may overwrite."""

    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        """Yield the rows from ``at`` on with an index below ``stop``, leaving out those not ``wanted``.

        Returns the index after the last row it passed, yielded or not. Raises UsageError when the file can no
        longer be read at all; damage inside it becomes ``BadRow`` values.
        """

    def num_rows(self) -> int | None:
        """Rows in the file where that is cheap to know."""

    def num_bytes(self) -> int | None:
        """Size of the file as it is stored."""

    @property
    def local_files(self) -> tuple[Path, ...]:
        """The local files that hold the rows; none where they come from elsewhere."""

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """What a resume is held against; see ``Source.fingerprint``."""

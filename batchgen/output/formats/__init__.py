"""Output formats, and the default one: JSON Lines, as in the journal, the only format that is read back.

A format turns payloads into the rows of one file; its caller chooses the rows, their order, and when it appears.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from batchgen.core.errors import StorageError
from batchgen.core.storage import storage_errors


class OutputFormat:
    """``outputs.jsonl``, and the base of other formats. Each row is a JSON text without a newline."""

    def result_row(self, payload: bytes) -> bytes:
        return payload

    def error_row(self, payload: bytes) -> bytes:
        return payload

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Write an outputs file; ``rows`` may be iterated more than once. Memory does not grow with the rows."""
        write_lines(file, rows)


def write_lines(file: BinaryIO, rows: Iterable[bytes]) -> None:
    """Write each row and a newline."""
    for row in rows:
        file.write(row)
        file.write(b"\n")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a run's file with the rows' indexes, without blank lines. Raises StorageError naming a bad line."""
    with storage_errors("read", path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():  # as an editor may leave one
                continue
            try:
                if type(index := json.loads(line)["index"]) is not int:
                    raise TypeError(f"{index!r} is not a row index")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StorageError(f"{path}, line {number}: batchgen did not write this line ({error!r})") from None
            yield index, line.rstrip(b"\n")

"""One JSON object a line. A journalled payload is such a line already, so results and errors pass through untouched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.core.errors import StorageError
from batchgen.core.storage import storage_errors


def write_lines(file: BinaryIO, rows: Iterable[bytes]) -> None:
    """Write each row and a newline."""
    for row in rows:
        file.write(row)
        file.write(b"\n")


def read_lines(path: Path, key: str = "index") -> Iterator[tuple[int, bytes]]:
    """Each line of a file we wrote with the row index found under ``key``. Raises StorageError naming a bad line."""
    with storage_errors("read", path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():  # as an editor may leave one
                continue
            try:
                index = index_of(json.loads(line)[key])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StorageError(f"{path}, line {number}: not a line of ours ({error!r}); was it edited?") from None
            yield index, line.rstrip(b"\n")


def index_of(value: object) -> int:
    """The row index in ``17`` or ``"batch_req_000000000017"``; raises ValueError or TypeError for anything else."""
    if isinstance(value, str):
        return int(value.rpartition("_")[2])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no row index")
    return value


class JsonlFormat:
    """``outputs.jsonl``."""

    def result_row(self, payload: bytes) -> bytes:
        """The payload."""
        return payload

    def error_row(self, payload: bytes) -> bytes:
        """The payload."""
        return payload

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Write a whole outputs file."""
        write_lines(file, rows)

    def read(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines of an outputs file with their indexes."""
        return read_lines(path)

    def record(self, row: bytes) -> dict[str, Any]:
        """The row's record."""
        return dict(json.loads(row))

"""The forms outputs can take: each turns journalled records into the rows of one file and reads such a file back.

A format knows bytes of rows, not where they come from, in which order, or when the file may appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from batchgen.core.errors import UsageError
from batchgen.output.formats.jsonl import JsonlFormat
from batchgen.output.formats.openai_batch import OpenAIBatchFormat


class OutputFormat(Protocol):
    """What the writer and ``merge`` need of a format. A row is JSON without a newline, in the format's own shape."""

    def result_row(self, payload: bytes) -> bytes:
        """The outputs' row of a journalled result."""

    def error_row(self, payload: bytes) -> bytes:
        """The line of ``errors.jsonl`` of a journalled error."""

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Write a whole outputs file; ``rows`` may be iterated more than once. Memory does not grow with the rows."""

    def read(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The rows of an outputs file with their indexes, in file order. Raises StorageError if it is damaged."""

    def record(self, row: bytes) -> dict[str, Any]:
        """The output record behind a row that was read, as far as the format holds it.

        Raises KeyError, IndexError, TypeError or ValueError for a row that was edited.
        """


def output_format(name: str, *, model: str = "", chat: bool = True) -> OutputFormat:
    """The format of ``output.format``; ``model`` and ``chat`` shape OpenAI responses. Raises UsageError if unknown."""
    if name == "jsonl":
        return JsonlFormat()
    if name == "openai-batch":
        return OpenAIBatchFormat(model, chat)
    if name == "parquet":
        from batchgen.output.formats.parquet import ParquetFormat

        return ParquetFormat()
    raise UsageError(f'output.format = "{name}": must be one of jsonl, parquet, openai-batch')

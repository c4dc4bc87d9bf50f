"""Outputs as a CSV file for spreadsheets: a row's own columns, then the model's answer, without counts and times.

Text is written unchanged, null is an empty cell, and other values, such as lists and objects, are JSON text.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from batchgen.config.record_fields import RECORD_KEYS
from batchgen.output.formats import OutputFormat

BOM = "\ufeff"  # by which spreadsheets recognize UTF-8
_ANSWER = (  # what the model gave, in this order, after the columns of the input
    *("messages", "text", "extracted", "label", "score", "parsed", "reasoning"),
    *("tool_calls", "scores", "samples", "perplexity"),
    *("embedding", "embeddings", "complete", "finish_reason", "finish_reasons"),
    *("token_ids", "logprobs", "top_ids", "top_logprobs", "prompt_token_ids", "assistant_mask"),
    *("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"),
)
_BUFFER_CHARS = 1 << 20


class CsvFormat(OutputFormat):
    """``outputs.csv``. ``has_id``: the input has ids; ``has_bom``: the file begins with a mark that says UTF-8.

    ``columns`` are written in order; by default all columns of all rows. ``own`` are the fields of the job's records,
    whose names kept columns cannot have. ``delimiter`` separates cells.
    """

    def __init__(
        self,
        *,
        has_id: bool,
        has_bom: bool,
        delimiter: str = ",",
        columns: Sequence[str] = (),
        own: frozenset[str] = RECORD_KEYS,
    ) -> None:
        self._columns = columns
        self._own = own
        self._has_id = has_id
        self._has_bom = has_bom
        self._delimiter = delimiter

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Iterate ``rows`` twice: the names of all columns come first."""
        names = self._columns or self._names(rows)
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=self._delimiter)
        text.write(BOM if self._has_bom else "")
        writer.writerow(names)
        for row in rows:
            record = json.loads(row)
            writer.writerow([_cell(record.get(name)) for name in names])
            if text.tell() > _BUFFER_CHARS:
                _flush(text, file)
        _flush(text, file)

    def _names(self, rows: Iterable[bytes]) -> list[str]:
        """The columns of all rows: the id, the input's columns in the order of their first row, and the answer."""
        columns: dict[str, None] = {}
        for row in rows:
            columns |= dict.fromkeys(json.loads(row))
        kept = [name for name in columns if name not in self._own]
        answer = [name for name in _ANSWER if name in columns and name in self._own]
        return [*(["id"] if self._has_id else []), *kept, *(answer or ["text", "finish_reason"])]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flush(text: io.StringIO, file: BinaryIO) -> None:
    file.write(text.getvalue().encode(errors="surrogatepass"))
    text.seek(0)
    text.truncate()

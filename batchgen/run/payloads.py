"""The two kinds of line a finished row leaves: an output record or a dead letter, in the shape users' scripts read.

Pure functions from a row and what became of it to plain data; writing it anywhere is for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from batchgen.data.rows import is_batch_line
from batchgen.records import BadRow, Record, Result, Timings
from batchgen.spec import RECORD_KEYS, JobSpec

Decode = Callable[[Sequence[int]], str]
RowId = str | int | None
_TIMINGS = tuple(item.name for item in fields(Timings))


class Payloads:
    """Shapes the payloads of one job. ``decode`` is None for a model without a tokenizer: ids stand for the text."""

    def __init__(self, spec: JobSpec, decode: Decode | None) -> None:
        self._spec = spec
        self._decode = decode

    def result(self, record: Record, row_id: RowId, result: Result) -> dict[str, Any]:
        """The output record of a row; a row without an id is known by its index.

        A kept column whose name the record needs itself is written as ``input_<name>``.
        """
        payload: dict[str, Any] = {"id": record.index if row_id is None else row_id, "index": record.index}
        if self._decode is not None:
            payload["text"] = self._decode(result.token_ids)
        payload["finish_reason"] = str(result.finish_reason)
        payload["usage"] = {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": len(result.token_ids),
        }
        payload["timings"] = {name: round(getattr(result.timings, name), 6) for name in _TIMINGS}
        if self._spec.output.token_ids or self._decode is None:
            payload["token_ids"] = list(result.token_ids)
        return payload | self._kept(record)

    def error(self, row: BadRow) -> dict[str, Any]:
        """The dead letter of a row: enough to find it, to see why it failed, and to run it again.

        Its id is null where the job names an id column and the row has none that can be read.
        """
        return {
            "id": row.index if row.id is None and self._spec.input.id is None else row.id,
            "index": row.index,
            "source": row.source,
            "line": row.line,
            "code": str(row.error.code),
            "message": row.error.message,
            "row": row.raw,
        }

    def _kept(self, record: Record) -> dict[str, Any]:
        columns, spec = record.columns, self._spec
        if spec.input.keep_columns == ("*",):
            names = [name for name in columns if name != spec.input.id or name != "id"]
        else:
            wanted = dict.fromkeys(spec.input.keep_columns)
            if spec.output.expected is not None:
                wanted[spec.output.expected] = None
            if spec.output.format == "openai-batch" and is_batch_line(columns, spec.input):
                wanted["url"] = None  # which kind of completion was asked for
            names = [name for name in wanted if name in columns]
        return {kept_name(name, columns): columns[name] for name in names}


def kept_name(name: str, columns: dict[str, Any]) -> str:
    """The name a kept column has in the output record, where some names are taken."""
    if name not in RECORD_KEYS:
        return name
    name = f"input_{name}"
    while name in columns:
        name = f"input_{name}"
    return name

"""The output and error files of OpenAI's Batch API, so that code which reads those reads ours.

Shapes: https://platform.openai.com/docs/guides/batch. Everything is derived from the row, so a resumed run writes the
same bytes: ids come from the row's index and ``created`` is 0. Kept columns and timings have no place in this form,
except a kept ``url``, which says per row whether a chat or a text completion was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.data.json_line import encode_json
from batchgen.data.output_formats.jsonl import read_lines, write_lines


@dataclass(frozen=True, slots=True)
class OpenAIBatchFormat:
    """``outputs.jsonl`` of batch responses. ``chat`` is the shape of rows that keep no ``url``."""

    model: str
    chat: bool

    def result_row(self, payload: bytes) -> bytes:
        """A batch response with status 200 and a completion as its body."""
        record = json.loads(payload)
        index = record["index"]
        response = {"status_code": 200, "request_id": f"req_{index:012d}", "body": self._body(record)}
        return encode_json({**_head(record), "response": response, "error": None})

    def error_row(self, payload: bytes) -> bytes:
        """A batch response without a body, followed by what a dead letter holds besides: index, source, line, row."""
        record = json.loads(payload)
        error = {"code": record.pop("code"), "message": record.pop("message")}
        head = _head(record)
        record.pop("id", None)
        return encode_json({**head, "response": None, "error": error, **record})

    def write(self, file: BinaryIO, rows: Iterable[bytes]) -> None:
        """Write a whole outputs file."""
        write_lines(file, rows)

    def read(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines of an outputs file with the indexes found in their ids."""
        return read_lines(path, key="id")

    def _body(self, record: Mapping[str, Any]) -> dict[str, Any]:
        url = record.get("url")
        chat = self.chat if not isinstance(url, str) else url.rstrip("/").endswith("/chat/completions")
        usage = record["usage"]
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{record['index']:012d}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [_choice(record, chat)],
            "usage": {**usage, "total_tokens": total},
        }


def _head(record: Mapping[str, Any]) -> dict[str, Any]:
    index, custom_id = record["index"], record.get("id")
    return {
        "id": f"batch_req_{index:012d}",
        "custom_id": str(index if custom_id is None else custom_id),
    }


def _choice(record: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    text = record.get("text")
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text or ""
    choice |= {"logprobs": None, "finish_reason": record["finish_reason"]}
    if "token_ids" in record:
        choice["token_ids"] = record["token_ids"]
    return choice

"""Plain text: one prompt a line, as column ``text``."""

from __future__ import annotations

from typing import Any

from batchgen.input.formats.jsonl import decode_utf8


def parse_text(line: bytes) -> dict[str, Any]:
    """The line without its end, white space around it kept. Raises RowProblem bad_encoding for what is no UTF-8."""
    return {"text": decode_utf8(line.removesuffix(b"\n").removesuffix(b"\r"))}

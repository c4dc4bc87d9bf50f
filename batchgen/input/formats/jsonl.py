"""JSON Lines: one object per line.

Stricter than Python's parser where a row could not be written out again (lone surrogates, absurd nesting), as lenient
where real data is sloppy: NaN and Infinity are read as floats and the last of duplicate keys wins.
"""

from __future__ import annotations

import json
import re
from typing import Any

from batchgen.core.errors import RowErrorCode
from batchgen.core.json_line import MAX_DEPTH, is_too_deep
from batchgen.input.formats.lines import decode_utf8
from batchgen.input.rows import RowProblem, wrong_type

_decode = json.JSONDecoder().decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_jsonl(line: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The columns in one line.

    Raises RowProblem: bad_encoding for bytes that are not UTF-8 and escapes that form no character, bad_json for
    what is not JSON or cannot be held (numbers of more than 4300 digits, more than ``max_depth`` levels), bad_type for
    JSON that is not an object.
    """
    text = decode_utf8(line)
    try:
        value = _decode(text)
    except json.JSONDecodeError as error:
        raise RowProblem(
            RowErrorCode.BAD_JSON, f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        ) from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    except ValueError as error:
        raise RowProblem(RowErrorCode.BAD_JSON, "a number has more than 4300 digits") from error
    if not isinstance(value, dict):
        raise wrong_type("the line", value, "a JSON object")
    if is_too_deep(value, text, max_depth):
        raise _too_deep(max_depth)
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _too_deep(max_depth: int) -> RowProblem:
    return RowProblem(RowErrorCode.BAD_JSON, f"nested more than {max_depth} levels deep")


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = "a lone surrogate (half of an escaped character such as \\ud83d) is no text"
        raise RowProblem(RowErrorCode.BAD_ENCODING, message) from error

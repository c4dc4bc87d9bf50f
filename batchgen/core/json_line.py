"""JSON on one line: an encoder, UTF-8 if possible, without NaN and raw newlines, and a strict decoder.

Decides once how values that JSON lacks (dates, decimals, bytes, NaN, lone surrogates, other keys) are written.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, NoReturn, TypeGuard

_MAX_COUNT = 2**62
MAX_DEPTH = 100  # of nesting: more could not be written out again within Python's recursion limit


def encode_json(value: Any) -> bytes:
    """``value`` as JSON without a newline.

    NaN and infinities become null, bytes base64 text, dates and times ISO 8601, keys and all else their ``str()``.
    A text with a lone surrogate makes its whole line ASCII with escapes, since UTF-8 cannot carry it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (ValueError, TypeError):  # NaN, or a key that is not a string
        text = json.dumps(_sanitized(value), ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text)).encode()


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for other texts, and for values that would change when written again.

    These are: a key twice in one object, NaN, a number beyond float64 or of more than 4,300 digits, a lone surrogate,
    and more than ``MAX_DEPTH`` levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_too_deep(value, text):
        raise ValueError("it is nested too deeply")
    return value


def is_too_deep(value: object, text: str, max_depth: int = MAX_DEPTH) -> bool:
    """Whether the value of a JSON text has more than ``max_depth`` levels, counted without recursion."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth > max_depth


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a count: an integer that is not negative and not absurdly large."""
    return type(value) is int and 0 <= value < _MAX_COUNT


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("an object has a key twice")
    return unique


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return _sanitized(value.tolist())
    return str(value)


def _sanitized(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _sanitized(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sanitized(item) for item in value]
    return value

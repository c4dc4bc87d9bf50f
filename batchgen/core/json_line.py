"""JSON encoder for one value per line: UTF-8 where possible, without NaN and raw newlines.

Rows contain values that JSON lacks (dates, decimals, bytes, NaN, lone surrogates, keys that are not strings). This
module decides once how outputs, errors and the journal write each of them.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any


def encode_json(value: Any) -> bytes:
    """``value`` as JSON without a newline.

    NaN and infinities become null, bytes base64 text, dates and times ISO 8601, keys and all else their ``str()``.
    A text with a lone surrogate makes its whole line ASCII with escapes, since UTF-8 cannot carry it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (ValueError, TypeError):  # NaN, or a key that is no string
        text = json.dumps(_sanitized(value), ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text)).encode()


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

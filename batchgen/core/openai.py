"""Shape of an OpenAI Batch line, which the input reads and the output answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"


def is_batch_shape(columns: Mapping[str, Any]) -> bool:
    """Whether a row has the columns that no line of another format has together."""
    return "custom_id" in columns and isinstance(columns.get("body"), dict)


def url_of(columns: Mapping[str, Any]) -> Any:
    """The ``url`` of a line as given; without one, that of completions for a body with only a ``prompt``."""
    if "url" in columns:
        return columns["url"]
    body = columns.get("body")
    is_completion = isinstance(body, dict) and "prompt" in body and "messages" not in body
    return COMPLETION_URL if is_completion else CHAT_URL

"""Lines of OpenAI's Batch API: recognizes them among other rows, and finds what they ask for.

What their bodies say is read in ``input.openai_batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
EMBEDDING_URL = "/v1/embeddings"


def is_batch_shape(columns: Mapping[str, Any]) -> bool:
    """Whether a row has the columns that no line of another format has together."""
    return "custom_id" in columns and isinstance(columns.get("body"), dict)


def url_of(columns: Mapping[str, Any]) -> Any:
    """The ``url`` of a line; if it is missing, the url that fits the body: its ``input``, ``prompt`` or chat."""
    if "url" in columns:
        return columns["url"]
    body = columns.get("body")
    if isinstance(body, dict) and "input" in body:
        return EMBEDDING_URL
    is_completion = isinstance(body, dict) and "prompt" in body and "messages" not in body
    return COMPLETION_URL if is_completion else CHAT_URL

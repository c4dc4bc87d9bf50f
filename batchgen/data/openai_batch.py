"""What an OpenAI Batch request line asks for, in this package's own terms.

Fields and urls follow OpenAI's Batch API with vLLM's extra sampling keys in the body. The ``model`` named in a
body is not looked at: the job's model answers. What would change the answer and cannot be honoured is refused,
field by field; what only concerns OpenAI's service is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.data.params import PARAM_KEYS
from batchgen.data.rows import RowProblem, type_name
from batchgen.errors import RowErrorCode

_CHAT_URL = "/v1/chat/completions"
_COMPLETION_URL = "/v1/completions"
_LINE_FIELDS = (("custom_id", str), ("method", str), ("url", str), ("body", dict))

_IGNORED = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "verbosity"}
    | {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
)

# Fields that ask for something else than plain text, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The parts of a request, unjudged: its messages (a chat) or its prompt, and its sampling values."""

    is_chat: bool
    content: Any
    sampling: Mapping[str, Any]


def parse_batch_line(columns: Mapping[str, Any]) -> BatchRequest:
    """Read the fields of one line.

    Raises RowProblem: missing_column for an absent field, bad_type for one of a wrong type, bad_param for a
    method, url or body field that is not supported, which it names.
    """
    for name, kind in _LINE_FIELDS:
        if name not in columns:
            raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no field {name!r} in this OpenAI Batch line")
        if not isinstance(columns[name], kind):
            expected = type_name(kind())
            raise RowProblem(RowErrorCode.BAD_TYPE, f"{name!r} is {type_name(columns[name])}, not {expected}")
    if columns["method"] != "POST":
        raise RowProblem(RowErrorCode.BAD_PARAM, f"method is {columns['method']!r}, not 'POST'")
    url, body = columns["url"], columns["body"]
    if url not in (_CHAT_URL, _COMPLETION_URL):
        raise RowProblem(RowErrorCode.BAD_PARAM, f"url {url!r} is neither {_CHAT_URL!r} nor {_COMPLETION_URL!r}")
    content_field = "messages" if url == _CHAT_URL else "prompt"
    if content_field not in body:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no {content_field!r} in the body of this request to {url}")
    return BatchRequest(url == _CHAT_URL, body[content_field], _sampling(body, content_field))


def _sampling(body: Mapping[str, Any], content_field: str) -> dict[str, Any]:
    """The body's sampling values under this package's names; refuses a field that could not be honoured."""
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name in PARAM_KEYS:
            sampling[name] = value
        elif value is None or name == content_field or name in _IGNORED or name == "max_completion_tokens":
            continue
        elif value not in _NEUTRAL.get(name, ()):
            raise RowProblem(RowErrorCode.BAD_PARAM, f"body field {name!r} is not supported with this value")
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    return sampling

"""OpenAI Batch request lines: their prompt and their sampling values under this package's names.

Fields and urls follow OpenAI's Batch API with vLLM's extra sampling keys in the body. The ``model`` in a body is
ignored: the job's model answers. A field that would change the answer and is not supported is refused by name; a
field that only concerns OpenAI's service is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.config.sampling import ROW_KEYS
from batchgen.core.errors import RowErrorCode
from batchgen.core.records import CHAT_URL, COMPLETION_URL, url_of
from batchgen.input.rows import RowProblem, type_name, wrong_type

_LINE_FIELDS = (("custom_id", str), ("body", dict), ("method", str), ("url", str))
_IGNORED = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "verbosity"}
    | {"reasoning_effort"}
    | {"prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
)
# Fields that ask for something other than plain text, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),  # of a completion: a chat's are read
    "tool_choice": ("none", "auto"),  # others would have to be enforced
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
}
_OF_CHATS = ("top_logprobs", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The parts of a request, not yet checked: its messages (a chat) or its prompt, and its sampling values.

    ``variables`` are what else a chat passes to its template. With ``tool_choice`` "none" its tools stay out of the
    prompt: a model that knows of none calls none.
    """

    is_chat: bool
    content: Any
    sampling: Mapping[str, Any]
    variables: Mapping[str, Any]


def parse_batch_line(columns: Mapping[str, Any]) -> BatchRequest:
    """Read the fields of one line. ``method`` defaults to POST, ``url`` to the one that fits the body.

    Raises RowProblem: missing_column for an absent field, bad_type for one of a wrong type, bad_param for a
    method, url or body field that is not supported, which it names.
    """
    line = {"method": "POST", **columns, "url": url_of(columns)}
    for name, kind in _LINE_FIELDS:
        if name not in line:
            raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no field {name!r} in this OpenAI Batch line")
        if not isinstance(line[name], kind):
            raise wrong_type(repr(name), line[name], type_name(kind()))
    if line["method"] != "POST":
        raise RowProblem(RowErrorCode.BAD_PARAM, f"method is {line['method']!r}, not 'POST'")
    url, body = line["url"], line["body"]
    if url not in (CHAT_URL, COMPLETION_URL):
        raise RowProblem(RowErrorCode.BAD_PARAM, f"url {url!r} is neither {CHAT_URL!r} nor {COMPLETION_URL!r}")
    is_chat = url == CHAT_URL
    content_field = "messages" if is_chat else "prompt"
    if content_field not in body:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no {content_field!r} in the body of this request to {url}")
    sampling = _sampling(body, {content_field, "max_completion_tokens", *(_OF_CHATS if is_chat else ())})
    if is_chat:
        sampling |= _chat_logprobs(body)
    taken = ["chat_template_kwargs", *(["tools"] if body.get("tool_choice") != "none" else [])]
    return BatchRequest(is_chat, body[content_field], sampling, {name: body.get(name) for name in taken})


def _sampling(body: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The body's sampling values under this package's names; refuses unsupported fields, except those in ``read``."""
    sampling: dict[str, Any] = {}
    neutral = _NEUTRAL | {"best_of": (body.get("n") or 1,)}  # the best n of n are all of them
    neutral["top_logprobs"] = ()  # read from a chat only
    for name, value in body.items():
        if name in ROW_KEYS:
            sampling[name] = value
        elif value is None or name in read or name in _IGNORED:
            continue
        elif name not in neutral:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"unknown field {name!r} in the body")
        elif value not in neutral[name]:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"body field {name!r} is not supported with this value")
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    return sampling


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat gives a boolean in ``logprobs`` and the number in ``top_logprobs``, a completion the number in one."""
    wanted, num_top = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(wanted, bool | None):
        raise RowProblem(RowErrorCode.BAD_PARAM, "body field 'logprobs' of a chat must be true or false")
    if num_top and not wanted:
        raise RowProblem(RowErrorCode.BAD_PARAM, "body field 'top_logprobs' needs 'logprobs': true")
    return {"logprobs": num_top} if wanted and num_top is not None else {}

"""OpenAI Batch request lines (with vLLM's extra sampling keys): prompt and sampling values under this package's names.

An unsupported field that would change the answer is refused by name; others, and ``model``, are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.config.record_fields import CHAT_URL, COMPLETION_URL, EMBEDDING_URL, url_of
from batchgen.config.sampling import ROW_KEYS
from batchgen.core.errors import RowErrorCode
from batchgen.core.structured import OLD_NAMES
from batchgen.core.units import shown
from batchgen.input.rows import Embedded, RowProblem, type_name, wrong_type

_LINE_FIELDS = (("custom_id", str), ("body", dict), ("method", str), ("url", str))
_SERVICE = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention"}
)
# Fields that ask for something other than plain text, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),  # only for completions: a chat's tools are read
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "echo": (False,),
    "suffix": ("",),
}
_CONTENT_FIELDS = {CHAT_URL: "messages", COMPLETION_URL: "prompt", EMBEDDING_URL: "input"}
_ENCODINGS = ("float", "base64")
_MAX_INPUTS = 2048  # OpenAI's limit
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_VARIABLES = ("chat_template_kwargs", "tools", "tool_choice", "continue_final_message")
_PREDICTION = "prediction"  # it only saves time at OpenAI
_OF_CHATS = ("chat_template_kwargs", "continue_final_message", "tools", "top_logprobs", "reasoning_effort", _PREDICTION)
# Fields of a request that decide its answer, and are only read in a body and in ``sampling``.
REQUEST_FIELDS = frozenset(
    {*ROW_KEYS, *OLD_NAMES, *_NEUTRAL, "max_completion_tokens", "reasoning_effort", "extra_body"}
)
_OF_STREAMS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
_OF_FUNCTIONS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The parts of a request, not yet checked: its messages (a chat) or its prompt, and its sampling values.

    ``variables`` are further variables of a chat's template, ``effort`` is its ``reasoning_effort`` as given (see
    ``effort_kwargs``), ``embedding`` the fields of a request for a vector.
    """

    is_chat: bool
    content: Any
    sampling: Mapping[str, Any]
    variables: Mapping[str, Any]
    effort: Any = None
    embedding: Mapping[str, Any] | None = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.variables.get("tools")) and self.variables.get("tool_choice") != "none"


def parse_batch_line(columns: Mapping[str, Any]) -> BatchRequest:
    """Read the fields of one line. ``method`` defaults to POST, ``url`` to the url that fits the body.

    Raises RowProblem: missing_column for an absent field, bad_type for one of a wrong type, bad_param naming a
    method, url or body field that is not supported.
    """
    line = {"method": "POST", **columns, "url": url_of(columns)}
    for name, expected in _LINE_FIELDS:
        if name not in line:
            raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no field {name!r} in this OpenAI Batch line")
        if not isinstance(line[name], expected):
            raise wrong_type(repr(name), line[name], type_name(expected()))
    if line["method"] != "POST":
        raise RowProblem(RowErrorCode.BAD_PARAM, f"method is {line['method']!r}, not 'POST'")
    url, body = line["url"], line["body"]
    if url not in _CONTENT_FIELDS:
        raise RowProblem(RowErrorCode.BAD_PARAM, f"url {url!r} is not one of {', '.join(map(repr, _CONTENT_FIELDS))}")
    is_chat, content_field = url == CHAT_URL, _CONTENT_FIELDS[url]
    if content_field not in body:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no {content_field!r} in the body of this request to {url}")
    if url == EMBEDDING_URL:
        return BatchRequest(False, body["input"], {}, {}, embedding=_embedding_fields(body))
    read = {content_field, "max_completion_tokens", "stream_options", *(_OF_CHATS if is_chat else ())}
    sampling = _sampling(body, read)
    _check_inside("stream_options", body.get("stream_options"), _OF_STREAMS)
    if not is_chat:
        return BatchRequest(False, body[content_field], sampling, {})
    _check_tools(body)
    if not isinstance(continues := body.get("continue_final_message"), bool | None):
        raise wrong_type("body field 'continue_final_message'", continues, "a boolean")
    variables = {name: body.get(name) for name in _VARIABLES}
    return BatchRequest(
        True, body[content_field], sampling | _chat_logprobs(body), variables, body.get("reasoning_effort")
    )


def effort_kwargs(effort: Any, names: Collection[str]) -> dict[str, Any]:
    """The variables that a ``reasoning_effort`` sets in a chat template with variables ``names``; {} for null.

    "none" switches reasoning off, any other effort switches it on, as in vLLM. Raises RowProblem bad_param for another
    value, and if the template has neither variable.
    """
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        message = f"body field 'reasoning_effort' is {shown(effort, 60)}, not one of {', '.join(_EFFORTS)}"
        raise RowProblem(RowErrorCode.BAD_PARAM, message)
    variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    kwargs = {name: value for name, value in variables.items() if name in names}
    if not kwargs:
        why = f"the model's chat template has no variable for it ({' or '.join(variables)})"
        raise RowProblem(RowErrorCode.BAD_PARAM, f"body field 'reasoning_effort': {why}; leave it out")
    return kwargs


def _check_tools(body: Mapping[str, Any]) -> None:
    """Refuse tools that are not functions or have unknown fields, and ``parallel_tool_calls = false``.

    ``messages`` checks that tools are objects. Raises RowProblem bad_param.
    """
    tools, is_free = body.get("tools"), body.get("tool_choice") != "none"
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return
    if tools and is_free and body.get("parallel_tool_calls") is False:
        why = "a model may call several tools: leave it out"
        raise RowProblem(RowErrorCode.BAD_PARAM, f"body field 'parallel_tool_calls' is false: {why}")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        _check_tool(f"tools[{number}]", tool, is_free=is_free)


def _check_tool(field: str, tool: Any, *, is_free: bool) -> None:
    """Refuse all but ``{"type": "function", "function": {...}}``, and strict functions if the model may call them."""
    if not isinstance(tool, dict):
        return
    if tool.get("type", "function") != "function":
        message = f"body field '{field}' is of the type {shown(tool['type'], 60)}: only functions are supported"
        raise RowProblem(RowErrorCode.BAD_PARAM, message)
    _check_inside(field, tool, ("type", "function"))
    _check_inside(f"{field}.function", tool.get("function"), _OF_FUNCTIONS)
    if is_free and (tool.get("function") or {}).get("strict"):
        why = "arguments are not held to a schema: leave it out"
        raise RowProblem(RowErrorCode.BAD_PARAM, f"body field '{field}.function.strict' is true: {why}")


def _check_inside(field: str, value: Any, names: Collection[str]) -> None:
    """Refuse unknown fields of an object in the body."""
    if value is not None and not isinstance(value, dict):
        raise wrong_type(f"body field '{field}'", value, "an object")
    for name, item in (value or {}).items():
        if item is not None and name not in names:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"unknown field {name!r} in body field '{field}'")


def _sampling(body: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The body's sampling values under this package's names; refuses unsupported fields, except those in ``read``."""
    sampling: dict[str, Any] = {}
    neutral = _NEUTRAL | {"best_of": (body.get("n") or 1,)}  # the best n of n are all of them
    neutral["top_logprobs"] = ()  # read from a chat only
    neutral["add_generation_prompt"] = (not body.get("continue_final_message"),)  # vLLM wants it with that
    for name, value in body.items():
        if name in (*ROW_KEYS, *OLD_NAMES):
            sampling[name] = value
        elif value is None or name in read or name in _SERVICE:
            continue
        elif name not in neutral:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"unknown field {name!r} in the body")
        elif value not in neutral[name]:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"body field {name!r} is not supported with this value")
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    return sampling


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """``logprobs`` as a number: a chat gives it as a boolean and ``top_logprobs``, a completion directly."""
    wanted, num_top = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(wanted, bool | None):
        raise RowProblem(RowErrorCode.BAD_PARAM, "body field 'logprobs' of a chat must be true or false")
    if num_top and not wanted:
        raise RowProblem(RowErrorCode.BAD_PARAM, "body field 'top_logprobs' needs 'logprobs': true")
    return {"logprobs": num_top} if wanted and num_top is not None else {}


def check_purpose(request: BatchRequest, embedded: Embedded | None) -> None:
    """Refuse a request for a vector in a job for text, and the other way round. Raises RowProblem bad_param."""
    vector = request.embedding
    if (vector is None) != (embedded is None):
        what = (
            "a text, and this job gives embeddings: run such rows as a job of their own, without [embed]"
            if vector is None
            else "an embedding, and this job gives text: run such rows as a job of their own, with --pooling"
        )
        raise RowProblem(RowErrorCode.BAD_PARAM, f"the request is for {what}")
    if vector and embedded and vector["dimensions"] not in (None, embedded.dimensions):
        what = f"body field 'dimensions' is {shown(vector['dimensions'])}"
        raise RowProblem(RowErrorCode.BAD_PARAM, f"{what}, and the job's embeddings have {embedded.dimensions}")


def inputs_of(value: Any, embedded: Embedded) -> dict[str, Any]:
    """The texts, or lists of token ids, of a request for vectors, by their names in errors. May raise RowProblem."""
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return {"body.input": value}
    max_inputs = _MAX_INPUTS if embedded.takes_lists else 1
    if len(value) > max_inputs:
        remedy = f"at most {max_inputs:,} are taken" if max_inputs > 1 else "give each its own line"
        raise RowProblem(RowErrorCode.BAD_PARAM, f"body field 'input' holds {len(value):,} texts: {remedy}")
    return {f"body.input[{number}]": item for number, item in enumerate(value)}


def _embedding_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for a vector; refuses unknown ones."""
    for name, value in body.items():
        if value is not None and name not in ("input", "encoding_format", "dimensions", *_SERVICE):
            raise RowProblem(RowErrorCode.BAD_PARAM, f"unknown field {name!r} in the body")
    encoding = body.get("encoding_format") or "float"
    if encoding not in _ENCODINGS:
        raise RowProblem(RowErrorCode.BAD_PARAM, f"body field 'encoding_format' is not one of {', '.join(_ENCODINGS)}")
    return {"encoding_format": encoding, "dimensions": body.get("dimensions")}

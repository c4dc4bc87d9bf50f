"""Messages and tools of a chat, checked and brought into the one form that chat templates expect.

Rows bring them in the forms of several clients, or as JSON text; nothing is rendered here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from batchgen.core.errors import RowErrorCode
from batchgen.core.units import shown
from batchgen.input.rows import RowProblem, is_null, parse_json, type_name, wrong_type
from batchgen.text.marks import REASONING

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # where it is
_MEDIA = ("audio", "image", "images", "video", "videos")  # of a message: content that is not text
_SAYS = (str, list, dict)
# Keys of a turn and of a call that do not replace its content or arguments.
_ABOUT = frozenset({"role", "content", "refusal", "annotations", "finish_reason", "id", "metadata", "model", "name"})
_ABOUT |= {"phase", "status", "tool_call_id", "type"}
_ABOUT_CALLS = frozenset({"name", "arguments", "call_id", "description", "function", "id", "status", "type"})
_REASONING_LISTS = ("reasoning_details", "thinking_blocks")  # of OpenRouter and LiteLLM; no template reads them
_SHAREGPT_KEYS = {"from", "value"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_NO_ARGUMENTS = (None, "", "null")
Message = dict[str, Any]


def checked_messages(name: str, value: object) -> list[Message]:
    """The messages in column ``name``, a list or its JSON text: objects with a ``role`` and a ``content``.

    Null keys and empty ``tool_calls`` are dropped, as by transformers and vLLM, since templates ask whether a key is
    defined. Content is a text, or a list of text parts with any of OpenAI's names for their type. An assistant's turn
    may lack content if it has calls, reasoning or a refusal (its text becomes the content). ``function_call``, the
    older form, becomes a call. Arguments that are JSON text or empty become objects, as in vLLM: a template would quote
    them twice. Reasoning may have any of its names, but several must agree. ``from`` and ``value`` of ShareGPT are role
    and content. Other fields stay unchanged. Raises RowProblem, bad_type or empty_prompt.
    """
    value = _from_text(f"column {name!r}", value, "a list of messages")
    messages = [_checked_message(f"{name}[{number}]", item) for number, item in enumerate(value)]
    if not any(has_text(message["content"]) for message in messages):
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {name!r} has no message with any text")
    return messages


def _from_text(what: str, value: object, expected: str) -> list[Any]:
    """The list in a value, which may be JSON text, as in tables. Raises RowProblem bad_type."""
    if isinstance(value, str) and value:
        try:
            value = parse_json(value)
        except RowProblem as problem:
            message = f"{what} is a string that is not JSON, not {expected}: {problem}"
            raise RowProblem(RowErrorCode.BAD_TYPE, message) from None
    if value == "":
        value = []
    if not isinstance(value, list):
        raise wrong_type(what, value, expected)
    return value


def _object(field: str, value: object) -> dict[str, Any]:
    """An object, or its JSON text: pandas reads ``arrow.json`` columns as text. Raises RowProblem bad_type."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except RowProblem:
            raise wrong_type(field, value, "an object") from None
    if not isinstance(value, dict):
        raise wrong_type(field, value, "an object")
    return value


def has_text(content: str | list[dict[str, Any]]) -> bool:
    """Whether the content of a checked message has more than white space."""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return any(text.strip() for text in texts)


def _checked_message(field: str, message: object) -> Message:
    message = {key: value for key, value in _object(field, message).items() if value is not None}
    if message.keys() == _SHAREGPT_KEYS and isinstance(speaker := message["from"], str):
        message = {"role": _SHAREGPT_ROLES.get(speaker, speaker), "content": message["value"]}
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_type(f"{field}.role", role, "a string")
    if media := [name for name in _MEDIA if message.get(name)]:
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{field}.{media[0]}: only text is supported")
    calls = _checked_calls(field, message)
    message.pop("tool_calls", None)
    content = _checked_content(f"{field}.content", role, message, bool(calls))
    message = _with_reasoning(field, message)
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _with_reasoning(field: str, message: Message) -> Message:
    """A message with its reasoning, if it has any, under all names that templates read."""
    texts = {name: message[name] for name in REASONING if message.get(name)}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise wrong_type(f"{field}.{name}", value, "a string")
        if value != (first := next(iter(texts.values()))):
            what = f"{field} has other text in {name} than in {next(iter(texts))}: a template shows one of them at most"
            raise RowProblem(RowErrorCode.BAD_TYPE, what)
    if lists := [name for name in _REASONING_LISTS if message.get(name) and not texts]:
        what = f"{field}.{lists[0]}: give the reasoning as a text, in reasoning_content"
        raise RowProblem(RowErrorCode.BAD_TYPE, what)
    if not texts and "" not in map(message.get, REASONING):
        return {key: value for key, value in message.items() if key not in REASONING}
    text = first if texts else ""
    return {
        "thinking": text,
        **message,
        **{name: text for name in REASONING if name in message},
        "reasoning_content": text,
    }


def _checked_content(field: str, role: str, message: Message, has_calls: bool) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if not content and isinstance(message.get("refusal"), str):
        return str(message.pop("refusal"))
    if isinstance(content, list):
        return [_checked_part(f"{field}[{number}]", part) for number, part in enumerate(content)] or ""
    if content is None and (role == "assistant" or has_calls):
        if not has_calls and not any(name in message for name in REASONING):
            _check_said(field, "turn", message, _ABOUT)
        return ""
    if not isinstance(content, str):
        raise wrong_type(field, content, "a string")
    return content


def _check_said(field: str, what: str, value: Mapping[str, Any], about: Collection[str]) -> None:
    """Refuse a message that is empty under the name ``field`` but has text under another name, unknown to templates."""
    if others := [key for key, item in value.items() if key not in about and item and isinstance(item, _SAYS)]:
        why = f"is missing, and the {what} has {shown(others[0], 60)}, which no template reads"
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{field} {why}")


def _checked_part(field: str, part: object) -> dict[str, Any]:
    """A part of a message's content, checked and converted to a part of type "text"."""
    if not isinstance(part, dict):
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{field} is {type_name(part)}: only text parts are supported")
    part = {key: value for key, value in part.items() if value is not None}
    part_type = part.pop("type", None)
    if not isinstance(part_type, str):
        raise wrong_type(f"{field}.type", part_type, "a string")
    if (name := _TEXT_PARTS.get(part_type)) is None:
        raise RowProblem(
            RowErrorCode.BAD_TYPE, f"{field}.type is {shown(part_type, 60)}: only text parts are supported"
        )
    if not isinstance(text := part.pop(name, None), str):
        raise wrong_type(f"{field}.{name}", text, "a string")
    return {"type": "text", "text": text, **part}


def _checked_calls(field: str, message: Message) -> list[dict[str, Any]]:
    calls = _from_text(f"{field}.tool_calls", message.get("tool_calls", []) or [], "a list of objects")
    older = message.pop("function_call", None)
    if older and calls:
        what = f"{field} has both tool_calls and function_call, the older form of one call: give one of them"
        raise RowProblem(RowErrorCode.BAD_TYPE, what)
    if older:
        calls = [{"type": "function", "function": older}]
    return [_checked_call(f"{field}.tool_calls[{number}]", call) for number, call in enumerate(calls)]


def _checked_call(field: str, call: object) -> dict[str, Any]:
    """A call with its arguments as an object; without ``function``, the call itself is the function."""
    call = _object(field, call)
    is_flat = call.get("function") is None and "name" in call
    function = call if is_flat else _object(f"{field}.function", call.get("function"))
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{field}.function.name", function.get("name"), "a string")
    made = _with_arguments(field if is_flat else f"{field}.function", function)
    return made if is_flat else {**call, "function": made}


def _with_arguments(field: str, function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    text = arguments.strip() if isinstance(arguments, str) else arguments
    if text in _NO_ARGUMENTS:
        _check_said(f"{field}.arguments", "call", function, _ABOUT_CALLS)
        return {**function, "arguments": {}}
    try:
        parsed = parse_json(text) if isinstance(text, str) else arguments
    except RowProblem:
        return function  # a text that is not JSON stays unchanged
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function


def checked_tools(value: object) -> list[dict[str, Any]]:
    """The tools of a row, if there are any; datasets often hold such objects as JSON text. Raises RowProblem."""
    tools = _from_text("'tools'", [] if is_null(value) or value == "null" else value, "a list of objects")
    return [_checked_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]


def _checked_tool(field: str, tool: object) -> dict[str, Any]:
    """A tool with its function, schema and properties, if given, as objects; they may be JSON text."""
    tool = _object(field, tool)
    if tool.get("function") is None:
        return _with_objects(field, tool)
    field = f"{field}.function"
    return {**tool, "function": _with_objects(field, _object(field, tool["function"]))}


def _with_objects(field: str, function: dict[str, Any]) -> dict[str, Any]:
    if function.get("parameters") is None:
        return function
    field = f"{field}.parameters"
    schema = _object(field, function["parameters"])
    if schema.get("properties") is None:
        return {**function, "parameters": schema}
    properties = _object(f"{field}.properties", schema["properties"])
    parsed = {
        name: _object(f"{field}.properties[{name!r}]", item) if isinstance(item, str) else item
        for name, item in properties.items()
    }
    return {**function, "parameters": {**schema, "properties": parsed}}

"""Messages and tools of a chat, as a row brings them: what they may hold before a chat template sees them.

It knows no columns beside the values that it is given, and renders nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from batchgen.core.errors import RowErrorCode
from batchgen.core.units import shown
from batchgen.input.rows import RowProblem, type_name, wrong_type

_REASONING = ("reasoning_content", "thinking", "reasoning")  # of a message; templates read the first two
Message = dict[str, Any]


def checked_messages(name: str, value: object) -> list[Message]:
    """The messages in column ``name``: objects with a ``role`` and a ``content`` that is text.

    Content given as OpenAI's list of ``{"type": "text", "text": ...}`` parts is joined, and may be absent beside
    ``tool_calls``, whose arguments become objects where they are JSON text, as in vLLM: a template would quote them
    twice. Earlier reasoning goes by any of its names, as in transformers. Other fields go to the template untouched.
    """
    if not isinstance(value, list):
        raise wrong_type(f"column {name!r}", value, "a list of messages")
    messages = [_checked_message(f"{name}[{number}]", item) for number, item in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {name!r} has no message with any text")
    return messages


def _checked_message(where: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(where, message, "an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise wrong_type(f"{where}.role", role, "a string")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{number}]", part) for number, part in enumerate(content))
    calls = message.get("tool_calls")
    if calls and content is None:
        content = ""
    if not isinstance(content, str):
        raise wrong_type(f"{where}.content", content, "a string")
    parsed = {"tool_calls": [_parsed_call(call) for call in calls]} if calls and isinstance(calls, list) else {}
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return {**message, "content": content, **parsed}


def _parsed_call(call: Any) -> Any:
    """A call of a tool with its arguments as an object, where they are one in JSON."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}} if isinstance(arguments, dict) else call


def _part_text(where: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type_name(part)
    raise RowProblem(RowErrorCode.BAD_TYPE, f"{where} is {kind!r}: only text parts are supported")


def checked_tools(value: object) -> list[dict[str, Any]]:
    """The tools of a row, if there are any; datasets often hold such objects as JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        tools = value
    if not tools and isinstance(tools, list | str | None):
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise wrong_type("'tools'", tools, "a list of objects")
    return tools


def chosen_tools(choice: object, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The tools of which one must be called: none, all, or the one that ``tool_choice`` names."""
    if choice in (None, "none", "auto"):
        return ()
    name = _function_name(choice)
    found = [tool for tool in tools if choice == "required" or (name is not None and _function_name(tool) == name)]
    if not found:
        what = (
            "none, auto, required, or a function among the tools, as {'type': 'function', 'function': {'name': NAME}}"
        )
        raise RowProblem(RowErrorCode.BAD_PARAM, f"tool_choice = {shown(choice, 80)} must be {what}")
    return found


def _function_name(value: object) -> object:
    """The name in ``{"type": "function", "function": {"name": ...}}``."""
    function = value.get("function") if isinstance(value, dict) else None
    return function.get("name") if isinstance(function, dict) else None

"""A chat as rows carry it, checked and brought into the one form that chat templates read."""

from __future__ import annotations

from typing import Any

from batchgen.core.errors import RowErrorCode
from batchgen.input.rows import RowProblem, type_name

Message = dict[str, Any]


def check_messages(name: str, value: Any) -> list[Message]:
    """The messages in column ``name``: objects with a ``role`` and a ``content`` that is text.

    Content given as OpenAI's list of ``{"type": "text", "text": ...}`` parts is joined; other fields go to the
    template untouched. Raises RowProblem: bad_type for another shape, empty_prompt where nothing is said.
    """
    if not isinstance(value, list):
        raise RowProblem(RowErrorCode.BAD_TYPE, f"column {name!r} is {type_name(value)}, not a list of messages")
    messages = [_check_message(f"{name}[{number}]", item) for number, item in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"column {name!r} has no message with any text")
    return messages


def _check_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{where} is {type_name(message)}, not an object")
    if not isinstance(message.get("role"), str):
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{where}.role is {type_name(message.get('role'))}, not a string")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{number}]", part) for number, part in enumerate(content))
    if not isinstance(content, str):
        raise RowProblem(RowErrorCode.BAD_TYPE, f"{where}.content is {type_name(content)}, not a string")
    return {**message, "content": content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type_name(part)
    raise RowProblem(RowErrorCode.BAD_TYPE, f"{where} is {kind!r}: only text parts are supported")

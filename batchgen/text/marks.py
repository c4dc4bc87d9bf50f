"""Marks in a chat: words in place of its texts, calls and tools, so that a prompt shows which a template uses.

A mark consists of letters and digits, which templates leave unchanged; case does not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Variables = Mapping[str, Any]  # of a template, ``messages`` among them
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's thoughts; templates read the first two
_MARK = re.compile(r"zq(\d+)qz|731(\d{7})")
_FIRST_NUMBER = 7_310_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a chat: the number of its message (None outside messages), and its key."""

    message: int | None
    key: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Findings of a probe: parts that are missing in its prompt, and messages whose parts are there unchanged."""

    prompt: str
    hidden: Sequence[Place]
    dumped: frozenset[int]


def marked_chat(chat: Variables, appends: bool) -> tuple[Variables, _Marks]:
    """A chat with marks in it; ids, types and values without text stay, since a template may branch on them."""
    marks = _Marks(appends)
    marked = {**chat, "messages": [marks.message(*item) for item in enumerate(chat["messages"])]}
    if chat.get("tools"):
        marked["tools"] = [marks.tool(*item) for item in enumerate(chat["tools"])]
    return marked, marks


class _Marks:
    """Words that mark the parts of one chat, in place of its texts or after them."""

    def __init__(self, appends: bool) -> None:
        self._appends = appends
        self._places: list[Place] = []
        self._dumps: dict[int, int] = {}  # mark in the keys of a message's parts -> the message

    def seen(self, prompt: str) -> Seen:
        """The findings in a prompt that the template made of the marked chat."""
        shown = {int(text or number) for text, number in _MARK.findall(prompt.casefold())}
        hidden = [place for n, place in enumerate(self._places) if n not in shown and n not in self._dumps]
        return Seen(prompt, hidden, frozenset(self._dumps[n] for n in shown & self._dumps.keys()))

    def message(self, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with a mark in each of its parts; ``number`` is its place in the chat."""
        role = str(message.get("role"))
        marked = dict(message)
        for key in ("content", "refusal"):
            if isinstance(message.get(key), str):
                marked[key] = self._text(message[key], Place(number, key, role))
        if isinstance(message.get("content"), list):
            self._places.append(Place(number, "content", role))
            self._dumps[len(self._places) - 1] = number
            unread = {f"zq{len(self._places) - 1}qz": True}
            marked["content"] = [
                {**part, "text": self._text(part["text"], Place(number, f"content[{n}]", role)), **unread}
                for n, part in enumerate(message["content"])
            ]
        names = [name for name in REASONING if isinstance(message.get(name), str)]
        if names:
            marked |= dict.fromkeys(names, self._text(message[names[0]], Place(number, names[0], role)))
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                self._call(call, Place(number, f"tool_calls[{n}]", role)) for n, call in enumerate(calls)
            ]
        return marked

    def tool(self, number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        """A tool's function with a mark in each of its parts; ``number`` is its place among the tools."""
        function = function_of(tool)
        marked = dict(function)
        if not function.get("name"):  # no function: a template that writes the whole of a tool shows a key more
            marked[self._text("name", Place(None, f"tools[{number}]")).split()[-1]] = True
        for key in ("name", "description"):
            if key in function:
                marked[key] = self._text(function[key], Place(None, f"tools[{number}], its {key}"))
        if function.get("parameters") is None:  # their schema may go by another name
            for key in [key for key, value in function.items() if value and isinstance(value, dict)]:
                marked[key] = {**function[key], self._text(key, Place(None, f"tools[{number}], its {key}")): True}
        schema = function.get("parameters")
        schema = schema if isinstance(schema, dict) else {}
        properties = schema.get("properties")
        if isinstance(properties, dict) and not self._appends:
            place = Place(None, f"tools[{number}], its parameters")
            names = {name: self._text(name, place) for name in properties}
            marked["parameters"] = {**schema, "properties": {names[name]: value for name, value in properties.items()}}
            if isinstance(required := schema.get("required"), list):
                renamed = [names.get(name, name) if isinstance(name, str) else name for name in required]
                marked["parameters"]["required"] = renamed
        return {**tool, "function": marked} if function is not tool else marked

    def _call(self, call: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
        function = function_of(call)
        marked = {
            **function,
            **{key: self._value(function[key], place) for key in ("name", "arguments") if key in function},
        }
        return {**call, "function": marked} if function is not call else marked

    def _value(self, value: Any, place: Place) -> Any:
        """A value of a call's arguments; a number stays one, since a template may write it in another way."""
        if isinstance(value, dict):
            return {key: self._value(item, place) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, place) for item in value]
        if isinstance(value, str):
            return self._text(value, place)
        if self._appends:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._text("null", place)
        self._places.append(place)
        return type(value)(_FIRST_NUMBER + len(self._places) - 1)

    def _text(self, value: Any, place: Place) -> Any:
        if not isinstance(value, str) or not value.strip():
            return value
        self._places.append(place)
        mark = f"zq{len(self._places) - 1}qz"
        return f"{value} {mark}" if self._appends else mark


def function_of(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool or a call, which may itself be one."""
    function = item.get("function")
    return function if isinstance(function, dict) else item

"""Marks in a chat: words added to its texts, calls and tools, so that a prompt reveals which of them a template shows.

They are letters and digits, which templates leave unchanged; equal texts get equal marks, as templates compare them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Variables = Mapping[str, Any]  # of a template, ``messages`` among them
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's thoughts; templates read the first two


@dataclass(frozen=True, slots=True)
class Location:
    """A part of a chat: message number, if any, and key; ``is_unread`` if only a raw list would show its mark."""

    message: int | None
    key: str
    role: str = ""
    is_unread: bool = False


class MarkedChat:
    """A chat with marks: each part of its ``variables`` has one. Ids and types stay: templates may branch on them."""

    def __init__(self, chat: Variables) -> None:
        self._locations: list[tuple[int, Location]] = []  # each with the number of its mark
        self._numbers: dict[tuple[str, object], int] = {}  # of marks, by key and text
        text = json.dumps(chat, default=str).casefold()  # short marks suit templates that look at lengths
        self._head = f"zq{hashlib.sha256(text.encode()).hexdigest()[:16]}x" if "zq" in text else "zq"
        messages = [self._message(*item) for item in enumerate(chat["messages"])]
        tools = [_inside(tool, partial(self._tool, f"tools[{n}]")) for n, tool in enumerate(chat.get("tools") or ())]
        self.variables: dict[str, Any] = {**chat, "messages": messages, **({"tools": tools} if tools else {})}

    def hidden(self, prompt: str) -> Sequence[Location]:
        """The parts that ``prompt``, made of this chat, does not show, or prints as a raw list."""
        left, hidden = Counter(map(int, re.findall(rf"{self._head}(\d+)qz", prompt.casefold()))), []
        for number, location in reversed(self._locations):  # if only some of equal texts show, they are the last ones
            left[number] -= 1
            if (left[number] >= 0) == location.is_unread:
                hidden.append(location)
        return hidden[::-1]

    def _message(self, number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        location = partial(Location, number, role=str(message.get("role")))
        texts = [key for key in ("content", "refusal") if isinstance(message.get(key), str)]
        marked = {**message, **{key: self._marked(message[key], location(key)) for key in texts}}
        if isinstance(message.get("content"), list):
            unread = {self._mark(location("content", is_unread=True)): True}
            parts = enumerate(message["content"])
            marked["content"] = [
                {**part, "text": self._marked(part["text"], location(f"content[{n}]")), **unread} for n, part in parts
            ]
        if names := [name for name in REASONING if isinstance(message.get(name), str)]:
            marked |= dict.fromkeys(names, self._marked(message[names[0]], location(names[0])))
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                _inside(call, partial(self._call, location(f"tool_calls[{n}]"))) for n, call in enumerate(calls)
            ]
        return marked

    def _call(self, location: Location, call: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**call, **{key: self._marked(call[key], location) for key in ("name", "arguments") if key in call}}

    def _tool(self, name: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        if not tool.get("name"):  # not a function: a template that prints all of it shows the added key
            return {**tool, self._mark(Location(None, name)): True}
        schema = tool.get("parameters")
        keys = ["name", "description"]
        if schema is None:  # it may have another name
            keys += [key for key, value in tool.items() if value and isinstance(value, dict)]
        marked = {key: self._marked(tool[key], Location(None, f"{name}, its {key}")) for key in keys if key in tool}
        if isinstance(schema, dict) and (properties := schema.get("properties")):
            properties = self._marked(properties, Location(None, f"{name}, its parameters"))
            marked["parameters"] = {**schema, "properties": properties}
        return {**tool, **marked}

    def _marked(self, value: Any, location: Location) -> Any:
        """A value with a mark at its end; an object gets a marked key per type of its values. Blank values stay."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return value
        if isinstance(value, dict):
            of_each_type = {type(item): item for item in value.values()}.values()
            return {**value, **{self._mark(location): item for item in of_each_type}}
        mark = self._mark(location, value if isinstance(value, str) else None)
        return [*value, mark] if isinstance(value, list) else f"{value} {mark}"

    def _mark(self, location: Location, text: str | None = None) -> str:
        number = self._numbers.setdefault((location.key, text or object()), len(self._numbers))
        self._locations.append((number, location))
        return f"{self._head}{number}qz"


def _inside(item: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
    """A tool or call with ``change`` applied to its function, which is the item itself if it lacks ``function``."""
    function = item.get("function")
    return {**item, "function": change(function)} if isinstance(function, dict) else change(item)

"""Parser of tool calls: finds the calls that a model wrote into its answer, in its family's format; never runs them.

The format is chosen by its marker in template or vocabulary. New ones enter ``FORMATS`` and ``TOOL_SIGNS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.core.json_line import json_value
from batchgen.text.answer_facts import TOOL_SIGNS
from batchgen.text.call_notation import Offered, read_calls
from batchgen.text.tokenizer import Tokenizer

Call = dict[str, Any]  # its ``name``, and ``arguments``, an object
Found = tuple[list[Call], str]  # the calls in a text, and the rest of it
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*+")
_ARGUMENTS = ("arguments", "parameters")
_JSON = re.compile(r"\s*+(?:\{|\[\s*+\{)")
_MISTRAL_NAME = re.compile(r"([^\s\[{]++)(?:\[CALL_ID\][^\s\[{]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_BARE_CALL = re.compile(
    r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"[^"]*+"\s*+,\s*+"(?:parameters|arguments)"\s*+:'
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form in which a family writes calls; ``markers`` enclose them."""

    family: str
    find: Callable[[str, Offered], Found]

    @property
    def markers(self) -> tuple[str, ...]:
        return TOOL_SIGNS[self.family].markers

    def parse(self, text: str, offered: Offered | None = None) -> Found:
        """The calls in a text and the rest of it. Raises ValueError for malformed calls."""
        return self.find(text, offered or {})


class ToolCalls:
    """Reads the calls in answers of one model. ``tokenizer`` decodes with the markers in the text."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat) -> None:
        self.tokenizer = tokenizer.showing(form.markers)
        self._form = form

    def read(self, text: str, offered: Offered | None = None) -> tuple[list[Call], str, bool | None]:
        """The calls, the rest of the text, and whether the calls are complete (None without calls).

        ``offered`` are the tools of the row. If a call is malformed, none is taken and the text stays unchanged.
        """
        try:
            calls, rest = self._form.parse(text, offered)
        except ValueError:
            return [], text, False
        return (calls, rest, True) if calls else ([], text, None)


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format in which the model with this tokenizer writes calls, None if it is not known."""
    return next((form for form in FORMATS if form.family == tokenizer.answer_facts.tools), None)


def offered_tools(tools: object) -> Offered:
    """The names of tools that a row offers, each with the types of its parameters."""
    if isinstance(tools, str):
        try:
            tools = json_value(tools)
        except ValueError:
            return {}
    listed = [item for item in tools if isinstance(item, dict)] if isinstance(tools, list) else []
    functions = (item["function"] if isinstance(item.get("function"), dict) else item for item in listed)
    return {name: _types(item.get("parameters")) for item in functions if isinstance(name := item.get("name"), str)}


def _types(schema: Any) -> dict[str, str]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    listed = properties.items() if isinstance(properties, dict) else ()
    return {name: str(value.get("type", "")) if isinstance(value, dict) else "" for name, value in listed}


def _lfm2(text: str, offered: Offered) -> Found:
    """``<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>``, or JSON in it, which LFM2 writes when asked to.

    LFM2.5 at times leaves the markers out: then ``[f(`` of an offered tool begins its calls.
    """

    def read(text: str, at: int) -> tuple[list[Call], int]:
        if _JSON.match(text, at):
            return _json_calls(text, at)
        calls, end = read_calls(text, _past_space(text, at), offered)
        return [_call(*call) for call in calls], end

    opening, closing = _LFM2
    if opening in text or not offered:
        return _between(opening, closing, text, read)
    names = "|".join(map(re.escape, offered))
    marked = re.sub(rf"\[\s*+(?:{names})\(", lambda match: opening + match[0], text, count=1)
    return _between(opening, closing, marked, read) if marked != text else ([], text)


def _hermes(text: str, _: Offered) -> Found:
    """``<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>``, also by Qwen 2.5 and 3."""
    return _between("<tool_call>", "</tool_call>", text, _json_calls)


def _llama(text: str, _: Offered) -> Found:
    """``{"name": "f", "parameters": {"a": 1}}`` at the beginning or after a tag; ``;`` or ``,`` separate several."""
    before, tag, body = text.partition("<|python_tag|>")
    if not tag:
        if not _BARE_CALL.match(text):
            return [], text
        before, body = "", text
    calls, at = _json_calls(body, 0)
    while (behind := _past_space(body, at)) < len(body) and body[behind] in ";,{":
        more, at = _json_calls(body, behind + (body[behind] != "{"))
        calls += more
    return calls, _joined([before, body[at:]])


def _mistral(text: str, _: Offered) -> Found:
    """``[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`` or, since 2025, ``[TOOL_CALLS]f[ARGS]{"a": 1}``."""
    return _between("[TOOL_CALLS]", "", text, _named_or_json)


_LFM2 = TOOL_SIGNS["LFM2"].markers
FORMATS = (
    ToolFormat("LFM2", _lfm2),
    ToolFormat("Mistral", _mistral),
    ToolFormat("Hermes", _hermes),
    ToolFormat("Llama 3", _llama),
)
FAMILIES = ", ".join(form.family for form in FORMATS)


def _between(opening: str, closing: str, text: str, read: Callable[[str, int], tuple[list[Call], int]]) -> Found:
    """The calls after each ``opening``; a ``closing`` may be missing only if nothing else follows."""
    calls: list[Call] = []
    rest, at = [], 0
    while (begin := text.find(opening, at)) >= 0:
        rest.append(text[at:begin])
        more, end = read(text, begin + len(opening))
        calls += more
        at = _past_space(text, end)
        if closing and text.startswith(closing, at):
            at += len(closing)
        elif closing and at < len(text) and not text.startswith(opening, at):
            raise ValueError(f"{closing} is missing")
    return calls, _joined([*rest, text[at:]])


def _named_or_json(text: str, at: int) -> tuple[list[Call], int]:
    at = _past_space(text, at)
    if (head := _MISTRAL_NAME.match(text, at)) is None:
        return _json_calls(text, at)
    arguments, end = _json_at(text, head.end())
    return [_call(head[1], arguments)], end


def _json_calls(text: str, at: int) -> tuple[list[Call], int]:
    """A call, or a list of them, in JSON."""
    value, end = _json_at(text, at)
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            raise ValueError("a call is not an object")
        calls.append(_call(item.get("name"), next((item[name] for name in _ARGUMENTS if name in item), {})))
    return calls, end


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, blanks aside, and where it ends."""
    at = _past_space(text, at)
    try:
        end = _DECODER.raw_decode(text, at)[1]
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return json_value(text[at:end]), end


def _call(name: object, arguments: object) -> Call:
    if isinstance(arguments, str):  # as JSON text, as in OpenAI's API
        arguments = json_value(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call lacks a name, or its arguments are not an object")
    return {"name": name, "arguments": arguments}


def _past_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(stripped for part in parts if (stripped := part.strip()))

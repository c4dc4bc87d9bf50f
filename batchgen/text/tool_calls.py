"""Parser of tool calls: finds the calls that a model wrote into its answer, in the format of its family.

The format is that whose marker the chat template shows, else one whose marker is a token of the vocabulary: LFM2.5's
template shows none. Calls are read as data, never run, and not compared with the tools that were offered. A new family
is a function here, an entry of ``FORMATS``, and one of ``TOOL_SIGNS``.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.core.json_line import json_value
from batchgen.text.answer_facts import TOOL_SIGNS
from batchgen.text.tokenizer import Tokenizer

Call = dict[str, Any]  # its ``name``, and ``arguments``, an object
Found = tuple[list[Call], str]  # the calls in a text, and the rest of it
_DECODER = json.JSONDecoder()
_MAX_CHARS = 1 << 18  # of Python's notation, which takes a second and a hundred megabytes to parse
_SPACE = re.compile(r"\s*+")
_ARGUMENTS = ("arguments", "parameters")
_JSON = re.compile(r"\s*+(?:\{|\[\s*+\{)")
_MISTRAL_NAME = re.compile(r"([^\s\[{]++)(?:\[CALL_ID\][^\s\[{]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_BARE_CALL = re.compile(
    r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"[^"]*+"\s*+,\s*+"(?:parameters|arguments)"\s*+:'
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form in which a family writes calls.

    ``markers`` stand around them, the first one before. ``parse`` raises ValueError for malformed calls.
    """

    family: str
    parse: Callable[[str], Found]

    @property
    def markers(self) -> tuple[str, ...]:
        return TOOL_SIGNS[self.family].markers


class ToolCalls:
    """Reads the calls in answers of one model. ``tokenizer`` decodes with the markers in the text."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat) -> None:
        self.tokenizer = tokenizer.showing(form.markers)
        self._form = form

    def read(self, text: str) -> tuple[list[Call], str, bool | None]:
        """The calls, the rest of the text, and whether the calls are whole, None where there are none.

        Of malformed calls none is taken: the text stays as it is.
        """
        try:
            calls, rest = self._form.parse(text)
        except ValueError:
            return [], text, False
        return (calls, rest, True) if calls else ([], text, None)


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format in which the model with this tokenizer writes calls, None if it is not known."""
    return next((form for form in FORMATS if form.family == tokenizer.answer_facts.tools), None)


def _lfm2(text: str) -> Found:
    """``<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>``, or JSON in it, which LFM2 writes when asked to."""
    return _between(_LFM2[0], _LFM2[1], text, _python_or_json)


def _hermes(text: str) -> Found:
    """``<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>``, also by Qwen 2.5 and 3."""
    return _between("<tool_call>", "</tool_call>", text, _json_calls)


def _llama(text: str) -> Found:
    """``{"name": "f", "parameters": {"a": 1}}`` at the beginning or behind a tag, several separated by semicolons."""
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


def _mistral(text: str) -> Found:
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
    """The calls behind each ``opening``; a ``closing`` may be missing only where nothing else follows."""
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


def _python_or_json(text: str, at: int) -> tuple[list[Call], int]:
    if _JSON.match(text, at):
        return _json_calls(text, at)
    end = min((place for marker in _LFM2 if (place := text.find(marker, at)) >= 0), default=len(text))
    return _python_calls(text[at:end].strip()), end


def _python_calls(text: str) -> list[Call]:
    """A call in Python's notation, ``weather.now(city="Zürich", days=[1], metric=true)``, or a list of them."""
    if len(text) > _MAX_CHARS:
        raise ValueError("the calls are too long")
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes and literals that Python will refuse one day
            node = ast.parse(text, mode="eval").body
        return [_python_call(item) for item in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
    except (SyntaxError, TypeError, RecursionError, MemoryError):  # the parser says MemoryError for deep nesting
        raise ValueError("the calls are no literals in Python's notation") from None


def _python_call(node: ast.expr) -> Call:
    """A call whose arguments are literals, as JSON has them. Raises ValueError and TypeError; evaluates nothing."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call has no name, or arguments without names")
    names, part = [], node.func
    while isinstance(part, ast.Attribute):
        names.append(part.attr)
        part = part.value
    if not isinstance(part, ast.Name):
        raise ValueError("what is called has no name")
    arguments = {item.arg: ast.literal_eval(_JsonNames().visit(item.value)) for item in node.keywords if item.arg}
    if len(arguments) < len(node.keywords):
        raise ValueError("an argument is given twice, or has no name")
    return _call(".".join([part.id, *reversed(names)]), json_value(json.dumps(arguments)))


class _JsonNames(ast.NodeTransformer):
    """JSON's names of constants, which models write among Python's literals, as constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(json.loads(node.id)) if node.id in ("true", "false", "null") else node


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
            raise ValueError("a call is no object")
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
    if isinstance(arguments, str):  # as JSON text, the way OpenAI's API has it
        arguments = json_value(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or arguments that are no object")
    return {"name": name, "arguments": arguments}


def _past_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(stripped for part in parts if (stripped := part.strip()))

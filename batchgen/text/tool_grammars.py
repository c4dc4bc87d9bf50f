"""Grammars of tool calls: what an answer must look like that has to call a tool, in the format of the model's family.

A Lark grammar of llguidance, in which the arguments of each tool are held to its schema. In LFM2's notation arguments
come in the order of the schema, and their values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.core.units import shown
from batchgen.text.grammar_source import json_rule
from batchgen.text.python_calls import NAME
from batchgen.text.schemas import prepared
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import FAMILIES, tool_format

_DEFINITIONS = ("$defs", "definitions")
_COMBINING = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties")


class ToolGrammar:
    """The rules of one grammar, as its family's function adds them. ``is_many``: one call or several."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], *, is_many: bool) -> None:
        self._tokenizer = tokenizer
        self._is_many = is_many
        self._rules: list[str] = []
        self.tools = [_name_and_schema(tool) for tool in tools]

    def lark(self, start: str) -> str:
        """The text of the grammar, which begins with ``start``."""
        return "\n".join((f"start: {start}", *self._rules))

    def rule(self, body: str) -> str:
        """A new rule's name."""
        self._rules.append(f"rule_{len(self._rules)}: {body}")
        return f"rule_{len(self._rules) - 1}"

    def marker(self, token: str) -> str:
        """A token of the vocabulary, or its text where it is none."""
        token_id = self._tokenizer.token_id(token)
        return json.dumps(token) if token_id is None else f"<[{token_id}]>"

    def any_call(self, write: Callable[[ToolGrammar, str, Mapping[str, Any]], str]) -> str:
        """A rule for a call of any of the tools, which ``write`` makes of a name and a schema."""
        return self.rule(" | ".join(write(self, name, schema) for name, schema in self.tools))

    def repeated(self, call: str, separator: str = "") -> str:
        """One call, or several where that is allowed."""
        return f"{call} ({separator} {call})*" if self._is_many else call


def _lfm2(grammar: ToolGrammar) -> str:
    """``<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>``."""
    calls = grammar.repeated(grammar.any_call(_pythonic_call), '", "')
    return f'{grammar.marker("<|tool_call_start|>")} "[" {calls} "]" {grammar.marker("<|tool_call_end|>")}'


def _hermes(grammar: ToolGrammar) -> str:
    """``<tool_call>`` around a call in JSON."""
    call = grammar.any_call(_json_call("arguments"))
    opening, closing = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    return grammar.repeated(grammar.rule(rf'{opening} "\n" {call} "\n" {closing}'), r'"\n"')


def _llama(grammar: ToolGrammar) -> str:
    """Calls in JSON, without a tag, as Llama 3 calls what a user has defined."""
    return grammar.repeated(grammar.any_call(_json_call("parameters")), '"; "')


def _mistral(grammar: ToolGrammar) -> str:
    """``[TOOL_CALLS]f[ARGS]{...}`` where the vocabulary has both, else ``[TOOL_CALLS][...]`` with calls in JSON."""
    opening, between = grammar.marker("[TOOL_CALLS]"), grammar.marker("[ARGS]")
    if between.startswith("<"):
        named = grammar.any_call(
            lambda grammar, name, schema: f"{json.dumps(name)} {between} {grammar.rule(json_rule(schema))}"
        )
        return grammar.repeated(grammar.rule(f"{opening} {named}"))
    calls = grammar.repeated(grammar.any_call(_json_call("arguments")), '", "')
    return f'{opening} "[" {calls} "]"'


_WRITE = {"LFM2": _lfm2, "Mistral": _mistral, "Hermes": _hermes, "Llama 3": _llama}


def required_calls(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], *, is_many: bool) -> str:
    """A Lark grammar of answers that call one of ``tools``, or several. Raises ValueError where there is none."""
    form = tool_format(tokenizer)
    if form is None:
        raise ValueError(f"neither tokenizer nor chat template shows how this model calls tools ({FAMILIES})")
    grammar = ToolGrammar(tokenizer, tools, is_many=is_many)
    return grammar.lark(_WRITE[form.family](grammar))


def _json_call(key: str) -> Callable[[ToolGrammar, str, Mapping[str, Any]], str]:
    def write(grammar: ToolGrammar, name: str, schema: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{json.dumps(head)} {grammar.rule(json_rule(schema))} "}}"'

    return write


def _pythonic_call(grammar: ToolGrammar, name: str, schema: Mapping[str, Any]) -> str:
    if combining := [key for key in _COMBINING if key in schema]:
        raise ValueError(
            f"the parameters of {shown(name, 60)} have {combining[0]}, which calls of this model cannot show"
        )
    properties = schema.get("properties", {})
    for word in (name, *properties):
        if not NAME.fullmatch(word):
            raise ValueError(f"the name {shown(word, 60)} cannot be written in a call of this model")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    first, later = '""', '""'  # what may stand from an argument on: with none before it, and behind others
    for key, part in reversed(properties.items()):
        value = grammar.rule(json_rule({**part, **definitions} if isinstance(part, Mapping) else definitions))
        pair = grammar.rule(f"{json.dumps(f'{key}=')} {value}")
        if key in schema.get("required", ()):
            first, later = f"{pair} {later}", f'", " {pair} {later}'
        else:
            first, later = f"({pair} {later} | {first})", f'(", " {pair})? {later}'
        first, later = grammar.rule(first), grammar.rule(later)
    return f'{json.dumps(f"{name}(")} {first} ")"'


def _name_and_schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and the prepared schema of a tool. Raises ValueError."""
    said = tool.get("function", tool)
    name = said.get("name") if isinstance(said, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a tool has no name")
    given = said.get("parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"the parameters of {shown(name, 60)} are no JSON schema")
    takes_none = not any(item for key, item in given.items() if key not in ("type", "title", "description", "$schema"))
    nothing = {"properties": {}, "additionalProperties": False} if takes_none else {}
    return name, prepared({"type": "object", **nothing, **given}, closes_objects=True)

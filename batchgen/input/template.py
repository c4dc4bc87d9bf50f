"""Prompts made of columns: ``"Name a city in {country}, as in {examples[0][city]}."``.

Python's format notation cut down to what data needs: a field is a column name and then any number of ``[key]`` or
``[number]`` steps into objects and lists. There is no attribute access, no conversion and no format spec, so a
template can reach nothing but the row. ``{{`` and ``}}`` are literal braces; a dot is part of a column's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.json_line import encode_json
from batchgen.input.rows import RowProblem, type_name

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD = re.compile(r"([^\[\]:!]+)((?:\[[^\[\]]+\])*)")


@dataclass(frozen=True, slots=True)
class _Field:
    column: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return self.column + "".join(f"[{step}]" for step in self.steps)


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: literal text and fields in order."""

    parts: tuple[str | _Field, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises UsageError on a lone brace, an empty field, or a format spec, conversion or unclosed step."""
        parts: list[str | _Field] = []
        end = 0
        for match in _PART.finditer(text):
            parts.append(text[end : match.start()])
            end = match.end()
            token = match.group()
            if token in ("{{", "}}"):
                parts.append(token[0])
            elif len(token) == 1:
                raise UsageError(f"input.prompt: lone {token!r} at character {match.start() + 1}; write {token * 2!r}")
            else:
                parts.append(_parse_field(match[1]))
        parts.append(text[end:])
        return cls(tuple(part for part in parts if part != ""))

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns it takes values from."""
        return frozenset(part.column for part in self.parts if isinstance(part, _Field))

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row: strings as they stand, dates as ISO 8601, anything else as JSON.

        Raises RowProblem: missing_column where a column, key or item is not there, bad_type where a value is
        null, template_error where a step goes into something that is no object or list.
        """
        return "".join(part if isinstance(part, str) else _text(_look_up(part, columns), part) for part in self.parts)


def _parse_field(text: str) -> _Field:
    match = _FIELD.fullmatch(text)
    if match is None:
        raise UsageError(f"input.prompt: cannot read the field {{{text}}}; write {{column}} or {{column[key][0]}}")
    return _Field(match[1], tuple(re.findall(r"\[([^\[\]]+)\]", match[2])))


def _look_up(field: _Field, columns: Mapping[str, Any]) -> Any:
    if field.column not in columns:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no column {field.column!r}, which the prompt's template names")
    value = columns[field.column]
    for depth, step in enumerate(field.steps):
        here = _Field(field.column, field.steps[:depth])
        if isinstance(value, dict):
            found = step in value
            value = value.get(step)
        elif isinstance(value, list) and step.isascii() and step.isdigit() and len(step) < 19:
            found = int(step) < len(value)
            value = value[int(step)] if found else None
        else:
            message = f"the template's {{{field}}} looks for [{step}] in {here}, which is {type_name(value)}"
            raise RowProblem(RowErrorCode.TEMPLATE_ERROR, message)
        if not found:
            message = f"no {step!r} in {here}, which the prompt's template names"
            raise RowProblem(RowErrorCode.MISSING_COLUMN, message)
    return value


def _text(value: Any, field: _Field) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bytes):
        message = f"{field}, which the prompt's template names, is {type_name(value)}"
        raise RowProblem(RowErrorCode.BAD_TYPE, message)
    encoded = encode_json(value).decode()
    return str(json.loads(encoded)) if encoded.startswith('"') else encoded

"""Prompts made of columns: ``"Name a city in {country}, as in {examples[0][city]}."``.

Only names and steps by ``[key]`` or ``[number]`` of Python's format notation: a template can only read the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import RowErrorCode, UsageError
from batchgen.core.json_line import encode_json
from batchgen.input.rows import RowProblem, is_null, type_name

_TOKEN = re.compile(r"\{\{|\}\}|\{(?P<column>[^][{}:!]+)(?P<steps>(\[[^][{}]+\])*)\}|\{[^{}]*\}|[{}]")
_STEP = re.compile(r"\[([^][]+)\]")
_Field = tuple[str, ...]  # a column and the steps into its value


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: literal texts and fields in order."""

    parts: tuple[str | _Field, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises UsageError on a lone brace, an empty field, or a format spec, conversion or unclosed step."""
        parts: list[str | _Field] = []
        end = 0
        for match in _TOKEN.finditer(text):
            parts.append(text[end : match.start()])
            end = match.end()
            token = match.group()
            if token in ("{{", "}}"):
                parts.append(token[0])
            elif match["column"]:
                parts.append((match["column"], *_STEP.findall(match["steps"])))
            elif len(token) == 1:
                brace = f"lone {token!r} at character {match.start() + 1}"
                raise UsageError(f"input.prompt: {brace}; write {token * 2!r} for a brace that names no column")
            else:
                named = "write {column} or {column[key][0]}; other braces, as of JSON, are doubled: {{ and }}"
                raise UsageError(f"input.prompt: cannot read the field {token}; {named}")
        parts.append(text[end:])
        return cls(tuple(part for part in parts if part != ""))

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns it takes values from."""
        return frozenset(part[0] for part in self.parts if isinstance(part, tuple))

    def render(self, columns: Mapping[str, Any], mark: Callable[[str], str] = str) -> str:
        """The text for one row: strings unchanged, null and NaN as no text, dates as ISO 8601, anything else as JSON.

        ``mark`` is applied to the text of each field. Raises RowProblem: missing_column if a column, key or item does
        not exist, bad_type for binary data, template_error for a step into a value without parts.
        """
        texts = (p if isinstance(p, str) else mark(_text(_look_up(p, columns), p)) for p in self.parts)
        return "".join(texts)

    def empty_fields(self, columns: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields whose value in a row is null, NaN or only white space. Raises as ``render``."""
        fields = dict.fromkeys(part for part in self.parts if isinstance(part, tuple))
        return tuple(_shown(field) for field in fields if _is_empty(_look_up(field, columns)))

    @property
    def num_fields(self) -> int:
        return len({part for part in self.parts if isinstance(part, tuple)})


def _is_empty(value: Any) -> bool:
    return is_null(value) or (isinstance(value, str) and not value.strip())


def _look_up(field: _Field, columns: Mapping[str, Any]) -> Any:
    if field[0] not in columns:
        raise RowProblem(RowErrorCode.MISSING_COLUMN, f"no column {field[0]!r}, which the prompt's template names")
    value = columns[field[0]]
    for depth, step in enumerate(field[1:], 1):
        if isinstance(value, dict):
            has_step = step in value
            value = value.get(step)
        elif isinstance(value, list) and step.isascii() and step.isdigit() and len(step) < 19:
            has_step = int(step) < len(value)
            value = value[int(step)] if has_step else None
        else:
            message = f"the template's {{{_shown(field)}}} looks for [{step}] in {_shown(field[:depth])}, which is "
            raise RowProblem(RowErrorCode.TEMPLATE_ERROR, message + type_name(value))
        if not has_step:
            message = f"no {step!r} in {_shown(field[:depth])}, which the prompt's template names"
            raise RowProblem(RowErrorCode.MISSING_COLUMN, message)
    return value


def _text(value: Any, field: _Field) -> str:
    if is_null(value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        message = f"{_shown(field)}, which the prompt's template names, is {type_name(value)}"
        raise RowProblem(RowErrorCode.BAD_TYPE, message)
    encoded = encode_json(value).decode()
    return str(json.loads(encoded)) if encoded.startswith('"') else encoded


def _shown(field: _Field) -> str:
    return field[0] + "".join(f"[{step}]" for step in field[1:])

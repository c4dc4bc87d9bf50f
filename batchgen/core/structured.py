"""Structured outputs: constraints on a text, as users of vLLM and OpenAI write them, in one canonical form.

It is JSON text, so that sampling parameters stay hashable and comparable; ``text.grammar`` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

MAX_BYTES = 1 << 16  # of the canonical text; llguidance's own limits bound the cost of compiling it
FORMS = ("json", "json_object", "regex", "choice", "grammar")  # exactly one of them
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "after")
_OF_JSON = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_IGNORED = ("_backend", "_backend_was_auto", "disable_fallback", "backend")  # vLLM's libraries: same text
# Names of vLLM before 0.12, which are refused, and what they are called since.
OLD_NAMES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}


def canonical(value: object) -> str:
    """The canonical text of ``structured_outputs``, an object or its JSON, or "".

    Raises ValueError, whose text follows "structured_outputs = ...".
    """
    items = object_of(value)
    items = {name: item for name, item in items.items() if item is not None and name not in _IGNORED}
    if "structural_tag" in items:
        raise ValueError("asks for a structural_tag, which is not supported; a Lark grammar can say the same")
    if unknown := [name for name in items if name not in (*FORMS, *OPTIONS)]:
        more = '; a schema goes under "json", or into a file' if {"type", "properties", "$schema"} & {*items} else ""
        raise ValueError(f"has an unknown key {str(unknown[0])[:40]!r} (known: {', '.join((*FORMS, *OPTIONS))}){more}")
    if items.get("json_object") is False:
        del items["json_object"]
    forms = [name for name in FORMS if name in items]
    if not forms and not items:
        return ""
    if len(forms) != 1:
        raise ValueError(f"must have exactly one of {', '.join(FORMS)}, not {' and '.join(forms) or 'none'}")
    parsed = {name: _PARSE[name](items[name]) for name in (*FORMS, *OPTIONS) if name in items}
    if misplaced := [name for name in _OF_JSON if name in parsed and not forms[0].startswith("json")]:
        raise ValueError(f"has {misplaced[0]}, which only goes with json and json_object")
    try:
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            "is not a JSON value: it holds a date, NaN or a lone surrogate, or is nested too deeply"
        ) from None
    if size > MAX_BYTES:
        raise ValueError(f"has {size:,} bytes of JSON text; at most {MAX_BYTES:,} are taken")
    return text


def parsed(text: str) -> dict[str, Any]:
    """The object that a canonical text encodes: one of ``FORMS`` and any of ``OPTIONS``."""
    return dict(json.loads(text)) if text else {}


def schema_of(text: str) -> Any:
    """The JSON schema of a canonical text; None if it asks for something else than JSON."""
    outputs = parsed(text)
    return outputs.get("json", {"type": "object"} if "json_object" in outputs else None)


_FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}  # by type, the other fields
_OF_SCHEMAS = ("name", "description", "strict", "schema")


def from_response_format(value: object) -> dict[str, Any]:
    """``structured_outputs`` for OpenAI's ``response_format``, an object or the JSON text of one.

    A ``schema`` next to json_object counts, as in llama.cpp and at Together and Fireworks; name, description and
    "strict" are ignored: the text always fits. Raises ValueError, whose text follows the name of the value.
    """
    try:
        settings = object_of(value)
    except ValueError:
        settings = {"type": None}
    if not settings:
        return {}
    format_type = settings.get("type")
    if not isinstance(format_type, str) or format_type not in _FORMATS:
        raise ValueError('must be an object whose type is "text", "json_object" or "json_schema"')
    _check_known(settings, ("type", *_FORMATS[format_type]), format_type)
    if format_type == "text":
        return {}
    if format_type == "json_object":
        schema = settings.get("schema")
        return {"json_object": True} if schema is None or schema == {} else {"json": schema}
    inner = settings.get("json_schema")
    if isinstance(inner, Mapping) and inner.get("schema") is not None:
        _check_known(inner, _OF_SCHEMAS, "json_schema")
        return {"json": inner["schema"]}
    raise ValueError("of type json_schema must hold json_schema.schema")


def _check_known(settings: Mapping[str, Any], names: Collection[str], format_type: str) -> None:
    for name, item in settings.items():
        if item is not None and name not in names:
            raise ValueError(f"of type {format_type} has an unknown key {str(name)[:40]!r} (known: {', '.join(names)})")


def object_of(value: object) -> dict[str, Any]:
    """An object, given as such or as JSON text. Raises ValueError, whose text follows the name of the value."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise ValueError('must be an object, such as {"json": {"type": "object"}} or {"choice": ["yes", "no"]}')
    return dict(value)


def _schema(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("has a string as json that is not valid JSON") from None
    if not isinstance(value, Mapping | bool):
        raise ValueError("must have a JSON schema as its json: an object, or the JSON text of one")
    return value


def _text(name: str) -> Any:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must have a string that is not empty as its {name}")
        return value

    return parse


def _flag(name: str) -> Any:
    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must have true or false as its {name}")
        return value

    return parse


def _choice(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) and item for item in value):
        raise ValueError("must have a list of strings that are not empty as its choice")
    return list(dict.fromkeys(value))


_PARSE = {
    "json": _schema,
    "json_object": _flag("json_object"),
    "choice": _choice,
    **{name: _text(name) for name in ("regex", "grammar", "whitespace_pattern", "after")},
    **{name: _flag(name) for name in ("disable_any_whitespace", "disable_additional_properties")},
}

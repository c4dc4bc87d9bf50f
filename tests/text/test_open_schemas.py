"""The parts of a schema that have no end are named; those that have one are not."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.text.open_schemas import open_parts

TEXT = {"type": "string"}
ITEM = {"type": "object", "properties": {"name": TEXT, "kind": {"enum": ["a", "b"]}, "count": {"type": "integer"}}}
CASES: dict[str, tuple[Any, list[str]]] = {
    "pydantic": (
        {
            "$defs": {"Item": ITEM},
            "properties": {
                "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                "note": {"anyOf": [TEXT, {"type": "null"}], "default": None},
            },
            "type": "object",
        },
        ["items: no maxItems", "items[].name: no maxLength", "note: no maxLength"],
    ),
    "limited": (
        {
            "type": "object",
            "properties": {
                "items": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 9}},
                "when": {"type": "string", "format": "date"},
                "word": {"type": "string", "pattern": "^[a-z]{1,9}$"},
                "pair": {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}]},
            },
            "additionalProperties": False,
        },
        [],
    ),
    "a list of lists": (
        {"type": "array", "items": {"type": "array", "items": TEXT}},
        ["the value: no maxItems", "[]: no maxItems", "[][]: no maxLength"],
    ),
    "a map": (
        {"type": "object", "additionalProperties": TEXT},
        ["the value: no additionalProperties = false", "*: no maxLength"],
    ),
    "any value": (
        {"type": "object", "properties": {"a": {"title": "Payload"}, "b": True, "c": {"type": "array", "maxItems": 3}}},
        ["a: no type", "b: no type", "c[]: no type"],
    ),
    "a type beside its branches": (
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"const": 1}}},
        [],
    ),
    "nothing said": ({}, ["the value: no type"]),
    "type list": ({"type": ["string", "null"]}, ["the value: no maxLength"]),
    "recursive": (
        {"$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}, "s": TEXT}}}, "$ref": "#/$defs/T"},
        ["s: no maxLength"],
    ),
    "twice as much on each level": (
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}, "$ref": "#/$defs/d0"},
        [],
    ),
    "none": (None, []),
    "odd": ({"type": "array", "items": [], "anyOf": 3, "properties": [], "$ref": "#/a/b"}, ["the value: no maxItems"]),
}


@pytest.mark.parametrize("name", CASES)
def test_open_parts_are_named_with_the_keyword_that_they_lack(name: str) -> None:
    schema, parts = CASES[name]
    assert open_parts(schema) == parts


def test_of_many_open_parts_the_first_are_named() -> None:
    assert len(open_parts({"type": "object", "properties": {str(i): TEXT for i in range(99)}})) == 20

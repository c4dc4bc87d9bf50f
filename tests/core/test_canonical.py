"""Structured outputs in one canonical form, whatever names and values they come under."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from batchgen.core.structured import MAX_BYTES, canonical, from_response_format, parsed, schema_of


def test_the_canonical_form_is_one_for_all_that_ask_the_same() -> None:
    same: list[Any] = [
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"disable_any_whitespace": True, "json": '{"type":\n"object"}', "regex": None, "json_object": False},
        '{"json": {"type": "object"}, "disable_any_whitespace": true, "_backend": "auto", "disable_fallback": false}',
    ]
    assert {canonical(value) for value in same} == {canonical(same[0])}
    assert canonical(canonical(same[0])) == canonical(same[0])
    assert parsed(canonical(same[0])) == same[0]


def test_the_order_of_properties_counts() -> None:
    """It is that of the text, so it must not be lost."""
    one, other = ({"json": {"properties": dict.fromkeys(names, True)}} for names in ("ab", "ba"))
    assert canonical(one) != canonical(other)
    assert list(schema_of(canonical(other))["properties"]) == ["b", "a"]


@pytest.mark.parametrize("nothing", [{}, "", {"json": None}, {"json_object": False}, {"_backend": "xgrammar"}, "{}"])
def test_nothing_asked_is_the_empty_text(nothing: Any) -> None:
    assert canonical(nothing) == ""
    assert parsed("") == {}
    assert schema_of("") is None


def test_the_schema_of_each_form() -> None:
    assert schema_of(canonical({"json": {"type": "null"}})) == {"type": "null"}
    assert schema_of(canonical({"json": False})) is False
    assert schema_of(canonical({"json_object": True})) == {"type": "object"}
    assert schema_of(canonical({"choice": ["a"]})) is None
    assert parsed(canonical({"choice": ("b", "a", "b", "é")})) == {"choice": ["b", "a", "é"]}, "repetitions go"


DEEP: Any = 1
for _ in range(3000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be an object"),
        ("{", "must be an object"),
        ("[1]", "must be an object"),
        ('{"json": {}} x', "must be an object"),
        ({"json": {}, "regex": "a"}, "must have exactly one of .* not json and regex"),
        ({"disable_any_whitespace": True}, "must have exactly one of .* not none"),
        ({"jsn": {}}, r"has an unknown key 'jsn' \(known: json, "),
        ({"type": "object"}, r"unknown key 'type' \(.*\); a schema goes under \"json\", or into a file$"),
        ({5: {}}, "has an unknown key '5'"),
        ({"structural_tag": {}}, "not supported; a Lark grammar"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern, which only goes with json"),
        ({"json": "type: object"}, "a string as json that is not valid JSON"),
        ({"json": [1]}, "must have a JSON schema"),
        ({"json": "[" * 100_000}, "a string as json that is not valid JSON"),
        ({"json": {"const": DEEP}}, "nested too deeply"),
        ({"json": {"const": date(2020, 1, 1)}}, "not a JSON value: it holds a date"),
        ({"json": {"const": float("nan")}}, "NaN"),
        ({"choice": ["\ud800"]}, "lone surrogate"),
        ({"json": {"description": "x" * MAX_BYTES}}, "bytes of JSON text; at most 65,536 are taken"),
        ({"regex": ""}, "not empty as its regex"),
        ({"grammar": ["a"]}, "not empty as its grammar"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", ""]}, "list of strings"),
        ({"choice": "yes"}, "list of strings"),
        ({"json_object": "true"}, "true or false"),
        ({"json": {}, "after": ""}, "not empty as its after"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        canonical(value)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_openai_asks_by_response_format() -> None:
    schema = {"type": "object"}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert from_response_format(strict) == {"json": schema}
    assert from_response_format({"type": "json_object"}) == {"json_object": True}
    assert from_response_format({"type": "text"}) == {}
    nameless = {"type": "json_schema", "json_schema": {"name": "n"}}
    for value in (3, {"type": "xml"}, {"type": "json_schema"}, nameless):
        with pytest.raises(ValueError, match="must"):
            from_response_format(value)

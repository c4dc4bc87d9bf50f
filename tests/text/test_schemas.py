"""Schemas for llguidance: which objects are closed, what is said in other words, and what is refused."""

from __future__ import annotations

import datetime
import json
from contextlib import suppress
from random import Random
from typing import Any

import jsonschema
import pydantic
import pytest
from guides import complete_texts

from batchgen.core.structured import canonical
from batchgen.text.grammar import Grammars
from batchgen.text.grammar_source import GrammarError
from batchgen.text.schemas import prepared

Schema = dict[str, Any]

MAX = 2**53 - 1


def record(*names: str, **more: Any) -> Schema:
    return {"type": "object", "properties": {name: {"type": "null"} for name in names}, **more}


def closed(schema: Schema) -> list[str]:
    """Where objects have been closed that were open: paths of keys and places."""
    ready = prepared(schema, closes_objects=True)

    def added(before: Any, after: Any, path: str) -> list[str]:
        if isinstance(after, list):
            return [found for i, part in enumerate(after) for found in added(before[i], part, f"{path}/{i}")]
        if not isinstance(after, dict):
            return []
        here = [path or "/"] if after.keys() - before.keys() == {"additionalProperties"} else []
        return here + [found for key in before for found in added(before[key], after[key], f"{path}/{key}")]

    return added(schema, ready, "")


KINDS = {name: record("value") | {"required": ["kind"]} for name in "ab"}
for name, schema in KINDS.items():
    schema["properties"]["kind"] = {"const": name}
REF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        (record("a"), ["/"]),
        (record("a", required=["a"]), ["/"]),
        (record("a", title="A", default={"b": 1}), ["/"]),
        ({"type": "array", "items": record("a"), "prefixItems": [record("b")]}, ["/items", "/prefixItems/0"]),
        ({"properties": {"a": record("b")}, "additionalProperties": True}, ["/properties/a"]),
        ({"additionalProperties": record("c")}, ["/additionalProperties"]),
        ({"anyOf": [record("a"), {"type": "null"}], "title": "A"}, ["/anyOf/0"]),
        ({"allOf": [record("a")], "description": "of pydantic 1"}, ["/allOf/0"]),
        ({"oneOf": [KINDS["a"], KINDS["b"]], "discriminator": {}}, ["/oneOf/0", "/oneOf/1"]),
        ({"$defs": KINDS, "oneOf": [REF, {"$ref": "#/$defs/b"}]}, ["/$defs/a", "/$defs/b"]),
        ({"$defs": {"a": record("b")}, "properties": {"c": REF | {"description": "C"}}}, ["/", "/$defs/a"]),
        ({"definitions": {"a": record("a")}, "$ref": "#/definitions/a"}, ["/definitions/a"]),
    ],
)
def test_an_object_that_stands_alone_is_closed(schema: Schema, places: list[str]) -> None:
    assert sorted(closed(schema)) == sorted(places)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        record("a", additionalProperties=True),
        record("a", additionalProperties={"type": "integer"}),
        record("a", required=["b"]),
        record("a", minProperties=1),
        record("a", maxProperties=3),
        record("a", patternProperties={"^b": {}}),
        record("a", enum=[{"b": 1}]),
        record("a", const={"b": 1}),
        record("a", anyOf=[record("b")]),
        record("a", allOf=[record("b", required=["b"])]),
        record("a", dependentRequired={"a": ["b"]}),
        record("a", unevaluatedProperties=False),
        {"allOf": [record("a"), record("b")]},
        {"oneOf": [record("a"), record("b")]},
        {"oneOf": [KINDS["a"], KINDS["a"]]},
        {"oneOf": [KINDS["a"], record("kind", required=["kind"])]},
        {"not": record("a")},
        {"if": record("a"), "then": record("b"), "else": record("c")},
        {"properties": {"a": {"properties": {"b": record("c")}}}, "enum": [{"a": {"b": {"d": 1}}}]},
        {"$defs": {"a": record("b")}, "allOf": [REF, record("c", required=["c"])]},
        {"$defs": {"a": record("b")}, **record("c"), **REF},
        {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/c"}}}, "c": record("d")}, "allOf": [REF, record("c")]},
        {"properties": {"a": record("b"), "c": {"allOf": [{"$ref": "#/properties/a"}, record("d")]}}},
        {"$defs": {"a": record("b"), "c": {"$defs": {"d": {"allOf": [REF, record("e")]}}}}, "$ref": "#/$defs/c"},
        {"$defs": {"a": record("b")}, "parts": {"c": {"allOf": [REF, record("e")]}}, "$ref": "#/parts/c"},
    ],
)
def test_what_is_combined_or_wants_more_stays_open(schema: Schema) -> None:
    assert closed(schema) == []


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer"}, (-MAX, MAX)),
        ({"type": ["null", "integer"]}, (-MAX, MAX)),
        ({"type": "integer", "minimum": 3}, (3, MAX)),
        ({"type": "integer", "exclusiveMaximum": 3}, (-MAX, None)),
        ({"type": "number"}, (None, None)),
        ({"type": ["number", "integer"]}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_integers_are_bounded_where_the_schema_leaves_them_open(schema: Schema, bounds: tuple[Any, Any]) -> None:
    """A small model writes digits without an end; what is left is what every reader takes for the same number."""
    made = prepared({"properties": {"a": schema}}, closes_objects=True)["properties"]["a"]
    assert (made.get("minimum"), made.get("maximum")) == bounds
    combined = prepared({"allOf": [{"properties": {"a": schema}}, {}]}, closes_objects=True)
    assert combined["allOf"][0]["properties"]["a"] == schema


@pytest.mark.parametrize("bounds", [{"exclusiveMaximum": 1e16}, {"exclusiveMinimum": -1e16}])
def test_exclusive_bounds_that_are_rounded_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"1e\+16 cannot be enforced: numbers have .* at most 2\*\*53 - 1"):
        prepared({"type": "integer", **bounds}, closes_objects=True)


def test_a_number_of_many_digits_comes_to_an_end(grammars: Grammars) -> None:
    texts = complete_texts(grammars, {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}})
    assert len(texts) == 8
    assert all(len(text) <= len('{"a": -9007199254740991}') for text in texts)


def test_closing_can_be_switched_off(grammars: Grammars) -> None:
    schema = record("a", required=["a"])
    assert prepared(schema, closes_objects=False) == schema
    for option in ({}, {"disable_additional_properties": True}):
        assert set(complete_texts(grammars, {"json": schema, **option}, range(30))) == {'{"a": null}'}
    free = complete_texts(grammars, {"json": schema, "disable_additional_properties": False}, range(30))
    assert len({len(json.loads(text)) for text in free}) > 1


def test_dates_and_times_are_real(grammars: Grammars) -> None:
    leap_day = {"json": {"type": "string", "format": "date", "pattern": "-02-29$"}}
    parsed = [datetime.date.fromisoformat(json.loads(text)) for text in complete_texts(grammars, leap_day, range(60))]
    assert {day.year % 4 for day in parsed} == {0}
    second = {"json": {"type": "string", "format": "date-time", "pattern": "^0.*:[56][0-9][.Z]", "maxLength": 22}}
    texts = [json.loads(text) for text in complete_texts(grammars, second, range(60))]
    assert {text[17] for text in texts} == {"5"}
    for pattern in ("^0000", ":60Z$", "-02-30", "1900-02-29", "^2023-02-29", "24:00:00"):
        for named in ("date", "date-time", "time"):
            with pytest.raises(GrammarError, match="Unsatisfiable"):
                complete_texts(grammars, {"json": {"type": "string", "format": named, "pattern": pattern}})


def test_a_century_has_a_leap_day_every_fourth_time() -> None:
    import re

    pattern = prepared({"format": "date"}, closes_objects=True)["pattern"]
    start = datetime.date(1895, 1, 1)
    real = {str(start + datetime.timedelta(days)) for days in range(80_000)}
    written = (f"{year}-{month:02}-{day:02}" for year in range(1895, 2114) for month in range(14) for day in range(33))
    assert {text for text in written if re.search(pattern, text)} == {day for day in real if day < "2114"}


def test_an_x_guidance_of_the_schema_counts_for_nothing(grammars: Grammars) -> None:
    loose = {"lenient": True, "coerce_one_of": True, "item_separator": ";", "whitespace_flexible": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        complete_texts(grammars, {"json": {"type": "array", "uniqueItems": True, "x-guidance": loose}})
    pair = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "x-guidance": loose}
    assert set(complete_texts(grammars, {"json": pair})) == {"[1, 1]"}
    assert set(complete_texts(grammars, {"json": pair, "whitespace_pattern": "[ ]?"}, range(20))) <= {
        *("[1,1]", "[1, 1]", "[1 ,1]", "[1 , 1]", "[ 1,1]", "[ 1, 1]", "[ 1 ,1]", "[ 1 , 1]"),
        *("[1,1 ]", "[1, 1 ]", "[1 ,1 ]", "[1 , 1 ]", "[ 1,1 ]", "[ 1, 1 ]", "[ 1 ,1 ]", "[ 1 , 1 ]"),
    }


def test_notes_to_the_reader_are_no_constraints(grammars: Grammars) -> None:
    schema = {"type": "string", "format": "password", "minLength": 1, "maxLength": 3, "x-order": 3, "deprecated": True}
    assert complete_texts(grammars, {"json": schema})
    assert complete_texts(grammars, {"json": {"type": "array", "items": {"const": 1}, "uniqueItems": False}})
    assert complete_texts(grammars, {"json": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}})
    examples = {"default": {"pattern": "a++"}, "example": {"minProperties": 9}, "x-id": 10**20, "examples": [10**20]}
    assert complete_texts(grammars, {"json": {"const": 1, **examples}}) == ["1"] * 8


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "false fits no value"),
        ({"type": "array", "uniqueItems": True}, r"keywords that cannot be enforced: \[\"uniqueItems\"\]"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf, or let a required property"),
        ({"type": "string", "format": "phone"}, "format phone cannot be enforced; a pattern"),
        ({"enum": [2**53 + 1]}, "9007199254740993 cannot be enforced: numbers have up to 15 digits"),
        ({"const": 123456789.12345679}, "123456789.12345679 cannot be enforced"),
        ({"enum": [[-5.8834106253785e-12]]}, "cannot be enforced"),
        ({"type": "integer", "maximum": 2**63 - 1}, "cannot be enforced: .* omit a bound beyond that"),
        ({"properties": {"default": {"maximum": -(10**30)}}}, "cannot be enforced"),
        ({"type": "number", "exclusiveMinimum": 10**15}, r"10\*\*15 or more cannot be enforced; use an incl"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "less than 1 from the other bound cannot be enforced"),
        ({"minimum": 0, "exclusiveMinimum": True}, "must be numbers, not true as in draft 4"),
        ({"type": "integer", "multipleOf": 86_400}, "multipleOf 86400 has too many remainders"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}, "too many remainders"),
        ({"type": "object", "minProperties": 2, "additionalProperties": True}, "minProperties 2 cannot be enforced"),
        ({"patternProperties": {f"^{i:03}": {} for i in range(65)}}, "more than 64 patternProperties"),
        ({"type": "string", "pattern": "a++"}, "possessive"),
        ({"$ref": "#"}, "no text fits it"),
        ({"properties": {"a": {"type": "integer", "required": True}}}, "required must be a list of names"),
        ({"enum": [[[[[[[3]]]]]]], "properties": {"a": 5}}, "schema must be an object or boolean"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(grammars: Grammars, schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        complete_texts(grammars, {"json": schema})


def test_constants_are_those_numbers_and_no_others(grammars: Grammars) -> None:
    random = Random(7)
    drawn = [random.uniform(-1, 1) * 10 ** random.randint(-9, 20) for _ in range(60)]
    taken = 0
    for constant in [*drawn, *(round(number, 5) for number in drawn), 0.1, 1e-7, -2.5e15, 1e20, 1 / 3, 5e-324]:
        with suppress(GrammarError):
            assert {json.loads(text) for text in complete_texts(grammars, {"json": {"const": constant}}, [0])} == {
                constant
            }
            taken += 1
    assert taken > 40


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0", "0.0", "-0", "1", "0.9", "0.5", "0.01", "0.99999"]),
        ({"minimum": -7, "exclusiveMaximum": -1}, ["-1", "-1.0", "-1.5", "-1.01", "-7", "-7.1"]),
        ({"exclusiveMinimum": 0}, ["0", "0.1", "0.00000001", "12", f"0.{'0' * 400}1"]),
        ({"exclusiveMinimum": -0.5}, ["-0.5", "-0.4", "0", f"-0.4{'9' * 20}"]),
        ({"exclusiveMaximum": 1}, ["1", "1.0", "0.9", "0.990", "-3", f"0.{'9' * 9}", f"0.{'9' * 20}"]),
        ({"exclusiveMaximum": 0.5, "minimum": -7}, ["0.5", "0.499", f"0.4{'9' * 20}"]),
        ({"exclusiveMinimum": 10**12}, [f"{10**12}", f"{10**12}.01", f"{10**12}.00001"]),
    ],
)
def test_exclusive_bounds_are_exclusive(grammars: Grammars, schema: Schema, texts: list[str]) -> None:
    """To readers that know doubles only, too: a long decimal is the bound itself to them."""
    schema = {"type": "number", **schema}
    matcher = grammars.compile(canonical({"json": schema}))
    for text in texts:
        tokens = grammars.tokenizer.encode_batch([text], add_special_tokens=False)[0]
        written = matcher.deep_copy()
        fits = written.consume_tokens(tokens) and written.is_accepting()
        assert fits == jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


def test_what_only_other_rows_of_a_table_say_is_not_said(grammars: Grammars) -> None:
    lacking = {"type": None, "items": None, "enum": None, "required": None}
    properties = {"a": {**lacking, "enum": [None, {"b": None}]}, "c": None, "d": {"const": None}}
    schema = {**lacking, "type": "object", "properties": properties, "required": ["a", "d"], "title": None}
    assert set(complete_texts(grammars, {"json": schema}, range(20))) == {
        '{"a": null, "d": null}',
        '{"a": {"b": null}, "d": null}',
    }


def test_multiples_apart_from_each_other_are_no_matter(grammars: Grammars) -> None:
    parts = {f"p{i}": {"type": "integer", "multipleOf": 900 + i} for i in range(4)}
    assert complete_texts(grammars, {"json": {"type": "object", "properties": parts}})


def test_parts_that_only_a_reference_names_are_made_ready_too(grammars: Grammars) -> None:
    schema = {"components": {"schemas": {"Day": {"type": "string", "format": "date", "pattern": "02-29$"}}}}
    texts = complete_texts(grammars, {"json": {**schema, "$ref": "#/components/schemas/Day"}}, range(30))
    assert {datetime.date.fromisoformat(json.loads(text)).year % 4 for text in texts} == {0}


def test_the_bounds_of_pydantic_fields_are_enforced(grammars: Grammars) -> None:
    class Order(pydantic.BaseModel):
        count: int = pydantic.Field(gt=0, lt=4)
        price: float = pydantic.Field(gt=0)
        share: float | None = pydantic.Field(gt=0, lt=1)

    texts = complete_texts(grammars, {"json": Order.model_json_schema()}, range(30))
    orders = [Order.model_validate_json(text) for text in texts]  # which raises for a number beyond its bounds
    assert {order.count for order in orders} == {1, 2, 3}

"""Random JSON schemas of what people use, and a validator that counts in decimals, as JSON does."""

from __future__ import annotations

import json
from decimal import Context, Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
from hypothesis import strategies as st
from jsonschema.validators import validator_for

NAMES = ["a", "b", "name", "x-y", "é", 'q"\\', "sp ace"]
PATTERNS = [
    *(r"^[A-Z]{2}-\d{1,3}$", r"^\w+\s\W$", "a.b", r"^(?:ab|cd)*$", r"[\w.-]+@[\w-]+", r"^\S*$", "^$|^x"),
    r"^[^\d\s]{2}",
]
FORMATS = ["date", "time", "date-time", "uuid", "email", "hostname", "ipv4", "ipv6", "uri", "duration"]
CONSTANTS = ["", "a", 'é"\n\\', "🙂", "<|im_end|>", 0, -3, 2.5, 1e-7, True, None, [], [1, "b"], {"k": [None]}]

Schema = dict[str, Any]


def problem(schema: Any, text: str) -> str:
    """Why a text is no JSON value that fits the schema; empty if it is one."""
    exact = json.loads(json.dumps(schema), parse_float=_decimal)
    kind = validator_for(exact, default=jsonschema.Draft202012Validator)
    with localcontext(Context(prec=2000)):
        try:
            value = json.loads(text, parse_float=_decimal)
            kind(exact, format_checker=kind.FORMAT_CHECKER).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{text!r}: {str(error)[:200]}"
    return ""


def _decimal(written: str) -> Decimal:
    try:
        return Decimal(written)
    except InvalidOperation:  # an exponent of twenty digits
        return Decimal("inf")


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    low = draw(st.none() | st.integers(-50, 50) | st.sampled_from([0.5, -1.25, 1e-3]))
    if low is not None:
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    span = draw(st.none() | st.integers(2, 200))
    if span is not None:
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = (low or 0) + span
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 7, 0.5, 0.01, 2.5]))
    return schema


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string"}
    kind = draw(st.integers(0, 3))
    if kind == 0:
        least = draw(st.integers(0, 6))
        schema |= {"minLength": least, "maxLength": least + draw(st.integers(0, 6))}
    elif kind == 1:
        schema["pattern"] = draw(st.sampled_from(PATTERNS))
    elif kind == 2:
        schema["format"] = draw(st.sampled_from(FORMATS))
    return schema


@st.composite
def objects(draw: st.DrawFn, parts: st.SearchStrategy[Any]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), parts, max_size=4))
    schema: Schema = {"type": "object", "properties": properties}
    if draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    further = draw(st.none() | st.booleans() | parts)
    if further is not None:
        schema["additionalProperties"] = further
    return schema


@st.composite
def arrays(draw: st.DrawFn, parts: st.SearchStrategy[Any]) -> Schema:
    schema: Schema = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(parts, min_size=1, max_size=2))
    if draw(st.booleans()):
        schema["items"] = draw(parts)
    if draw(st.booleans()):
        least = draw(st.integers(0, 3))
        schema |= {"minItems": least, "maxItems": least + draw(st.integers(0, 2))}
    return schema


@st.composite
def combined(draw: st.DrawFn, parts: st.SearchStrategy[Any]) -> Schema:
    """Objects under allOf, beside anyOf or told apart by a constant under oneOf."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return {"allOf": [draw(objects(parts)), draw(objects(parts) | references())]}
    if kind == 1:
        return draw(objects(parts)) | {"anyOf": [draw(objects(parts)), {"required": ["a"]}]}
    branches = [draw(objects(parts)) for _ in range(2)]
    for branch, name in zip(branches, "ab", strict=True):
        branch["properties"] = {"kind": {"const": name}, **branch["properties"]}
        branch["required"] = ["kind"]
    return {"oneOf": branches}


def references() -> st.SearchStrategy[Schema]:
    return st.sampled_from([{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/leaf", "title": "Leaf"}])


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """A schema whose definitions hold a list linked by references, and anything else."""
    plain = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"type": ["string", "null"], "maxLength": 5}])
    constants = st.lists(st.sampled_from(CONSTANTS), min_size=1, max_size=4).map(lambda values: {"enum": values})
    single = st.sampled_from(CONSTANTS).map(lambda value: {"const": value})
    leaves: st.SearchStrategy[Any] = numbers() | strings() | plain | constants | single | references()

    def compound(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        either = st.lists(parts, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches})
        return objects(parts) | arrays(parts) | either | combined(parts)

    whole: st.SearchStrategy[Any] = st.recursive(leaves, compound, max_leaves=8)
    root = dict(draw(whole))
    following = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"value": draw(numbers()), "next": following}, "required": ["value"]}
    return {**root, "$defs": {"leaf": draw(objects(strings())), "node": node}}

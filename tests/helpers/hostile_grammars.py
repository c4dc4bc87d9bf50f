"""Structured outputs that cost much, never end or make no sense."""

from __future__ import annotations

from typing import Any


def _nested(depth: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {key: schema}, "required": [key]}
    return schema


def _one_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        other = {"type": "object", "properties": {f"k{level}": schema}, "required": [f"k{level}"]}
        schema = {"oneOf": [other, {"type": "array", "items": schema}, {"type": "string"}]}
    return schema


def _any_of(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {f"{level}{i}": schema}} for i in range(width)]}
    return schema


def _chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _doubling(depth: int) -> dict[str, Any]:
    """Each definition has the next one twice: 2**depth integers."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "items": False}
        for i in range(depth)
    }
    return {"$defs": {**definitions, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _object_of(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


def _choices_of(count: int) -> dict[str, Any]:
    """2**count objects."""
    return {"allOf": [{"anyOf": [_object_of(f"a{i}"), _object_of(f"b{i}")]} for i in range(count)]}


def _all_of(count: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"type": "integer", "minimum": i}, {"type": "string"}]} for i in range(count)]}


_OPTIONAL = {f"property_{i}": {"type": "string"} for i in range(1000)}
_RULES = [f"r{i}" for i in range(2500)]

# Refused before the row begins.
REFUSED: dict[str, dict[str, Any]] = {
    "bounds of 15 digits": {"json": {"type": "number", "minimum": 1e-15, "exclusiveMaximum": 123456789012345.1}},
    "nested 90 deep": {"json": _nested(90, "k")},
    "nested 300 deep": {"json": _nested(300, "k")},
    "1,000 optional properties": {"json": {"type": "object", "properties": _OPTIONAL}},
    "oneOf 12 deep": {"json": _one_of(12)},
    "allOf of 24 anyOf of objects": {"json": _choices_of(24)},
    "300 patternProperties": {"json": {"patternProperties": {f"^{i:04}": {} for i in range(300)}}},
    "multiple of a prime": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "required but closed": {"json": {"type": "object", "required": ["a"], "additionalProperties": False}},
    "references in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "recursion without an end": {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "array of itself": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 2}},
    "recursion beside itself": {"json": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}]}},
    "unknown reference": {"json": {"$ref": "#/$defs/none"}},
    "reference to a file": {"json": {"$ref": "file:///etc/hostname"}},
    "not": {"json": {"not": {"type": "string"}}},
    "if": {"json": {"if": {"type": "string"}, "then": {"minLength": 2}}},
    "wrong kinds": {"json": {"type": {"a": 1}, "properties": 3, "required": {"b": 1}, "format": [], "$ref": 5}},
    "wrong kinds in lists": {"json": {"oneOf": [3, None], "anyOf": {"a": 1}, "required": [[], {}], "$defs": []}},
    "unknown type": {"json": {"type": "text"}},
    "impossible bounds": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "intersection of patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"{c}.{{0,30}}{c}"} for c in "abcdefgh"]}
    },
    "optional letters": {"regex": r"\p{L}?" * 600},
    "3,000 groups": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "no text": {"regex": "[^\\x00-\\x{10FFFF}]"},
    "empty text": {"regex": "a{0}"},
    "empty recursion": {"grammar": 'start: start start | ""'},
    "no start": {"grammar": 'root: "a"'},
    "no Lark": {"grammar": "<<<"},
    "Lark, nested 2,000 deep": {"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000},
    "2,500 rules": {"grammar": f"start: {'|'.join(_RULES)}\n" + "".join(f'{name}: "{name}"\n' for name in _RULES)},
}
# Compiled, but an error in the course of a random text.
FAILING: dict[str, dict[str, Any]] = {
    "exponential automaton over any": {"regex": r".*a.{60}b"},
    "hostile pattern": {"json": {"type": "string", "pattern": r"^.*[ab].{40}[ab].{40}$"}},
}
# Large or strange, but followed.
HARMLESS: dict[str, dict[str, Any]] = {
    "200 optional properties": {"json": {"type": "object", "properties": dict(list(_OPTIONAL.items())[:200])}},
    "1,000 required properties": {"json": {"type": "object", "properties": _OPTIONAL, "required": list(_OPTIONAL)}},
    "oneOf 6 deep": {"json": _one_of(6)},
    "anyOf 3 deep, 8 wide": {"json": _any_of(3, 8)},
    "allOf of 10 anyOf": {"json": _all_of(10)},
    "allOf of 300 anyOf": {"json": _all_of(300)},
    "allOf of 6 anyOf of objects": {"json": _choices_of(6)},
    "enum of 3,000": {"json": {"enum": [f"value {i * 7919 % 3001}" for i in range(3000)]}},
    "choice of 4,000": {"choice": [f"{i * 7919 % 4001}" for i in range(4000)]},
    "choice of 60 KB": {"choice": ["abcdefgh " * 6500, "abcdefgh " * 500]},
    "const of 60 KB": {"json": {"const": "abcdefgh " * 6500}},
    "chain of 500 references": {"json": _chain(500)},
    "2**30 integers by reference": {"json": _doubling(30)},
    "array of a million": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "string of a million": {"json": {"type": "string", "minLength": 10**6}},
    "string of up to a million": {"json": {"type": "string", "maxLength": 10**6}},
    "string of up to 20,000": {"json": {"type": "string", "maxLength": 20_000}},
    "10**9 properties": {"json": {"type": "object", "maxProperties": 10**9, "additionalProperties": True}},
    "nested arrays with bounds": {
        "json": {
            "type": "array",
            "maxItems": 1000,
            "items": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}},
        }
    },
    "multiple of a small number": {"json": {"type": "number", "multipleOf": 0.000001}},
    "counts in counts": {"regex": "((a{0,100}){0,100}){0,100}b"},
    "many repetitions": {"regex": "(?:a|b|ab){5000}"},
    "ambiguous alternatives": {"regex": "(a|aa)+b"},
    "nested stars": {"regex": "((a*)*)*b"},
    "exponential automaton": {"regex": "(?:a|b)*a(?:a|b){14}"},
    "exponential automaton over letters": {"regex": r"[a-z]*a[a-z]{200}"},
    "patterns that overlap": {
        "json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": rf"x.{{{i}}}[yz].*{i}"} for i in range(40)},
        }
    },
    "many letters": {"regex": r"(?:\p{L}{1,50}\p{N}?){1,50}"},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "right recursion": {"grammar": 'start: "a" start | "b"'},
    "ambiguous grammar": {"grammar": 'start: start start | "a" | "aa"'},
    "schema in Lark": {
        "grammar": 'start: %json {"x-guidance": {"lenient": true}, "type": "array", "minItems": 100000}'
    },
    "grammar of nothing but ambiguity": {"grammar": 'start: e\ne: e e | e e e | "a" | "b" | "ab"'},
}
HOSTILE = REFUSED | FAILING | HARMLESS

"""Arrow types of JSON values, taken from the JSON schema that they fit.

What has no type of its own in a schema (several types, any object, tuples, a recursion) becomes JSON text, marked in
the metadata of its field. A value is never changed to fit a type. The one difference that a table cannot tell: a
property that an object lacks and one that is null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from batchgen.core.json_line import encode_json

_MAX_FIELDS = 1000  # of all objects together: shared definitions may unfold without end
_MAX_DEPTH = 32
_JSON_MARK = {"batchgen": "json"}
_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_OF_VALUES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_UNIONS = ("anyOf", "oneOf", "allOf")
_TYPING = {"type", "enum", "const", "properties", "items", "$ref", *_UNIONS}  # keywords that say what a value is
_OPEN = ("patternProperties", "unevaluatedProperties")


def field_of(name: str, kind: Any) -> Any:
    """The field of a column of Arrow type ``kind``, or of JSON text where that is None."""
    return pa.field(name, kind) if kind is not None else pa.field(name, pa.string(), metadata=_JSON_MARK)


def type_of(schema: Any) -> Any:
    """The Arrow type of the values that fit a JSON schema; None where they have to be JSON text."""
    try:
        return _Types(schema).kind(schema, ())
    except (TypeError, AttributeError):  # a keyword has a value of a kind that it does not take
        return None


def is_json(field: Any) -> bool:
    """Whether a field holds JSON text."""
    return b"batchgen" in (field.metadata or {})


def holds_json(field: Any) -> bool:
    """Whether a field holds JSON text at any depth."""
    kind = field.type
    return is_json(field) or any(holds_json(kind.field(i)) for i in range(kind.num_fields))


def loosened(field: Any, values: Iterable[Any]) -> Any:
    """The field with JSON text wherever its type would change one of these values."""
    fits = check_of(field)
    for value in values:
        if not fits(value):
            field = _loosened(field, value)
            fits = check_of(field)
    return field


def _loosened(field: Any, value: Any) -> Any:
    kind = field.type
    if check_of(field)(value):
        return field
    if pa.types.is_struct(kind) and isinstance(value, dict) and value.keys() <= {item.name for item in kind}:
        return pa.field(field.name, pa.struct([_loosened(item, value.get(item.name)) for item in kind]))
    if pa.types.is_list(kind) and isinstance(value, list):
        return pa.field(field.name, pa.list_(loosened(kind.value_field, value)))
    return field_of(field.name, None)


def check_of(field: Any) -> Callable[[Any], bool]:
    """Whether a value goes into a field unchanged, as a function that is fast for many of them."""
    kind = field.type
    if is_json(field):
        return lambda _: True
    if pa.types.is_struct(kind):
        parts = {item.name: check_of(item) for item in kind}
        return lambda value: (
            value is None
            or (
                isinstance(value, dict)
                and value.keys() <= parts.keys()
                and all(parts[name](item) for name, item in value.items())
            )
        )
    if pa.types.is_list(kind):
        item_fits = check_of(kind.value_field)
        return lambda value: value is None or (isinstance(value, list) and all(map(item_fits, value)))
    if pa.types.is_integer(kind):
        limit = 2 ** (kind.bit_width - 1)
        return lambda value: value is None or (type(value) is int and -limit <= value < limit)
    if pa.types.is_floating(kind):
        return lambda value: value is None or type(value) is float or (type(value) is int and _is_float(value))
    plain = str if pa.types.is_string(kind) else bool
    return lambda value: value is None or isinstance(value, plain)


def _is_float(value: int) -> bool:
    return abs(value) < 2**1023 and float(value) == value


def encode(field: Any, value: Any) -> Any:
    """A value as pyarrow takes it for a field that was ``loosened`` for it: JSON text wherever the field holds it."""
    if value is None:
        return None
    if is_json(field):
        return encode_json(value).decode()
    if pa.types.is_struct(field.type):
        return {item.name: encode(item, value.get(item.name)) for item in field.type}
    if pa.types.is_list(field.type):
        return [encode(field.type.value_field, item) for item in value]
    return value


class _Types:
    """Arrow types of the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = _MAX_FIELDS

    def kind(self, schema: Any, refs: tuple[str, ...], depth: int = 0) -> Any:
        """The type of a part; None for JSON text. ``refs`` are the references that led here."""
        self._num_left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_left < 0:
            return None
        said = _TYPING & schema.keys()
        if said == {"$ref"}:
            ref = schema["$ref"]
            return None if ref in refs else self.kind(self._target(ref), (*refs, ref), depth + 1)
        if len(said) == 1 and (union := said & {*_UNIONS}):
            return self._union(union.pop(), schema, refs, depth)
        return None if said & {"$ref", *_UNIONS} else self._plain(schema, refs, depth)

    def _plain(self, schema: Any, refs: tuple[str, ...], depth: int) -> Any:
        """The type of a part that is defined where it stands."""
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return _common({_OF_VALUES.get(type(value), "") for value in values if value is not None})
        kinds = schema.get("type", [])
        named = {kinds} if isinstance(kinds, str) else {*map(str, kinds)}
        named -= {"null"}
        if named == {"object"}:
            return self._struct(schema, refs, depth)
        return self._list(schema, refs, depth) if named == {"array"} else _common(named)

    def _union(self, keyword: str, schema: Any, refs: tuple[str, ...], depth: int) -> Any:
        """What all parts but null have in common."""
        parts = [part for part in schema[keyword] if part != {"type": "null"}]
        kinds = [self.kind(part, refs, depth + 1) for part in parts]
        if not kinds or None in kinds or (keyword == "allOf" and len(kinds) > 1):
            return None
        return kinds[0] if all(kind.equals(kinds[0], check_metadata=True) for kind in kinds) else None

    def _struct(self, schema: Any, refs: tuple[str, ...], depth: int) -> Any:
        properties = schema.get("properties")
        is_open = schema.get("additionalProperties", False) is not False or any(key in schema for key in _OPEN)
        if is_open or not properties:
            return None
        return pa.struct([field_of(name, self.kind(part, refs, depth + 1)) for name, part in properties.items()])

    def _list(self, schema: Any, refs: tuple[str, ...], depth: int) -> Any:
        items = schema.get("items")
        if "prefixItems" in schema or not isinstance(items, dict):
            return None
        return pa.list_(field_of("item", self.kind(items, refs, depth + 1)))

    def _target(self, ref: Any) -> Any:
        """What a reference into this schema, such as ``#/$defs/Person``, leads to; None for any other one."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        found = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _common(named: set[str]) -> Any:
    """The type that holds values of all these JSON types; None if there is none."""
    if named == {"integer", "number"}:
        named = {"number"}
    return _PLAIN.get(named.pop()) if len(named) == 1 else None

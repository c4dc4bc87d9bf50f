"""Open parts of a JSON schema: lists and strings without a limit, and values of any type.

A model may fill them until ``max_tokens`` ends it. A pattern, a format and an enum count as limits of a string. It
refuses nothing and changes no schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 20  # parts that are listed
_BRANCHES = ("anyOf", "oneOf", "allOf")
_TYPES = ("type", "enum", "const", "$ref", "properties", "items", *_BRANCHES)  # say what a value is
_STRING_LIMITS = ("maxLength", "enum", "const", "pattern", "format")


def open_parts(schema: Any) -> list[str]:
    """Each open part with the keyword that it lacks, such as ``items[].name: no maxLength``; at most ``_MOST``."""
    return [*dict.fromkeys(_open(schema, "", schema, set()))][:_MOST]


def _open(schema: Any, path: str, root: Any, seen: set[str], *, is_branch: bool = False) -> Iterator[str]:
    """``seen`` are the references followed so far: each definition is looked at once, where it stands first.

    A branch, such as one of ``anyOf``, may have its type beside it.
    """
    name = path or "the value"
    is_typed = is_branch or (isinstance(schema, Mapping) and any(key in schema for key in _TYPES))
    if (schema is True or isinstance(schema, Mapping)) and not is_typed:
        yield f"{name}: no type"
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _open(_definition(root, reference), path, root, seen)
    for key in _BRANCHES:
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _open(part, path, root, seen, is_branch=True)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not any(key in schema for key in _STRING_LIMITS):
        yield f"{name}: no maxLength"
    if "array" in kinds:
        yield from _open_list(schema, path, root, seen)
    properties = schema.get("properties")
    for key, part in properties.items() if isinstance(properties, Mapping) else ():
        yield from _open(part, f"{path}.{key}" if path else str(key), root, seen)
    more = schema.get("additionalProperties")
    if more is True or isinstance(more, Mapping):
        if "maxProperties" not in schema:
            yield f"{name}: no additionalProperties = false"
        if more is not True:
            yield from _open(more, f"{path}.*" if path else "*", root, seen)


def _open_list(schema: Mapping[str, Any], path: str, root: Any, seen: set[str]) -> Iterator[str]:
    items = schema.get("items", "prefixItems" not in schema)  # behind ``prefixItems`` none
    if "maxItems" not in schema and items is not False:
        yield f"{path or 'the value'}: no maxItems"
    yield from _open(items, f"{path}[]", root, seen)
    for number, part in enumerate(schema["prefixItems"] if isinstance(schema.get("prefixItems"), list) else ()):
        yield from _open(part, f"{path}[{number}]", root, seen)


def _definition(root: Any, reference: str) -> Any:
    """The schema that a reference inside of ``root`` leads to; None for any other."""
    schema = root
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None if schema is root else schema

"""JSON schemas, prepared for llguidance: parts that it would not enforce are refused or rewritten.

A value of the prepared schema fits the original; objects close and integers are bounded, as small models ramble on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from batchgen.core.units import shown
from batchgen.text.regexes import portable

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name,
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")  # in a list,
_SINGLE = ("items", "additionalProperties", "additionalItems")  # or with one schema
# A part of a schema with only these keywords may be closed independently of other parts.
_PLAIN = {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"} | {
    *("minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# Keywords that restrict or combine; all others are notes to the reader.
_KEYWORDS = _PLAIN | {
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef"),
    *("patternProperties", "propertyNames", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
}
_MAX_INTEGER = (1 << 53) - 1  # RFC 8259, section 6: what every reader of JSON takes for the same number
_EXAMPLES = ("default", "example", "examples")  # values, whatever they look like
_MAX_REMAINDERS = 10_000  # 0.1 s to compile
_MIN_NUMBER = 1e-7  # of what llguidance reads exactly, as digits times 10**x
_MAX_DECIMALS = 9  # with an exclusive bound; llguidance takes 10**-10 as a divisor, and refuses 10**-11
_MAX_PATTERNS = 64  # patternProperties of an object: each pair is compared
# Formats of pydantic and OpenAPI that say what a string is for, not what it looks like.
_NOTES = frozenset(("password", "binary", "path", "file-path", "directory-path"))
# RFC 3339 without leap seconds, which few parsers take; the library's own formats have February 29 in each year.
_DATE = (
    r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^(?:{_DATE})$", "time": f"^{_TIME}$", "date-time": f"^(?:{_DATE})[tT]{_TIME}$"}


def prepared(schema: Any, *, closes_objects: bool) -> dict[str, Any]:
    """The schema for llguidance, without ``x-guidance``. Raises ValueError for an unenforceable keyword."""
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("the schema false fits no value")
        return {}
    try:
        schema = _without_nulls(schema)
        ready: dict[str, Any] = _Preparation(schema, closes_objects).prepare(schema, is_alone=True)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    ready.pop("x-guidance", None)
    return ready


def _without_nulls(value: Any) -> Any:
    """A schema without misplaced nulls: tables give each row the keywords and names of all rows."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    parts = {key: part for key, part in value.items() if part is not None or key == "const"}
    return {key: part if key in ("const", "enum", *_EXAMPLES) else _without_nulls(part) for key, part in parts.items()}


class _Preparation:
    def __init__(self, root: Mapping[str, Any], closes_objects: bool) -> None:
        self._definitions = {
            f"#/{key}/{name}": schema
            for key in ("$defs", "definitions")
            for name, schema in _mapping(root.get(key)).items()
        }
        self._multiple = 1  # of all divisors that may apply to the same number
        self._open: set[str] = set()  # references to schemas that are combined with others
        self._closes = closes_objects and all(map(self._mark_open, self._combined(root)))

    def prepare(self, schema: Any, is_alone: bool) -> Any:
        """Prepare a schema and its parts; ``is_alone``: other schemas do not restrict the same values."""
        if not isinstance(schema, Mapping):
            return schema
        inside = is_alone and self._stands_alone(schema)
        ready: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("$defs", "definitions"):
                parts = _mapping(value).items()
                ready[key] = {name: self.prepare(part, self._is_alone(f"#/{key}/{name}")) for name, part in parts}
            elif key in _MAPS and isinstance(value, Mapping):
                rename = portable if key == "patternProperties" else str
                ready[key] = {rename(name): self.prepare(part, inside) for name, part in value.items()}
            elif key in _LISTS and isinstance(value, list):
                ready[key] = [self.prepare(part, inside) for part in value]
            elif key in _SINGLE:
                ready[key] = self.prepare(value, inside)
            elif key in _KEYWORDS:
                ready[key] = value
                _refuse_long_numbers(value)
            else:  # an unknown keyword may hold a schema that a reference names, as in OpenAPI
                ready[key] = value if key in _EXAMPLES else self.prepare(value, False)
        _spell_out(ready)
        self._refuse_long_multiples(schema.get("multipleOf"), is_alone)
        if inside and self._closes and _may_be_closed(schema):
            ready["additionalProperties"] = False
        if inside and _is_integer(schema):
            ready = _integer_bounds(schema) | ready
        return ready

    def _is_alone(self, reference: str) -> bool:
        return reference in self._definitions and reference not in self._open

    def _refuse_long_multiples(self, divisor: Any, is_alone: bool) -> None:
        """Raises ValueError if a number would be checked by an automaton of too many states, one per remainder."""
        if not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
            return
        digits = int("".join(map(str, Decimal(str(divisor)).normalize().as_tuple().digits)))
        whole = math.lcm(1 if is_alone else self._multiple, max(digits, int(divisor)))
        if whole > _MAX_REMAINDERS:
            raise ValueError(f"multipleOf {shown(divisor, 40)} has too many remainders; at most {_MAX_REMAINDERS:,}")
        self._multiple = self._multiple if is_alone else whole

    def _stands_alone(self, schema: Mapping[str, Any]) -> bool:
        """Whether each part of a schema may be narrowed, without excluding all values or admitting new ones."""
        keys = _KEYWORDS.intersection(schema)
        if keys == {"oneOf"}:
            return self._are_told_apart(schema["oneOf"])
        if keys == {"allOf"}:
            return isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1
        return keys <= _PLAIN or keys in ({"$ref"}, {"anyOf"}, {"anyOf", "type"})

    def _are_told_apart(self, branches: Any) -> bool:
        """Whether a required property has a different constant in each branch, so that no value fits two branches."""
        constants = []
        for branch in branches if isinstance(branches, list) else ():
            reference = str(_mapping(branch).get("$ref"))
            schema = _mapping(self._definitions.get(reference, branch))
            required = _texts(schema.get("required"))
            properties = _mapping(schema.get("properties")).items()
            constants.append({name: _mapping(part).get("const") for name, part in properties if name in required})
        columns = ([constant.get(name) for constant in constants] for name in (constants[0] if constants else ()))
        return any(len(set(_texts(column))) == len(column) for column in columns)

    def _combined(self, root: Mapping[str, Any]) -> Iterator[str]:
        """References to schemas that are combined with others: if they were closed, no value might fit."""
        waiting: list[Any] = [root]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, Mapping) and self._stands_alone(schema):
                waiting += _parts(schema)
                schema = {key: part for key, part in schema.items() if key not in _KEYWORDS.union(_MAPS)}
            yield from _references(schema)

    def _mark_open(self, reference: str) -> bool:
        """Note that a definition, and all that it refers to, stays open; returns False if the root lacks it."""
        if reference in self._open:
            return True
        if reference not in self._definitions:
            return False
        self._open.add(reference)
        return all(map(self._mark_open, _references(self._definitions[reference])))


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _MAPS:
            yield from _mapping(value).values()
        elif key in _LISTS and isinstance(value, list):
            yield from value
        elif key in _SINGLE:
            yield value


def _references(value: Any) -> Iterator[str]:
    """Each ``$ref`` anywhere in a value."""
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _references(part)


def _may_be_closed(schema: Mapping[str, Any]) -> bool:
    properties, required = _mapping(schema.get("properties")), _texts(schema.get("required"))
    is_simple = _KEYWORDS.intersection(schema) <= {"type", "properties", "required"}
    return is_simple and bool(properties) and all(name in properties for name in required)


def _is_integer(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else _texts(kinds)
    return "integer" in named and "number" not in named


def _integer_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that an integer lacks, unless they would exclude all values."""
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    bounds = {}
    if low is None and (high is None or _is_below(-_MAX_INTEGER, high)):
        bounds["minimum"] = -_MAX_INTEGER
    if high is None and (low is None or _is_below(low, _MAX_INTEGER)):
        bounds["maximum"] = _MAX_INTEGER
    return bounds


def _is_below(low: Any, high: Any) -> bool:
    return isinstance(low, int | float) and isinstance(high, int | float) and low < high


def _spell_out(schema: dict[str, Any]) -> None:
    """Rewrite, in place, keywords that llguidance reads differently from validators. Raises ValueError."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = portable(schema["pattern"])
    named = str(schema.get("format"))
    if named in _NOTES:
        del schema["format"]
    elif named in _FORMATS:
        if "pattern" in schema:
            _demand(schema, {"pattern": _FORMATS[named]})
        else:
            schema["pattern"] = _FORMATS[named]
        del schema["format"]
    if not _is_integer(schema):
        _limit_decimals(schema)
    if len(_mapping(schema.get("patternProperties"))) > _MAX_PATTERNS:
        raise ValueError(f"an object has more than {_MAX_PATTERNS} patternProperties")
    if isinstance(schema.get("required"), bool):
        raise ValueError("required must be a list of names next to properties; true inside a property has no effect")
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    minimum = schema.get("minProperties")
    if isinstance(minimum, int) and minimum > 1 + len(set(_texts(schema.get("required")))):
        raise ValueError(f"minProperties {minimum} cannot be enforced: a further property may repeat its name")


def _demand(schema: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Require values to fit another schema too, in place."""
    others = schema.get("allOf")
    schema["allOf"] = [*(others if isinstance(others, list) else ()), part]


def _limit_decimals(schema: dict[str, Any]) -> None:
    """Limit the decimals of numbers with exclusive bounds, in place: readers round 0.999... to a bound of 1.

    Raises ValueError for bounds that llguidance does not keep.
    """
    exclusive = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [bound for bound in exclusive if bound is not None and bound is not False]
    lows = [low for low in (schema.get("minimum"), schema.get("exclusiveMinimum")) if low is not None]
    highs = [high for high in (schema.get("maximum"), schema.get("exclusiveMaximum")) if high is not None]
    if any(isinstance(bound, bool) for bound in bounds):
        raise ValueError("exclusive bounds must be numbers, not true as in draft 4 of JSON Schema")
    if not bounds or not all(isinstance(bound, int | float) for bound in lows + highs):
        return
    if lows and highs and max(lows) + 1 > min(highs):
        raise ValueError("an exclusive bound less than 1 from the other bound cannot be enforced; use an inclusive one")
    num_digits = max(len(str(int(abs(bound)))) for bound in bounds)
    decimals = min(15 - num_digits, _MAX_DECIMALS)
    if decimals < 0:
        raise ValueError("an exclusive bound of 10**15 or more cannot be enforced; use an inclusive one")
    _demand(schema, {"multipleOf": 10.0**-decimals})


def _refuse_long_numbers(value: Any) -> None:
    """Raises ValueError for a number that llguidance may take for another: it reads decimals as digits times 10**x."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _refuse_long_numbers(part)
    if isinstance(value, int):
        is_exact = abs(value) <= _MAX_INTEGER
    elif isinstance(value, float):
        is_exact = value == 0 or (_MIN_NUMBER <= abs(value) <= _MAX_INTEGER and float(f"{value:.15g}") == value)
    else:
        return
    if not is_exact:
        raise ValueError(
            f"{shown(value, 40)} cannot be enforced: numbers have up to 15 digits and are at most 2**53 - 1; "
            "omit a bound beyond that, or let a string hold the number"
        )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

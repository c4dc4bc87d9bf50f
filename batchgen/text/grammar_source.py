"""Grammar sources: translates a request's schema, regex or choices for llguidance, and its errors for people.

``grammar`` uses it to follow a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from batchgen.core.structured import parsed, schema_of
from batchgen.core.units import shortened
from batchgen.text.regexes import any_of, portable, white_space
from batchgen.text.schemas import prepared

_MAX_REASON = 300  # characters of the library's message
_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
_STRICT = {"lenient": False, "coerce_one_of": False}
# The library's messages, and what people can do about them.
_REASONS = (
    (r"Unimplemented keys: (.*)", r"the schema has keywords that cannot be enforced: \1"),
    (
        r"oneOf constraints are not supported.*",
        "the branches of a oneOf may overlap: use anyOf, or let a required property have another const in each",
    ),
    (r"Unknown format: (.*)", r"the format \1 cannot be enforced; a pattern may say the same"),
    (r"NoExtension(Bias)?.*", "no text fits it"),
    (
        r".*(Too many items|Current row has).*",
        "too much may come at one place: many optional properties or alternatives, or a recursion without an end",
    ),
    (r" *<non-verbose/>", ""),
    (r"(recursion limit exceeded|maximum recursion depth).*", "it is nested too deeply"),
)
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarError(Exception):
    """A grammar cannot be used; ``str()`` says why, and completes "structured_outputs: ..."."""


def library() -> Any:
    """The package llguidance, imported only if a grammar is needed."""
    import llguidance

    return llguidance


def source(llguidance: Any, text: str) -> str:
    """The grammar, in llguidance's format, for a canonical text of structured outputs."""
    outputs = parsed(text)
    matcher = llguidance.LLMatcher
    schema = schema_of(text)
    if schema is not None:
        schema = prepared(schema, closes_objects=outputs.get("disable_additional_properties", True))
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=_json_options(outputs)))
    if "regex" in outputs:
        return str(matcher.grammar_from_regex(portable(outputs["regex"])))
    if "choice" in outputs:
        return str(matcher.grammar_from_regex(any_of(outputs["choice"])))
    if _GBNF_RULE.search(outputs["grammar"]):
        raise ValueError("the grammar is GBNF (root ::= ...): write it in Lark (start: ...)")
    return str(matcher.grammar_from_lark(outputs["grammar"]))


def _json_options(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Options for JSON. White space is fixed by default: if it is free, tokens are wasted and few can be forced."""
    if pattern := outputs.get("whitespace_pattern"):
        return {"whitespace_flexible": True, "whitespace_pattern": white_space(pattern), **_STRICT}
    separators = {"item_separator": ",", "key_separator": ":"} if outputs.get("disable_any_whitespace") else _SEPARATORS
    return {"whitespace_flexible": False, **_STRICT, **separators}


def explained(message: str) -> str:
    """A message of the library as one line, with a remedy."""
    for pattern, text in _REASONS:
        message = re.sub(pattern, text, message)
    return shortened(" ".join(message.split()), _MAX_REASON)

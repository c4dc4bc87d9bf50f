"""The answer in a text, found by a rule and compared as evaluators do: lm-evaluation-harness's "flexible-extract".

A rule is ``last_number`` or an expression of RE2: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import json
import re
from collections import deque
from itertools import count
from typing import Any

LAST_NUMBER = "last_number"
_MAX_EXACT = 1 << 53  # whole floats below are written without an exponent
_NUMBER = re.compile(r"(-?[$0-9.,]{2,}|-?[0-9]+)")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)")
_FIRST_MARK = 0xE000  # a character for private use


def check_rule(rule: str) -> str:
    """The rule, if it can be used. Raises ValueError, which says what a rule is."""
    if rule != LAST_NUMBER:
        _last_group(rule, "")
    return rule


def find_answer(rule: str, text: str) -> str | None:
    """The answer in a text by the last match of a rule; None if nothing matches or the group is empty.

    A number comes without commas and dollar signs. Raises ValueError as ``check_rule`` does.
    """
    if rule != LAST_NUMBER:
        return _last_group(rule, text)
    for match in deque(_NUMBER.finditer(text), maxlen=1):
        number = normal(match[1])
        return number if _DECIMAL.fullmatch(number) else match[1].strip()
    return None


def _last_group(pattern: str, text: str) -> str | None:
    """The first group of the last match of a regular expression, without white space around it; None if empty.

    Raises ValueError if RE2 does not read the expression, or if it lacks a group.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text = text.encode(errors="replace").decode()  # Arrow cannot hold lone surrogates
    mark = next(chr(code) for code in count(_FIRST_MARK) if chr(code) not in text)
    try:
        marked = pc.replace_substring_regex(pa.scalar(text), pattern=pattern, replacement=rf"{mark}\1{mark}").as_py()
    except pa.ArrowInvalid as error:
        if str(error).startswith("Invalid replacement"):
            raise ValueError("must be last_number or a regular expression with a group ( )") from None
        what = str(error).partition(": ")[2]
        raise ValueError(f"is not a regular expression of RE2, which lacks look-around: {what}") from None
    group: str = marked.rpartition(mark)[0].rpartition(mark)[2].strip()
    return group or None


def is_right(rule: str, answer: str | None, expected: Any) -> bool:
    """Whether an answer equals ``expected``, or what the rule finds in it, e.g. the last number of a solution."""
    if answer is None:
        return False
    part = find_answer(rule, text_of(expected))
    return normal(answer) == normal(text_of(expected) if part is None else part)


def normal(text: str) -> str:
    """A text as it is compared: in lower case, without outer white space, commas, dollar signs and a last full stop."""
    return text.strip().casefold().replace(",", "").replace("$", "").removesuffix(".").strip()


def text_of(value: Any) -> str:
    """The text of an expected answer; a number or another type becomes JSON, with 3.0 as 3."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

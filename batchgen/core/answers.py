"""The answer in a text, found by a rule and compared with the expected one as evaluators do.

A rule is ``last_number``, ``choice``, ``parsed.KEY`` or a regular expression whose first group is the answer. The
number is what lm-evaluation-harness takes from answers to GSM8K (its filter "flexible-extract"), and commas, dollar
signs and a last full stop do not count, as in its exact match; zeros behind the point do. Values of parsed JSON are
equal if their numbers are. It counts no rows.

A regular expression may take any time over a text, so a process with limits searches for it; what takes longer has no
answer. The other rules take time in proportion to the text.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.limited import LimitedProgram, Program, SetupRefused

MAX_CPU_S = 2.0  # processor time per text of a regular expression
_MAX_BYTES = 512 << 20
_SEARCH_LOCK = threading.Lock()  # a process answers one thread at a time
LAST_NUMBER, CHOICE, PARSED = "last_number", "choice", "parsed."
_RULES = {
    LAST_NUMBER: (re.compile(r"(-?[$0-9.,]{2,}|-?[0-9]+)"),),
    CHOICE: (  # the first of these that a text has
        re.compile(r"(?i:\banswer)(?i: is)?\W{1,8}([A-J])(?!\w)"),
        re.compile(r"(?<![\w'])([A-J])(?=\s*(?:$|[\n).,:;*\]]))"),
    ),
}
_DECIMAL = re.compile(r"[-+]?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)")


def check_rule(rule: str) -> str:
    """The rule itself. Raises ValueError saying what a rule is."""
    if rule in _RULES or (rule.startswith(PARSED) and rule != PARSED):
        return rule
    try:
        num_groups = re.compile(rule).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if not num_groups:
        raise ValueError("must be last_number, choice, parsed.KEY or a regular expression with a group ( )")
    return rule


def find_answer(rule: str, text: str, parsed: Any = None, on_limit: Callable[[], object] = lambda: None) -> str | None:
    """The answer in a text by the last match of a rule, or in its ``parsed`` JSON value; None where there is none.

    A number comes without commas and dollar signs, a value that is no string as JSON. ``on_limit`` is called where a
    regular expression takes too long, which finds none. Raises BatchgenError if its process cannot be started, and
    UsageError if it does not compile within the limits.
    """
    if rule.startswith(PARSED):
        for name in rule.removeprefix(PARSED).split("."):
            parsed = parsed.get(name) if isinstance(parsed, dict) else None
        return None if parsed is None else _text(parsed)
    if rule not in _RULES:
        return _searched(rule, text, on_limit)
    found = _last_match(_RULES[rule], text)
    if found is None:
        return None
    number = normal(found)
    return number if rule == LAST_NUMBER and _DECIMAL.fullmatch(number) else found.strip()


def _searched(rule: str, text: str, on_limit: Callable[[], object]) -> str | None:
    with _SEARCH_LOCK:
        answer, problem = _searching(rule).answer(json.dumps(text).encode())
    if problem:
        on_limit()
        return None
    found: str | None = json.loads(answer)
    return found


def _last_match(patterns: Iterable[re.Pattern[str]], text: str) -> str | None:
    """The first group of the last match of the first pattern that has one with that group."""
    for pattern in patterns:
        for found in deque(pattern.finditer(text), maxlen=1):
            if found[1] is not None:
                return found[1]
    return None


def start(rule: str) -> Callable[[bytes], str]:
    """The program that searches for a regular expression: an item is a text in JSON, its answer the one found."""
    pattern = re.compile(rule)

    def search(item: bytes) -> str:
        found = _last_match([pattern], json.loads(item))
        return json.dumps(None if found is None else found.strip())

    return search


@lru_cache(maxsize=4)
def _searching(rule: str) -> LimitedProgram:
    program = Program("batchgen.core.answers", "searches answers", {"rule": rule}, MAX_CPU_S, _MAX_BYTES)
    try:
        return LimitedProgram(program)
    except SetupRefused as error:
        raise UsageError(f"output.answer: the regular expression does not compile: {error}") from None


def is_right(rule: str, answer: str | None, expected: Any) -> bool:
    """Whether an answer equals ``expected``, of which the same is taken where the rule finds it: a whole solution has
    its last number compared.
    """
    if answer is None:
        return False
    if rule.startswith(PARSED):
        texts = map(normal, (answer, _text(expected)))
        return len({Decimal(text) if _DECIMAL.fullmatch(text) else text for text in texts}) == 1
    found = find_answer(rule, _text(expected))
    return normal(answer) == normal(_text(expected) if found is None else found)


def normal(text: str) -> str:
    """A text as it is compared: without white space around it, case, commas, dollar signs and a last full stop."""
    return text.strip().casefold().replace(",", "").replace("$", "").removesuffix(".").strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

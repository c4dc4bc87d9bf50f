"""The answer in a text, found by a rule and compared with the expected one as evaluators do.

A rule is ``last_number`` or a regular expression whose first group is the answer. The number is what
lm-evaluation-harness takes from answers to GSM8K (its filter "flexible-extract"), and commas, dollar signs and a last
full stop do not count, as in its exact match; zeros behind the point do. It counts no rows.

A regular expression may take any time over a text, so a process with limits searches for it; what takes longer has no
answer. The last number takes time in proportion to the text.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from batchgen.core.errors import UsageError
from batchgen.core.limited import LimitedProgram, Program, SetupRefused

MAX_CPU_S = 2.0  # processor time per text of a regular expression
_MAX_BYTES = 512 << 20
_SEARCH_LOCK = threading.Lock()  # a process answers one thread at a time
LAST_NUMBER = "last_number"
_MOST_EXACT = 1 << 53  # whole floats below are written without an exponent
_NUMBER = re.compile(r"(-?[$0-9.,]{2,}|-?[0-9]+)")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]++(?:\.[0-9]++)?|\.[0-9]++)")


def check_rule(rule: str) -> str:
    """The rule itself. Raises ValueError saying what a rule is."""
    if rule == LAST_NUMBER:
        return rule
    try:
        num_groups = re.compile(rule).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if not num_groups:
        raise ValueError("must be last_number or a regular expression with a group ( )")
    return rule


def find_answer(rule: str, text: str, on_limit: Callable[[], object] = lambda: None) -> str | None:
    """The answer in a text by the last match of a rule; None where there is none.

    A number comes without commas and dollar signs. ``on_limit`` is called where a regular expression takes too long,
    which finds none. Raises BatchgenError if its process cannot be started, and UsageError if it does not compile
    within the limits.
    """
    if rule != LAST_NUMBER:
        return _searched(rule, text, on_limit)
    match = _last_match(_NUMBER, text)
    if match is None:
        return None
    number = normal(match)
    return number if _DECIMAL.fullmatch(number) else match.strip()


def _searched(rule: str, text: str, on_limit: Callable[[], object]) -> str | None:
    with _SEARCH_LOCK:
        answer, problem = _searching(rule).answer(json.dumps(text).encode())
    if problem:
        on_limit()
        return None
    match: str | None = json.loads(answer)
    return match


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match of a pattern."""
    for match in deque(pattern.finditer(text), maxlen=1):
        return match[1]
    return None


def start(rule: str) -> Callable[[bytes], str]:
    """The program that searches for a regular expression: an item is a text in JSON, its answer the one found."""
    pattern = re.compile(rule)

    def search(item: bytes) -> str:
        match = _last_match(pattern, json.loads(item))
        return json.dumps(None if match is None else match.strip())

    return search


@lru_cache(maxsize=4)
def _searching(rule: str) -> LimitedProgram:
    program = Program("batchgen.core.answers", "searches answers", {"rule": rule}, MAX_CPU_S, _MAX_BYTES)
    try:
        return LimitedProgram(program)
    except SetupRefused as error:
        raise UsageError(f"eval.extract: the regular expression does not compile: {error}") from None


def is_right(rule: str, answer: str | None, expected: Any) -> bool:
    """Whether an answer equals ``expected``, or the part that the rule finds in it: the last number of a solution."""
    if answer is None:
        return False
    part = find_answer(rule, text_of(expected))
    return normal(answer) == normal(text_of(expected) if part is None else part)


def normal(text: str) -> str:
    """A text as it is compared: without white space around it, case, commas, dollar signs and a last full stop."""
    return text.strip().casefold().replace(",", "").replace("$", "").removesuffix(".").strip()


def text_of(value: Any) -> str:
    """The text of a right answer that an input may have typed: JSON, and a whole float as an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_EXACT:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

"""Calls in the notation of Python, ``[weather.now(city="Zürich", days=[1, 2], metric=true)]``, as LFM2 writes them.

A grammar of its own instead of ``ast``: names of tools hold dots and hyphens, those of arguments are often words of
Python (``from``), literals are as often JSON's as Python's, and ``ast`` warns, recurses and takes memory on text that a
model made up. Nothing is evaluated: an argument is a literal, or the calls are malformed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

MAX_DEPTH = 64  # of nesting
SPACE = re.compile(r"\s*+")
NAME = re.compile(r"[^\s()\[\]{}=,:'\"]+")  # of a tool or an argument
_QUOTED = "|".join(
    rf"{quote}{{3}}(?:[^\\{quote}]|\\.|{quote}(?!{quote}{{2}}))*+{quote}{{3}}|{quote}[^\\{quote}]*+(?:\\.[^\\{quote}]*+)*+{quote}"
    for quote in ("'", '"')
)
_TOKEN = re.compile(rf"({_QUOTED})|({NAME.pattern})", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*+)")
_FLOAT = re.compile(r"[+-]?(?:[0-9]++\.[0-9]*+|\.[0-9]++|[0-9]++(?=[eE]))(?:[eE][+-]?[0-9]++)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def read_calls(text: str, start: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """The calls that begin at ``start``, in a list or separated by commas: names and arguments, and where they end.

    Raises ValueError where they are malformed.
    """
    reader = _Reader(text, start)
    is_list = reader.takes("[")
    calls: list[tuple[str, dict[str, Any]]] = []
    while not (is_list and reader.takes("]")):
        calls.append(reader.call())
        if not reader.takes(","):
            if is_list:
                reader.take("]")
            break
    return calls, reader.at


class _Reader:
    """Reads tokens from left to right; ``at`` is where the next one begins. All methods raise ValueError."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def takes(self, mark: str) -> bool:
        """Whether the next token is this mark, which is then taken."""
        self._skip_space()
        if not self._text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def take(self, mark: str) -> None:
        if not self.takes(mark):
            self._fail(f"{mark!r} is missing")

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self._name()
        self.take("(")
        return name, self._pairs(")", "=", self._name, 1)

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._fail("it is nested too deeply")
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.takes(opening):
                return self._items(closing, depth)
        if self.takes("{"):
            return self._pairs("}", ":", self._string, depth)
        found = self._next()
        return self._constant(found[2]) if found[1] is None else _unquoted(found[1])

    def _items(self, closing: str, depth: int) -> list[Any]:
        found = []
        while not self.takes(closing):
            found.append(self._value(depth + 1))
            if not self.takes(","):
                self.take(closing)
                break
        return found

    def _pairs(self, closing: str, between: str, key: Callable[[], str], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.takes(closing):
            name = key()
            self.take(between)
            if name in found:
                self._fail(f"{name!r} is given twice")
            found[name] = self._value(depth + 1)
            if not self.takes(","):
                self.take(closing)
                break
        return found

    def _name(self) -> str:
        found = self._next()
        return found[2] or self._fail("a name is missing")

    def _string(self) -> str:
        found = self._next()
        return _unquoted(found[1] or self._fail("a key is no string"))

    def _next(self) -> re.Match[str]:
        """A string, or a word as its second group."""
        self._skip_space()
        found = _TOKEN.match(self._text, self.at)
        if found is None:
            self._fail("a value is missing")
        self.at = found.end()
        return found

    def _skip_space(self) -> None:
        found = SPACE.match(self._text, self.at)
        self.at = found.end() if found else self.at

    def _constant(self, word: str) -> Any:
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if _INTEGER.fullmatch(word):
            return int(word)  # of more than 4,300 digits: ValueError
        if _FLOAT.fullmatch(word) and math.isfinite(value := float(word)):
            return value
        return self._fail("a value is no literal")

    def _fail(self, why: str) -> NoReturn:
        raise ValueError(f"{why} at character {self.at}")


def _unquoted(quoted: str) -> str:
    """The text of a string literal; escapes that neither Python nor JSON has stay as they are."""
    width = 3 if quoted[:3] in ("'''", '"""') else 1
    text = _ESCAPE.sub(_escaped, quoted[width:-width])
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # joins pairs, and refuses lone surrogates


def _escaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code or found[4]:
        point = int(code, 16) if code else int(found[4], 8)
        if point > sys.maxunicode:  # chr() raises OverflowError for some of these
            raise ValueError(f"\\U{code} is no character")
        return chr(point)
    mark = found[5]
    return mark if mark in "\\'\"/" else _ESCAPED.get(mark, f"\\{mark}")

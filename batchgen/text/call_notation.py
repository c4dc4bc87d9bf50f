"""Reader of tool calls in the notation of LFM2: ``[get-weather(city="Zürich", days=[1, 2], metric=true)]``.

Python's parser refuses possible names (``from``, ``get-weather``); literals are Python's or JSON's. Nothing is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.core.json_line import json_value

Offered = Mapping[str, Mapping[str, str]]  # by the name of a tool, the type of each parameter, "" if unknown
_MAX_CHARS = 1 << 18  # of one list of calls
_MAX_DEPTH = 100
_NAME = r"[^\s()\[\]{},='\":]++"
_BLANKS = re.compile(r"\s*+")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_PADDED = re.compile(r"0[0-9]++")  # a number in no notation: a postal code, or digits of a fixed width
_WORD = re.compile(r"[A-Za-z]++")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TEXTS = [re.compile(rf"{quote}((?:[^\\]|\\.)*?){quote}", re.DOTALL) for quote in ('"""', "'''", '"', "'")]
_ESCAPE = re.compile(r"\\(?:(\n)|([\\'\"abfnrtv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}))")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def read_calls(text: str, at: int, offered: Offered) -> tuple[list[tuple[str, Any]], int]:
    """The calls that begin at ``at``, one or a list, as names and arguments, and where they end.

    The names that ``offered`` holds may have any characters. Raises ValueError for anything else than calls with
    literals.
    """
    return _Reader(text, at, offered).calls()


class _Reader:
    """Reads values from a text at a position, which it moves."""

    def __init__(self, text: str, at: int, offered: Offered) -> None:
        self._text = text[: at + _MAX_CHARS]
        self._at = at
        self._offered = offered
        self._tool = _names(offered)

    def calls(self) -> tuple[list[tuple[str, Any]], int]:
        if self._takes("["):
            return self._items("]", self._call), self._at
        calls = [self._call()]
        while self._takes(",") and not self._is_at_end():
            calls.append(self._call())
        return calls, self._at

    def _is_at_end(self) -> bool:
        return self._at == len(self._text) or self._text.startswith("<|", self._at)

    def _call(self) -> tuple[str, Any]:
        name = self._match(self._tool)
        types = self._offered.get(name, {})
        parameter = _names(types)
        arguments: dict[str, Any] = {}

        def argument() -> None:
            key = self._match(parameter)
            self._expect("=")
            if key in arguments:
                raise ValueError("an argument is given twice")
            arguments[key] = self._value(types.get(key, ""))

        self._expect("(")
        self._items(")", argument)
        return name, json_value(json.dumps(arguments))  # refuses numbers and texts that JSON has not

    def _value(self, json_type: str = "", depth: int = 0) -> Any:
        """A value; ``json_type`` is the type that the tool's schema gives it."""
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if self._takes("["):
            return self._items("]", lambda: self._value(depth=depth + 1))
        if self._takes("{"):
            return self._pairs(depth)
        if self._takes("("):
            items = self._items(")", lambda: self._value(depth=depth + 1))
            is_list = len(items) != 1 or self._text[: self._at - 1].rstrip().endswith(",")
            return items if is_list else items[0]
        if match := next((match for form in _TEXTS if (match := form.match(self._text, self._at))), None):
            self._at = match.end()
            return _ESCAPE.sub(_unescaped, match[1])
        if match := _NUMBER.match(self._text, self._at):
            self._at = match.end()
            return _number(match[0], json_type)
        if (word := self._match(_WORD)) in _WORDS:
            return _WORDS[word]
        raise ValueError("a value is not a literal")

    def _pairs(self, depth: int) -> dict[Any, Any]:
        pairs: dict[Any, Any] = {}

        def pair() -> None:
            key = self._value(depth=depth + 1)
            self._expect(":")
            if isinstance(key, dict | list) or key in pairs:
                raise ValueError("a key is not a text, or is there twice")
            pairs[key] = self._value(depth=depth + 1)

        self._items("}", pair)
        return pairs

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        """The items up to ``closing``, separated by commas; a comma after the last item is allowed."""
        items = []
        while not self._takes(closing):
            items.append(read())
            if not self._takes(","):
                self._expect(closing)
                break
        return items

    def _takes(self, mark: str) -> bool:
        """Whether ``mark`` comes next, after blanks; if so it is skipped, with the blanks after it."""
        self._pass_blanks()
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        self._pass_blanks()
        return True

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            raise ValueError(f"{mark} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        if (match := pattern.match(self._text, self._at)) is None:
            raise ValueError("a name is missing")
        self._at = match.end()
        return match[0]

    def _pass_blanks(self) -> None:
        blanks = _BLANKS.match(self._text, self._at)
        self._at = blanks.end() if blanks else self._at


def _names(names: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern that matches one of these names before a parenthesis or an equals sign, or else any plain name."""
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?:{listed})(?=\s*[(=])|{_NAME}" if listed else _NAME)


def _number(text: str, json_type: str) -> Any:
    """A number; with leading zeros it is a text, unless the schema asks for a number."""
    if text.lstrip("+-")[:2] in ("0x", "0X"):
        return int(text, 16)
    if _PADDED.fullmatch(text):
        return int(text) if json_type in ("integer", "number") else text
    if text.replace("_", "").lstrip("+-").isdigit():
        return int(text)
    return float(text)


def _unescaped(match: re.Match[str]) -> str:
    newline, letter, *codes, octal = match.groups()
    if newline:
        return ""
    if letter:
        return _LETTERS.get(letter, letter)
    code = int(octal, 8) if octal else int(next(code for code in codes if code), 16)
    return chr(min(code, 0x110000))  # a ValueError for a number that no character has

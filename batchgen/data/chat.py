"""The model folder's own chat template, rendered as ``transformers`` renders it, in jinja2's sandbox.

A template is code from a stranger: it gets the messages and the special tokens, no file, no module, no attribute that
leads out of them, and ``sandbox`` bounds what it can allocate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from batchgen.data.sandbox import MAX_SIZE, BoundedEnvironment

_MAX_INDENT = 64


class ChatTemplateError(Exception):
    """The template cannot be compiled, or refuses or fails on these messages; ``str()`` is one line."""


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what training counts; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (len(indent) if isinstance(indent, str) else indent or 0) > _MAX_INDENT:
        raise jinja2.TemplateError(f"tojson cannot indent by more than {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_at(now: datetime) -> Callable[[str], str]:
    return now.strftime  # one instant for the whole run: rows must not depend on when they were reached


class ChatTemplate:
    """A compiled template.

    ``special_tokens`` are the names a template expects, such as ``bos_token``. Raises ChatTemplateError when the
    source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_at(datetime.now())
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {_one_line(error)}") from error
        constant = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._template.globals = {**self._template.globals, **constant}  # a plain dict: jinja copies it for each row

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to and with the header of the assistant's turn. Raises ChatTemplateError."""
        try:
            text = "".join(_bounded(self._template.generate(messages=messages)))
            text.encode()  # a template can make lone surrogates, which no tokenizer takes
        except Exception as error:  # a template is a program of its own and may raise anything
            raise ChatTemplateError(f"the chat template failed: {_one_line(error)}") from error
        return text


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces, as long as they do not come to more than any context holds."""
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_SIZE:
            raise jinja2.TemplateError("it makes too long a text")
        yield piece


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."

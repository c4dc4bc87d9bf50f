"""Program that renders chat templates in a child process; ``chat`` starts it with limits, by ``core.limited``.

A template is code from a stranger. The sandbox of jinja2 keeps it from files, modules and the interpreter, but cannot
bound its time or memory: filters, operators and ``join`` run in C. An item is the variables of one chat, and its answer
the prompt. It imports nothing of batchgen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug  # jinja2 imports it at the first error, when memory may have run out
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what training counts; in a prompt only its content remains.

    As in ``transformers`` it is a call block, so that what is set in it stays in it.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """``namespace``, which refuses what the sandbox would not read again: it would be empty in the prompt."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` may be a name in it
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have {name!r}: names with an underscore in front are not for templates"
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Renderer:
    """A compiled template, in the environment that ``transformers`` gives it; ``now`` is an ISO 8601 instant."""

    def __init__(self, source: str, special_tokens: dict[str, str], now: str, max_chars: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["namespace"] = _Namespace
        environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
        self._max_chars = max_chars
        tree = environment.parse(source)
        known = {node.name for node in tree.find_all(nodes.Name)} & environment.globals.keys()
        self.names = " ".join(sorted(meta.find_undeclared_variables(tree) | known))
        self._template = environment.from_string(tree)
        constant = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._template.globals = {**self._template.globals, **constant}  # a plain dict: jinja copies it per prompt

    def render(self, chat: bytes) -> str:
        """The prompt for the variables of one chat, a JSON object."""
        pieces, size = [], 0
        for piece in self._template.generate(json.loads(chat.decode(errors="surrogatepass"))):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_chars:
                raise jinja2.TemplateError(f"it makes a text of more than {self._max_chars} characters")
        return "".join(pieces)


def start(**setup: Any) -> tuple[str, Callable[[bytes], str]]:
    """The program: it greets with all names that the template takes from outside, and its items are JSON objects."""
    renderer = _Renderer(**setup)
    return renderer.names, renderer.render

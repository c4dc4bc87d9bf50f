"""The program that renders chat templates in a process of its own: ``chat`` starts it, limits it and reads its answers.

A template is code from a stranger. jinja2's sandbox keeps it from files, modules and the interpreter, but neither its
time nor its memory can be bounded from within: filters, operators and ``join`` run in C. So the kernel bounds both,
and a template that passes a bound ends this process, not the run. It imports jinja2, and ``units`` of batchgen alone.

Each message is a header line with its length, then its bytes. The first one in is the setup, a JSON object; those
after it are chats, one JSON text per line. An empty answer says that the program has started; then the setup and each
chat are answered in turn, with ``+`` and a text or ``-`` and what is wrong before the length.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.debug  # which jinja2 imports at the first error, when there may be no memory for it
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.core.units import one_line


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Renderer:
    """A compiled template, in the environment that ``transformers`` gives it; ``now`` is an ISO 8601 instant."""

    def __init__(self, source: str, special_tokens: dict[str, str], now: str, max_chars: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
        self._max_chars = max_chars
        self._template = environment.from_string(source)
        constant = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._template.globals = {**self._template.globals, **constant}  # a plain dict: jinja copies it for each row

    def render(self, chat: bytes) -> str:
        """The prompt for a list of messages in JSON."""
        messages = json.loads(chat.decode(errors="surrogatepass"))
        return "".join(self._bounded(self._template.generate(messages=messages)))

    def _bounded(self, pieces: Iterator[str]) -> Iterator[str]:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > self._max_chars:
                raise jinja2.TemplateError(f"it makes a text of more than {self._max_chars} characters")
            yield piece


def main(out_of_memory: int) -> None:
    """Answer until standard input ends.

    The process ends by SIGPROF when an answer takes too much processor time, and with status ``out_of_memory`` when
    it gets no more memory.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a mask of the run's is inherited
    try:
        _write(b"+", b"")
        _serve(json.loads(_read()))
    except MemoryError:
        os._exit(out_of_memory)
    except BrokenPipeError:  # the run has gone
        os._exit(0)


def _serve(setup: dict[str, Any]) -> None:
    max_cpu_s, max_bytes = setup.pop("max_cpu_s"), setup.pop("max_bytes")
    _limit(resource.RLIMIT_DATA, max_bytes)
    _limit(resource.RLIMIT_AS, 2 * max_bytes)  # for kernels whose RLIMIT_DATA knows only the heap
    _limit(resource.RLIMIT_CORE, 0)
    compiled: list[_Renderer] = []

    def compile_template() -> str:
        compiled.append(_Renderer(**setup))
        return ""

    _answer(compile_template, max_cpu_s)
    while chats := _read():
        for chat in chats.split(b"\n"):
            _answer(partial(compiled[0].render, chat), max_cpu_s)


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # a system that knows no such limit
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _read() -> bytes:
    header = sys.stdin.buffer.readline()
    return sys.stdin.buffer.read(int(header)) if header else b""


def _answer(work: Callable[[], str], max_cpu_s: float) -> None:
    """Write what ``work`` returns or raises, within a limit of processor time, which a busy machine does not use up."""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        kind, answer = b"+", work().encode()  # a template can make lone surrogates, which no tokenizer takes
    except MemoryError:
        raise
    except Exception as error:  # a template is a program of its own and may raise anything
        kind, answer = b"-", one_line(error).encode(errors="backslashreplace")
    signal.setitimer(signal.ITIMER_PROF, 0)  # so that reading the next chats is not held against them
    _write(kind, answer)


def _write(kind: bytes, answer: bytes) -> None:
    sys.stdout.buffer.write(b"%s%d\n%s" % (kind, len(answer), answer))
    sys.stdout.buffer.flush()

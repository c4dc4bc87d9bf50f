"""Program that renders chat templates in a child process; ``chat`` starts it, limits it and reads its answers.

A template is code from a stranger. The sandbox of jinja2 keeps it from files, modules and the interpreter, but cannot
bound its time or memory: filters, operators and ``join`` run in C. So the kernel bounds both, and a template that
exceeds a limit ends this process, not the run. Of batchgen it imports ``core.units`` alone.

Each message is one line of JSON. In: the setup, an object; then, repeatedly, a number and as many chats, each the
template's variables. Out: an answer ``[text, problem]`` when the program has started, after the setup, where the text
holds all names that the template mentions, and per chat; where there is a problem, the text is empty.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.debug  # jinja2 imports it at the first error, when memory may have run out
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.core.units import one_line


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what training counts; in a prompt only its content remains."""

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
        tree = environment.parse(source)
        self.names = " ".join(sorted({node.name for node in tree.find_all(nodes.Name)}))
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


def main(out_of_memory: int) -> None:
    """Answer until standard input ends.

    The process ends by SIGPROF when an answer exceeds its processor time, and with status ``out_of_memory`` when the
    process exceeds its memory.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the mask of the run is inherited
    try:
        _write(b'["", ""]')
        _serve(json.loads(sys.stdin.buffer.readline()))
    except MemoryError:
        os._exit(out_of_memory)
    except BrokenPipeError:  # the run has ended
        os._exit(0)


def _serve(setup: dict[str, Any]) -> None:
    max_cpu_s, max_bytes = setup.pop("max_cpu_s"), setup.pop("max_bytes")
    _limit(resource.RLIMIT_DATA, max_bytes)
    _limit(resource.RLIMIT_AS, 2 * max_bytes)  # for kernels whose RLIMIT_DATA covers only the heap
    _limit(resource.RLIMIT_CORE, 0)
    compiled: list[_Renderer] = []

    def compile_template() -> str:
        compiled.append(_Renderer(**setup))
        return compiled[0].names

    _answer(compile_template, max_cpu_s)
    read = sys.stdin.buffer.readline
    while header := read():
        for chat in [read() for _ in range(int(header))]:  # all at once: both sides would wait if answers filled a pipe
            _answer(partial(compiled[0].render, chat), max_cpu_s)


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(work: Callable[[], str], max_cpu_s: float) -> None:
    """Write what ``work`` returns or raises, within a limit of processor time, which a busy machine does not use up."""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        answer = json.dumps([work(), ""], ensure_ascii=False).encode()  # fails on lone surrogates, as tokenizers do
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        problem = one_line(error).encode(errors="backslashreplace").decode()
        answer = json.dumps(["", problem], ensure_ascii=False).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)  # reading the next chats does not count against them
    _write(answer)


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()

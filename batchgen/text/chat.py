"""The model folder's own chat template, rendered as ``transformers`` renders it, in a child process with limits.

A template that exceeds a limit costs only its own chat, whatever its neighbours are and however busy the machine is:
that chat gets an error. ``chat_child`` is the program of the child process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import Any

from batchgen.core.errors import BatchgenError
from batchgen.core.machine import fresh_python

MAX_CHARS = 1 << 24  # of one prompt: beyond any context
MAX_CPU_S = 5.0  # processor time per prompt; a published template takes some microseconds
MAX_BYTES = 512 << 20  # memory of the process, which holds a chat and a prompt of the greatest length
_MAX_CHAT_BYTES = 4 * MAX_CHARS
_BATCH_CHATS = 256  # sent at once
_BATCH_BYTES = 4 << 20
_MAX_LOST = 5  # consecutive processes that end before their first answer, but not through the template
_OUT_OF_MEMORY = 77  # exit status of a process that exceeds its memory
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_PROGRAM = f"""
try:
    from batchgen.text.chat_child import main
except BaseException as error:
    print(json.dumps(["", " ".join(f"{{type(error).__name__}}: {{error}}".split())]))
else:
    main({_OUT_OF_MEMORY})
"""

Chat = Sequence[Mapping[str, Any]] | Mapping[str, Any]  # its messages, or all of its variables, ``messages`` among them


class ChatTemplateError(Exception):
    """The template does not compile, or refuses or fails on these messages; ``str()`` is one line."""


class ChatTemplate:
    """A compiled template in a child process, which is started again when a chat has ended it; for one thread.

    ``special_tokens`` are the names that a template expects, such as ``bos_token``. ``now`` is the local time that it
    may print, one for all prompts of a run. ``names`` are the variables that the template mentions. Raises
    ChatTemplateError when the source does not compile within the limits of a prompt.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        self.source = source
        self.names: frozenset[str] = frozenset()
        setup = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "now": (now or datetime.now()).replace(tzinfo=None).isoformat(),
            "max_chars": MAX_CHARS,
            "max_cpu_s": MAX_CPU_S,
            "max_bytes": MAX_BYTES,
        }
        self._setup = json.dumps(setup).encode()
        self._num_lost = 0
        self._process: _Process | None = self._start()

    def render(self, chats: Sequence[Chat]) -> Iterator[str | ChatTemplateError]:
        """Per chat, in order, the prompt up to and with the header of the assistant's turn, or what is wrong.

        Raises BatchgenError when the process cannot be started or kept alive.
        """
        encoded = [_encode(chat) for chat in chats]
        answers = self._answers([chat for chat in encoded if isinstance(chat, bytes)])
        for chat in encoded:
            yield next(answers) if isinstance(chat, bytes) else chat

    def _answers(self, chats: Sequence[bytes]) -> Iterator[str | ChatTemplateError]:
        """Answers to all of ``chats``, from as many processes as that takes.

        Out of memory or a crash counts against a chat only if it was the first of its process, so that nothing left
        behind by earlier chats counts; processor time is measured per chat.
        """
        while chats:
            if self._process is not None and self._process.num_owed:  # its next answers belong to other chats
                self._process.end()
                self._process = None
            process = self._process = self._process or self._restart()
            num_answered, problem = 0, ""
            try:
                for answer in process.render(_batch(chats)):
                    num_answered += 1
                    yield answer
            except EOFError:
                problem = self._cause_of_death(process)
            finally:
                if process.num_owed:
                    process.end()
                    self._process = None
            chats = chats[num_answered:]
            if problem and (process.is_out_of_time or not process.num_rendered):
                yield _failed(problem)
                chats = chats[1:]

    def _start(self) -> _Process:
        """A process that has compiled the template. Raises ChatTemplateError, and BatchgenError if none starts."""
        while True:
            process = _Process()
            try:
                names, problem = process.start(self._setup)
            except EOFError:
                problem = self._cause_of_death(process)
                if not problem:
                    continue
            if problem:
                process.end()
                raise ChatTemplateError(f"the chat template does not compile: {problem}")
            self.names = frozenset(names.split())
            return process

    def _restart(self) -> _Process:
        """A process in place of one that has ended. Raises BatchgenError."""
        try:
            return self._start()
        except ChatTemplateError as error:
            raise BatchgenError(f"{error} (it compiled when the run began); run again to resume") from error

    def _cause_of_death(self, process: _Process) -> str:
        """How the template ended a process; empty if it did not. Raises BatchgenError when that recurs."""
        problem = process.end()
        if problem and not process.is_started:
            raise _no_start(problem)
        if not problem:
            self._num_lost = 1 if process.num_rendered else self._num_lost + 1
            if self._num_lost == _MAX_LOST:
                raise BatchgenError("the process that renders chat templates is killed repeatedly; is memory short?")
        return problem


class _Process:
    """Child process that runs ``chat_child``; whatever waits for an answer raises EOFError once it has ended.

    It has a process group of its own, so that Ctrl-C reaches only the run.
    """

    def __init__(self) -> None:
        command, pipe, null = fresh_python(_PROGRAM), subprocess.PIPE, subprocess.DEVNULL
        try:
            self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, process_group=0)
        except OSError as error:
            raise _no_start(str(error)) from error
        self._end = weakref.finalize(self, _end, self._popen)
        self.is_started = False
        self.num_rendered = 0
        self.num_owed = 0  # chats without an answer yet

    def start(self, setup: bytes) -> tuple[str, str]:
        """The template's names, and what is wrong with it. Raises BatchgenError if the program cannot be imported."""
        if problem := self._receive()[1]:
            self.end()
            raise _no_start(problem)
        self.is_started = True
        self._send([setup])
        return self._receive()

    def render(self, chats: Sequence[bytes]) -> Iterator[str | ChatTemplateError]:
        """An answer per chat, in order; ``num_rendered`` counts them."""
        self.num_owed = len(chats)
        self._send([b"%d" % len(chats), *chats])
        for _ in chats:
            prompt, problem = self._receive()
            self.num_owed, self.num_rendered = self.num_owed - 1, self.num_rendered + 1
            yield _failed(problem) if problem else prompt

    def end(self) -> str:
        """End it if it runs; how the template ended it, empty if the template did not."""
        self._end()
        status = self._popen.returncode
        if self.is_out_of_time:
            return f"it takes more than {MAX_CPU_S:g} s of processor time"
        if status == _OUT_OF_MEMORY:
            return f"it takes more than {MAX_BYTES >> 20} MiB of memory"
        if -status in _CRASHES:
            return f"it ends its process by {signal.Signals(-status).name}"
        return f"its process ends with status {status}" if status > 0 else ""

    @property
    def is_out_of_time(self) -> bool:
        """Whether it was ended because a chat exceeded its processor time."""
        return self._popen.returncode == -signal.SIGPROF

    def _send(self, lines: Sequence[bytes]) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(b"\n".join((*lines, b"")))
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None

    def _receive(self) -> tuple[str, str]:
        """A text, and in its place what is wrong."""
        stdout = self._popen.stdout
        assert stdout is not None
        line = b"" if stdout.closed else stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        text, problem = json.loads(line)
        return text, problem


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    with suppress(BrokenPipeError):  # closing its input flushes what it has not read
        popen.communicate()


def _no_start(problem: str) -> BatchgenError:
    return BatchgenError(f"cannot start the process that renders chat templates: {problem}")


def _failed(problem: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template failed: {problem}")


def _encode(chat: Chat) -> bytes | ChatTemplateError:
    """A chat's variables as one line of JSON; a value without a JSON type, such as a date, becomes its ``str()``."""
    variables = chat if isinstance(chat, Mapping) else {"messages": chat}
    try:
        encoded = json.dumps(variables, ensure_ascii=False, default=str).encode(errors="surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        return _failed(f"the messages cannot be passed to it: {error}")
    if len(encoded) > _MAX_CHAT_BYTES:
        return _failed(f"the messages have {len(encoded):,} bytes; at most {_MAX_CHAT_BYTES:,} are taken")
    return encoded


def _batch(chats: Sequence[bytes]) -> Sequence[bytes]:
    """The first chats, as many as are sent at once."""
    sizes = accumulate(map(len, chats[:_BATCH_CHATS]))
    return chats[: max(1, sum(size <= _BATCH_BYTES for size in sizes))]

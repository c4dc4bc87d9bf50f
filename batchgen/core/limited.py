"""Programs of Python in child processes: fresh interpreters, and programs with limits per item that they answer.

A regular expression over the text of a stranger may take any time and memory, and holds the interpreter's lock
meanwhile. In a process of its own the kernel bounds both: an item that exceeds a limit costs only its own answer,
however busy the machine is. ``limited_child`` is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import BatchgenError

_MAX_LOST = 5  # consecutive processes that end before their first answer, but not through an item
_OUT_OF_MEMORY = 77  # exit status of a process that exceeds its memory
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_PROGRAM = f"""
try:
    from importlib import import_module
    from batchgen.core.limited_child import main
    start = getattr(import_module(json.loads(sys.argv[2])), "start")
except BaseException as error:
    print(json.dumps(["", " ".join(f"{{type(error).__name__}}: {{error}}".split())]))
else:
    main(start, {_OUT_OF_MEMORY})
"""

Answer = tuple[str, str]  # a text, and in its place what is wrong


def fresh_python(program: str, *arguments: object, options: Sequence[str] = ("-I", "-S")) -> list[str]:
    """The command of a new interpreter that runs ``program`` and finds the modules that this one finds, no others.

    ``arguments`` are JSON in ``sys.argv[2:]``; ``json`` and ``sys`` are imported. By the ``options`` it heeds no
    variable of the environment and runs no ``site``.
    """
    folders = [*map(Path, filter(None, sys.path)), Path(__file__).parents[2]]
    argv = [str(folder.absolute()) for folder in folders], *arguments
    start = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
    return [sys.executable, *options, "-c", start + program, *map(json.dumps, argv)]


class SetupRefused(Exception):
    """The program refuses its setup; ``str()`` is one line."""


@dataclass(frozen=True, slots=True)
class Program:
    """A module with a function ``start``, which takes ``setup`` by its names.

    It returns the function that answers an item, which is one line. ``purpose`` completes "the process that". Limits
    are per item, and of the setup too: seconds of processor time, and bytes of the whole process.
    """

    module: str
    purpose: str
    setup: Mapping[str, Any]
    max_cpu_s: float
    max_bytes: int

    def to_line(self) -> bytes:
        limits = {"max_cpu_s": self.max_cpu_s, "max_bytes": self.max_bytes}
        return json.dumps({**self.setup, **limits}).encode()


class LimitedProgram:
    """A program in a child process, which is started again when an item has ended it; for one thread at a time.

    Raises SetupRefused, and BatchgenError when no process can be started.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._num_lost = 0
        self._process: _Process | None = self._start()

    def answer(self, item: bytes) -> Answer:
        """The answer to an item, from as many processes as that takes.

        Out of memory or a crash counts against an item only if it was the first of its process, so that nothing left
        behind by earlier items counts; processor time is measured per item. Raises BatchgenError when the process
        cannot be started or kept alive.
        """
        while True:
            process = self._process = self._process or self._restart()
            is_first = not process.num_answered
            try:
                return process.answer(item)
            except EOFError:
                self._process = None
                problem = self._cause_of_death(process)
                if problem and (process.is_out_of_time or is_first):
                    return "", problem
            except BaseException:  # its next answer would belong to this item
                self._process = None
                process.end()
                raise

    def _start(self) -> _Process:
        """A process that has taken its setup. Raises SetupRefused, and BatchgenError if none starts."""
        while True:
            process = _Process(self._program)
            try:
                problem = process.start()
            except EOFError:
                problem = self._cause_of_death(process)
                if not problem:
                    continue
            if problem:
                process.end()
                raise SetupRefused(problem)
            return process

    def _restart(self) -> _Process:
        """A process in place of one that has ended. Raises BatchgenError."""
        try:
            return self._start()
        except SetupRefused as error:
            what = f"the process that {self._program.purpose} does not start again"
            raise BatchgenError(f"{what}: {error} (it started when the run began); run again to resume") from error

    def _cause_of_death(self, process: _Process) -> str:
        """Cause for which an item ended a process; "" if none did. Raises BatchgenError when that recurs."""
        problem = process.end()
        if problem and not process.is_started:
            raise _no_start(self._program, problem)
        if not problem:
            self._num_lost = 1 if process.num_answered else self._num_lost + 1
            if self._num_lost == _MAX_LOST:
                purpose = self._program.purpose
                raise BatchgenError(f"the process that {purpose} is killed repeatedly; is memory short?")
        return problem


class _Process:
    """Child process that runs a program; whatever waits for an answer raises EOFError once it has ended.

    It has a process group of its own, so that Ctrl-C reaches only the run.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        command, pipe, null = fresh_python(_PROGRAM, program.module), subprocess.PIPE, subprocess.DEVNULL
        try:
            self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, process_group=0)
        except OSError as error:
            raise _no_start(program, str(error)) from error
        self._end = weakref.finalize(self, _end, self._popen, os.getpid())
        self.is_started = False
        self.num_answered = 0

    def start(self) -> str:
        """Fault of its setup, "" if there is none. Raises BatchgenError if the program cannot be imported."""
        if problem := self._receive()[1]:
            self.end()
            raise _no_start(self._program, problem)
        self.is_started = True
        return self._ask(self._program.to_line())[1]

    def answer(self, item: bytes) -> Answer:
        answer = self._ask(item)
        self.num_answered += 1
        return answer

    def end(self) -> str:
        """End it if it runs; how an item ended it, empty if none did."""
        self._end()
        status = self._popen.returncode
        if self.is_out_of_time:
            return f"it takes more than {self._program.max_cpu_s:g} s of processor time"
        if status == _OUT_OF_MEMORY:
            return f"it takes more than {self._program.max_bytes >> 20} MiB of memory"
        if -status in _CRASHES:
            return f"it ends its process by {signal.Signals(-status).name}"
        return f"its process ends with status {status}" if status > 0 else ""

    @property
    def is_out_of_time(self) -> bool:
        """Whether it was ended because an item exceeded its processor time."""
        return self._popen.returncode == -signal.SIGPROF

    def _ask(self, line: bytes) -> Answer:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return self._receive()

    def _receive(self) -> Answer:
        stdout = self._popen.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        text, problem = json.loads(line)
        return text, problem


def _end(popen: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork has a copy of this object, and would wait for ever for another's process
        return
    popen.kill()
    with suppress(BrokenPipeError):  # closing its input flushes what it has not read
        popen.communicate()


def _no_start(program: Program, problem: str) -> BatchgenError:
    return BatchgenError(f"cannot start the process that {program.purpose}: {problem}")

"""Loop of a program in a child process; ``limited`` starts it, limits it and reads its answers.

Python cannot bound the time or memory of what runs in C, such as a regular expression. So the kernel bounds both, and
an item that exceeds a limit ends this process, not the run.

Each message is one line. In: the setup, a JSON object, then items. Out, in JSON: an answer ``[text, problem]`` when the
program has started, after the setup, and per item, which alone has a text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from batchgen.core.units import one_line

Start = Callable[..., Callable[[bytes], str]]


def main(start: Start, out_of_memory: int) -> None:
    """Answer until standard input ends; see ``limited.Program`` for ``start``.

    The process ends by SIGPROF when an answer exceeds its processor time, and with status ``out_of_memory`` when the
    process exceeds its memory.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the mask of the run is inherited
    try:
        _write(b'["", ""]')
        _serve(start, json.loads(sys.stdin.buffer.readline()))
    except MemoryError:
        os._exit(out_of_memory)
    except BrokenPipeError:  # the run has ended
        os._exit(0)


def _serve(start: Start, setup: dict[str, Any]) -> None:
    max_cpu_s, max_bytes = setup.pop("max_cpu_s"), setup.pop("max_bytes")
    _limit(resource.RLIMIT_DATA, max_bytes)
    _limit(resource.RLIMIT_AS, 2 * max_bytes)  # for kernels whose RLIMIT_DATA covers only the heap
    _limit(resource.RLIMIT_CORE, 0)
    started: list[Callable[[bytes], str]] = []

    def begin() -> None:
        started.append(start(**setup))

    _answer(begin, max_cpu_s)
    while item := sys.stdin.buffer.readline():
        _answer(partial(started[0], item), max_cpu_s)


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(work: Callable[[], str | None], max_cpu_s: float) -> None:
    """Write what ``work`` returns or raises, within a limit of processor time, which a busy machine does not use up."""
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        answer = json.dumps([work(), ""]).encode()
    except MemoryError:
        raise
    except Exception as error:  # a hard regular expression may raise anything
        answer = json.dumps(["", one_line(error)]).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)  # reading the next item does not count against it
    _write(answer)


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(answer + b"\n")
    sys.stdout.buffer.flush()

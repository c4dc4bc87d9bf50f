"""Watchdog thread that force-exits the process when a graceful shutdown exceeds its time limit.

It learns of signals from a pipe that the interpreter's C handler writes to (``signal.set_wakeup_fd``), so no held lock
can delay it. C code that keeps the interpreter's own lock can, as a regular expression does: then a guard, a process of
its own, sees that the pipe is not read or the limit has passed, and kills this one. It does not decide when to stop
(see ``stop``).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from batchgen.core.errors import ExitCode
from batchgen.core.limited import fresh_python

_ALARM, _END = 0, 255  # no signals have these numbers
_GRACE_S = 1.0  # of the thread over the guard, which leaves no exit code but that of SIGKILL
_GUARD = r"""
import os, select, signal, time
parent, pipe, limit_s = (json.loads(word) for word in sys.argv[2:])
poll = select.poll()
poll.register(0, select.POLLIN)
poll.register(pipe, select.POLLIN)
leave_at = unread_at = None
while os.getppid() == parent:
    came, now = dict(poll.poll(1000)), time.monotonic()
    if 0 in came:
        if not os.read(0, 64):
            break
        leave_at = leave_at or now + limit_s
    unread_at = (unread_at or now + limit_s) if pipe in came else None
    if now >= min(leave_at or now + 1, unread_at or now + 1):
        os.kill(parent, signal.SIGKILL)
        os.write(2, b"\nbatchgen: killed, as a call under way does not end; run again to resume\n")
        break
    if leave_at or unread_at:
        time.sleep(0.05)
"""


class Watchdog:
    """Runs from construction until ``close``; call both in the main thread.

    After the first of ``signals``, or ``alarm``, the process has ``drain_s`` seconds; a second SIGINT ends it at once.
    ``reason`` returns why the stop was asked for. The exit code is then 75, or that of SIGKILL where the guard had to
    end the process, a second later.
    """

    def __init__(self, signals: Sequence[int], drain_s: float, reason: Callable[[], str | None]) -> None:
        self._starts = frozenset({*signals, _ALARM})
        self._drain_s = drain_s
        self._reason = reason
        self._leave_at: float | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._guard = _start_guard(self._read, drain_s + _GRACE_S)
        self._thread = threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            _end_guard(self._guard)
            raise
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    @property
    def left_s(self) -> float:
        """Seconds until it ends the process, or would if the first signal came now."""
        leave_at = self._leave_at
        return self._drain_s if leave_at is None else max(leave_at - time.monotonic(), 0.0)

    def alarm(self) -> None:
        """Start the time limit as a signal does; safe in any thread and in signal handlers: it takes no lock."""
        with suppress(OSError):
            os.write(self._write, bytes([_ALARM]))

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous)
        os.write(self._write, bytes([_END]))
        self._thread.join()
        _end_guard(self._guard)
        os.close(self._write)
        os.close(self._read)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        num_interrupts = 0
        while True:
            left_ms = None if self._leave_at is None else self.left_s * 1000
            if not poll.poll(left_ms):
                _leave(f"stopped ({self._reason() or 'by a signal'}) with a step still under way; run again to resume")
            numbers = os.read(self._read, 64)
            num_interrupts += numbers.count(signal.SIGINT)
            if num_interrupts > 1:
                _leave("stopped at once by a second SIGINT; run again to resume")
            if _END in numbers:
                return
            if self._leave_at is None and not self._starts.isdisjoint(numbers):
                self._leave_at = time.monotonic() + self._drain_s
                if self._guard is not None and self._guard.stdin is not None:
                    with suppress(OSError):
                        os.write(self._guard.stdin.fileno(), b"s")


def _leave(message: str) -> NoReturn:
    """Exit without unwinding: the journal survives that at any byte, and only unwritten rows run again."""
    with suppress(OSError, ValueError, AttributeError):  # the caller may have closed stderr, which then is None
        os.write(sys.stderr.fileno(), f"\nbatchgen: {message}\n".encode())
    os._exit(ExitCode.STOPPED)


def _start_guard(pipe: int, limit_s: float) -> subprocess.Popen[bytes] | None:
    """The guard, which ends with this process; None where no process can be started, which a run survives without."""
    command = fresh_python(_GUARD, os.getpid(), pipe, limit_s)
    with suppress(OSError):
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(pipe,), process_group=0, bufsize=0
        )
    return None


def _end_guard(guard: subprocess.Popen[bytes] | None) -> None:
    if guard is not None:
        guard.kill()
        guard.communicate()

"""Watchdog thread that force-exits the process when a graceful shutdown exceeds its time limit.

It reads signals from the pipe of ``signal.set_wakeup_fd``, so that no lock of Python code can delay it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from batchgen.core.errors import ExitCode

_ALARM, _END = 0, 255  # no signals have these numbers


class Watchdog:
    """Runs from construction until ``close``; call both in the main thread.

    After the first of ``signals``, or ``alarm``, the process has ``drain_s`` seconds; a second SIGINT ends it at once.
    ``reason`` returns the reason for the stop. The exit code is then 75.
    """

    def __init__(self, signals: Sequence[int], drain_s: float, reason: Callable[[], str | None]) -> None:
        self._starts = frozenset({*signals, _ALARM})
        self._drain_s = drain_s
        self._reason = reason
        self._leave_at: float | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True)
        self._thread.start()
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


def _leave(message: str) -> NoReturn:
    """Exit without unwinding: the journal survives that at any byte, and only unwritten rows run again."""
    with suppress(OSError, ValueError, AttributeError):  # the caller may have closed stderr, which then is None
        os.write(sys.stderr.fileno(), f"\nbatchgen: {message}\n".encode())
    os._exit(ExitCode.STOPPED)

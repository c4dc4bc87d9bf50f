"""Reasons to stop an invocation early: signals, a deadline, limits on time and tokens, too many failed rows.

All become one flag with one reason, which the generating loop obeys; a watchdog limits the time of the shutdown.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import NoReturn

from batchgen.core.errors import ExitCode
from batchgen.core.units import format_duration

_ALARM, _END = 0, 255  # no signals have these numbers
RESUME = "run again to resume"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DRAIN_S = 8.0  # limit of a graceful shutdown; 10 s are promised, and the exit itself takes time too


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
        # The interpreter's C handler writes to the pipe, so no lock of Python code can delay the thread.
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    @property
    def left_s(self) -> float:
        """Seconds until it ends the process; before the first signal, all of ``drain_s``."""
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
    """Exit without unwinding: the journal survives an end at any byte, and only unwritten rows run again."""
    with suppress(OSError, ValueError, AttributeError):  # the caller may have closed stderr, which then is None
        os.write(sys.stderr.fileno(), f"\nbatchgen: {message}\n".encode())
    os._exit(ExitCode.STOPPED)


class StopRequested(BaseException):
    """Ends work that cannot be drained (loading, counting, writing outputs); not an error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one invocation: an instant of the wall clock, seconds, and computed tokens."""

    deadline: datetime | None = None
    max_runtime_s: float | None = None
    max_total_tokens: int | None = None


class Stopper:
    """Collects requests to stop; ``reason`` is None until the first request.

    Inside ``drain_with(stop)`` a request calls ``stop``, and work in hand may finish; elsewhere inside
    ``interruptible()`` it raises ``StopRequested`` in the main thread. Unless it ``may_exit``, the process
    belongs to another program, and no watchdog ends it.
    """

    def __init__(self, limits: Limits, *, may_exit: bool = True) -> None:
        self.reason: str | None = None
        self.advice = RESUME
        self.exit_code = ExitCode.STOPPED
        self._limits = limits
        self._may_exit = may_exit
        self._started_at = time.monotonic()
        self._drain: Callable[[], None] | None = None
        self._watchdog: Watchdog | None = None  # set while ``listening``
        self._is_interruptible = False
        self._delivered = False  # a request is delivered once: the cleanup that follows must not be interrupted

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def left_s(self) -> float:
        """Seconds until the process is ended by force; ``DRAIN_S`` while no stop was asked for."""
        return DRAIN_S if self._watchdog is None else self._watchdog.left_s

    def request(self, reason: str) -> None:
        """Ask to stop, from any thread; only the first reason counts."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._watchdog is not None:
            main = threading.main_thread()
            if threading.current_thread() is not main and main.ident is not None:
                signal.pthread_kill(main.ident, signal.SIGTERM)  # only the main thread can raise in the main thread
                return
            self._watchdog.alarm()
        self._deliver()

    def give_up(self, reason: str, advice: str) -> None:
        """Stop because too many rows failed, from the main thread; ``advice`` tells the user what to do about it.

        The shutdown may take any time, since it was not requested by a signal.
        """
        if self.reason is None:
            self.reason, self.advice, self.exit_code = reason, advice, ExitCode.ROWS_FAILED
            self._deliver()

    def _deliver(self) -> None:
        if self._drain is not None:
            self._delivered = True
            self._drain()

    def check_limits(self, num_tokens: int, preparing: str = "") -> None:
        """Ask to stop if a limit is reached; this invocation has computed ``num_tokens``.

        ``preparing`` names the phase before the first row, in which a resume would stop again under the same limit.
        """
        limits = self._limits
        if limits.deadline is not None and datetime.now().astimezone() >= limits.deadline:
            self.request(f"deadline {limits.deadline:%H:%M}")
        elif limits.max_runtime_s is not None and time.monotonic() - self._started_at >= limits.max_runtime_s:
            if preparing and not self.requested:
                self.advice = f"it was still {preparing}: give it more time"
            self.request(f"max runtime of {format_duration(limits.max_runtime_s)}")
        elif limits.max_total_tokens is not None and num_tokens >= limits.max_total_tokens:
            self.request(f"max total tokens of {limits.max_total_tokens}")

    @contextmanager
    def drain_with(self, stop: Callable[[], None]) -> Iterator[None]:
        """While inside, a request calls ``stop`` instead of raising; an earlier request calls it at once."""
        self._drain = stop
        try:
            if self.requested:
                self._deliver()
            yield
        finally:
            self._drain = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While inside, a request raises ``StopRequested`` unless it drains; an earlier request raises at once."""
        self._is_interruptible = True
        try:
            if self.requested and not self._delivered:
                self._delivered = True
                raise StopRequested
            yield
        finally:
            self._is_interruptible = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP while inside, except those that the process ignores.

        ``nohup``, a shell's background jobs and callers that must not be stopped ignore them. Does nothing outside the
        main thread, where Python cannot handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        if self._may_exit:
            self._watchdog = Watchdog(signals, DRAIN_S, lambda: self.reason)
        previous = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between any two bytecodes, so it takes no lock."""
        if self.reason is None:
            self.reason = signal.Signals(number).name
        if self._delivered:
            return
        if self._drain is not None:
            self._deliver()
        elif self._is_interruptible:
            self._delivered = True
            raise StopRequested


@contextmanager
def signals_afterwards() -> Iterator[None]:
    """Delay handlers of signals until the block is left; see ``Stopper.listening`` for the signals.

    An exception raised within the import of torch ends the process by SIGABRT, or becomes an ImportError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {int(number): handler for number, handler in handlers.items() if callable(handler)}
    for number in previous:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for number in came:  # not raised again: the watchdog has counted them
        previous[number](number, None)

"""Why and when a run stops early: signals, a deadline, a time or token budget.

It turns all of them into one flag and one reason. It knows no rows and no journal; the loop that generates asks the
flag, and ``guard`` sees to it that the process is gone in time.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import FrameType

from batchgen.core.errors import ExitCode
from batchgen.core.units import format_duration
from batchgen.run.watchdog import Guard

RESUME = "run again to resume"
DRAIN_S = 8.0  # how long an orderly stop may take; the contract is 10 s, and leaving takes a moment too


class StopRequested(BaseException):
    """Ends work that has nothing to drain (loading, counting, writing outputs). No error: run again to resume."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop by itself: an instant of the wall clock, seconds and tokens of this invocation."""

    deadline: datetime | None = None
    max_runtime_s: float | None = None
    max_total_tokens: int | None = None


class Stopper:
    """The one place that knows whether to go on. ``reason`` is None until somebody asked to stop.

    Between ``drain_with(stop)`` and its end a request calls ``stop`` and lets work in hand be finished; inside
    ``interruptible()`` otherwise the request ends the work by raising ``StopRequested`` in the main thread. Anywhere
    else it only sets ``reason``.
    """

    def __init__(self, limits: Limits) -> None:
        self.reason: str | None = None
        self.advice = RESUME
        self.exit_code = ExitCode.STOPPED
        self._limits = limits
        self._started_at = time.monotonic()
        self._drain: Callable[[], None] | None = None
        self._guard: Guard | None = None  # there while signals are listened to
        self._is_interruptible = False
        self._delivered = False  # a request is delivered once: what follows it is tidying up, not to be disturbed

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask to stop, from any thread; only the first reason counts. The main thread goes on to where it looks."""
        if self.reason is not None:
            return
        self.reason = reason
        main = threading.main_thread().ident
        if self._guard is not None and threading.current_thread() is not threading.main_thread() and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)  # only the main thread can raise in the main thread
            return
        if self._guard is not None:
            self._guard.alarm()
        self._deliver()

    def give_up(self, reason: str, advice: str) -> None:
        """Stop because too many rows failed, from the main thread; ``advice`` is what a person can do about it.

        Nobody waits for the process to be gone, so it takes the time it needs.
        """
        if self.reason is None:
            self.reason, self.advice, self.exit_code = reason, advice, ExitCode.ROWS_FAILED
            self._deliver()

    def _deliver(self) -> None:
        if self._drain is not None:
            self._delivered = True
            self._drain()

    def check_limits(self, num_tokens: int) -> None:
        """Stop if a limit is reached; ``num_tokens`` were computed by this invocation."""
        limits = self._limits
        if limits.deadline is not None and datetime.now().astimezone() >= limits.deadline:
            self.request(f"deadline {limits.deadline:%H:%M}")
        elif limits.max_runtime_s is not None and time.monotonic() - self._started_at >= limits.max_runtime_s:
            self.request(f"max runtime of {format_duration(limits.max_runtime_s)}")
        elif limits.max_total_tokens is not None and num_tokens >= limits.max_total_tokens:
            self.request(f"max total tokens of {limits.max_total_tokens}")

    @contextmanager
    def drain_with(self, stop: Callable[[], None]) -> Iterator[None]:
        """While inside, a request calls ``stop`` instead of raising; one that came before calls it at once."""
        self._drain = stop
        try:
            if self.requested:
                self._delivered = True
                stop()
            yield
        finally:
            self._drain = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While inside, a request raises ``StopRequested`` unless it drains; one that came before raises at once."""
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
        """Handle SIGINT, SIGTERM and SIGHUP while inside; outside the main thread, where Python cannot, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            signals.append(signal.SIGHUP)
        self._guard = Guard(signals, DRAIN_S, lambda: self.reason)
        previous = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._guard.close()
            self._guard = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two of its steps; takes no lock."""
        if self.reason is None:
            self.reason = signal.Signals(number).name
        if self._delivered:
            return
        if self._drain is not None:
            self._delivered = True
            self._drain()
        elif self._is_interruptible:
            self._delivered = True
            raise StopRequested

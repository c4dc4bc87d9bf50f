"""Where the time of a run goes: at every moment exactly one account runs, so the accounts sum up to the wall time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by kind of work since ``started_at``, when it was made; what no account claims is ``other``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._account = "other"
        self._since = self.started_at = time.monotonic()

    @property
    def wall_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.started_at

    @contextmanager
    def on(self, account: str) -> Iterator[None]:
        """Charge the time inside to ``account``, and only to it."""
        outer = self._account
        self._switch(account)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Seconds by account until now; may be asked from another thread."""
        seconds = dict(self._seconds)
        seconds[self._account] = seconds.get(self._account, 0.0) + time.monotonic() - self._since
        return seconds

    def _switch(self, account: str) -> None:
        now = time.monotonic()
        self._seconds[self._account] = self._seconds.get(self._account, 0.0) + now - self._since
        self._since = now
        self._account = account

"""Wall time of an invocation by account: exactly one account runs at any moment, so they add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds per account since ``started_at``; time that no account claims is ``other``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._account = "other"
        self._since = self.started_at = time.monotonic()

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started_at

    @contextmanager
    def on(self, account: str) -> Iterator[None]:
        """Charge the time inside to ``account`` instead of to the one outside."""
        outer = self._account
        self._switch(account)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Seconds per account until now; safe to call from another thread."""
        seconds = dict(self._seconds)
        seconds[self._account] = seconds.get(self._account, 0.0) + time.monotonic() - self._since
        return seconds

    def _switch(self, account: str) -> None:
        now = time.monotonic()
        self._seconds[self._account] = self._seconds.get(self._account, 0.0) + now - self._since
        self._since = now
        self._account = account

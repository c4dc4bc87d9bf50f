"""Notes to the user on workers that come and go: few lines, however many do."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchgen.core.units import counted, format_duration

_GATHERED_S = 1.0  # after the first event: others come with it
_APART_S = 10.0  # between two sets of lines


class WorkerNotes:
    """Gathers what happens to workers, and shows it as at most one line per kind of event and ten seconds.

    Example:
        >>> notes = WorkerNotes(print)
        >>> notes.joined("local-1", "node7")
        >>> notes.lost("local-2", "node7", "killed by signal 9")
        >>> notes.flush(num_workers=1, is_end=True)
        worker local-1 on node7 has joined
        worker local-2 on node7 is lost: killed by signal 9; 1 left
    """

    def __init__(self, show: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._events: dict[str, list[str]] = {}  # by kind
        self._due_at = 0.0
        self._shown_at = -_APART_S

    def joined(self, name: str, place: str) -> None:
        """A worker has begun to take rows."""
        self._add("joined", f"worker {name} on {place} has joined")

    def refused(self, name: str, place: str, reason: str) -> None:
        """A worker was sent away."""
        self._add("refused", f"worker {name} on {place} takes no part: {reason}")

    def lost(self, name: str, place: str, reason: str) -> None:
        """A worker has gone; ``place`` is empty where it had not said it yet."""
        self._add("lost", f"worker {name}{place and f' on {place}'} is lost: {reason}")

    def late(self, name: str, after_s: float, limit_s: float) -> None:
        """A worker is loading its model for long."""
        waits = f"{format_duration(after_s)}; it is given up after {format_duration(limit_s)} (--load-timeout)"
        self._add("late", f"worker {name} has been loading the model for {waits}")

    def flush(self, num_workers: int, *, is_end: bool = False) -> None:
        """Show what is due, or at the end all; ``num_workers`` are here now."""
        if not self._events or (self._clock() < self._due_at and not is_end):
            return
        events, self._events, self._shown_at = self._events, {}, self._clock()
        joined = events.pop("joined", [])
        if len(joined) > 1:
            here = f", {num_workers:,} are here" if num_workers else ""  # the run may have ended
            self._show(f"{counted(len(joined), 'worker')} have joined{here}")
        elif joined:
            self._show(joined[0])
        for kind, (first, *others) in events.items():
            more = f" (and {len(others):,} more)" if others else ""
            self._show(f"{first}{more}" + (f"; {num_workers:,} left" if kind == "lost" else ""))

    def _add(self, kind: str, line: str) -> None:
        if not self._events:
            self._due_at = max(self._clock() + _GATHERED_S, self._shown_at + _APART_S)
        self._events.setdefault(kind, []).append(line)

"""Requests pulled from the input but not yet admitted, in the order in which they will be."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from batchgen.engine.sequence import Sequence


class WaitingQueue:
    """Preempted sequences first, then the longest expected first, equals in order of arrival.

    Offline the whole file is known, at least as far as the engine looks ahead. Starting the longest early
    keeps the end of a job from being run by a handful of stragglers.
    """

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._fresh: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from (sequence for _, _, sequence in self._fresh)

    def push(self, sequence: Sequence) -> None:
        """Add a fresh sequence."""
        self._arrivals += 1
        heapq.heappush(self._fresh, (-sequence.max_new_tokens, self._arrivals, sequence))

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that lost its state; the one admitted earliest comes back first."""
        self._preempted.appendleft(sequence)

    def peek(self) -> Sequence:
        """The next to be admitted."""
        return self._preempted[0] if self._preempted else self._fresh[0][2]

    def pop(self) -> Sequence:
        """Remove and return the next to be admitted."""
        return self._preempted.popleft() if self._preempted else heapq.heappop(self._fresh)[2]

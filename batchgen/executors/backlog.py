"""Backlog of rows that no worker has: fresh ones, ones given back by lost workers, and suspects that must run alone."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchgen.executors.messages import Task


class Backlog:
    """Three queues. Of ``fresh`` rows those with the most ``expected_tokens`` come first, equal ones as they came."""

    def __init__(self, expected_tokens: Callable[[Any], int]) -> None:
        self.struck: deque[Task] = deque()
        self.suspects: deque[Task] = deque()
        self._fresh: list[tuple[int, int, Task]] = []  # heap
        self._expected_tokens = expected_tokens
        self._arrivals = itertools.count()
        self._returns = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._fresh) + len(self.struck) + len(self.suspects)

    def __iter__(self) -> Iterator[Task]:
        yield from (task for _, _, task in self._fresh)
        yield from self.struck
        yield from self.suspects

    @property
    def num_fresh(self) -> int:
        """Rows without a strike."""
        return len(self._fresh)

    @property
    def num_ready(self) -> int:
        """Rows that need not run alone."""
        return len(self._fresh) + len(self.struck)

    def put(self, tasks: Iterable[Task]) -> None:
        """Add rows behind equal ones."""
        for task in tasks:
            heapq.heappush(self._fresh, (-self._expected_tokens(task), next(self._arrivals), task))

    def put_back(self, task: Task) -> None:
        """Add a row before equal ones."""
        heapq.heappush(self._fresh, (-self._expected_tokens(task), next(self._returns), task))

    def pop(self, most: int, most_struck: int) -> list[Task]:
        """Up to ``most`` rows, those with a strike first; of these at most ``most_struck``."""
        most = max(0, most)
        num_struck = min(len(self.struck), most, max(0, most_struck))
        tasks = [self.struck.popleft() for _ in range(num_struck)]
        num_fresh = min(len(self._fresh), most - num_struck)
        return tasks + [heapq.heappop(self._fresh)[2] for _ in range(num_fresh)]

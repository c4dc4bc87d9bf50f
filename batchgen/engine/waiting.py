"""Requests pulled from the input but not yet admitted, in the order in which they will be."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from batchgen.engine.sequence import Sequence

_Order = tuple[int, int, int, int, int]


class WaitingQueue:
    """Preempted sequences first, then the longest expected first, those that share a prefix together, then by arrival.

    Offline the whole file is known, at least as far as the engine looks ahead. Starting the longest early keeps the
    end of a job from being run by a handful of stragglers. The longest expected is the one with the most tokens still
    allowed; among equals, the one with the longest prompt while ``put_longest_prompts_first`` says so, for a family
    that shares a prefix the prompt of its first member. ``longest_first`` off leaves only the arrival to count.
    """

    def __init__(self, longest_first: bool = True) -> None:
        self._longest_first = longest_first
        self._preempted: deque[Sequence] = deque()
        self._prompts_count = False
        self._fresh: list[tuple[_Order, Sequence]] = []
        self._arrivals = 0
        # By first block: the first member's prompt (negative) and arrival, and how many members are here.
        self._families: dict[bytes, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from (sequence for _, sequence in self._fresh)

    def push(self, sequence: Sequence) -> None:
        """Add a fresh sequence; its ``digests`` say which others begin as it does."""
        self._arrivals += 1
        if self._longest_first:
            prompt = -sequence.num_prompt_tokens
            family_prompt, family, _ = self._families.get(_family(sequence), (prompt, self._arrivals, 0))
            sequence.order = (-max(sequence.max_new_tokens, 0), family_prompt, family, prompt, self._arrivals)
        else:
            sequence.order = (0, 0, 0, 0, self._arrivals)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Return a fresh sequence that was popped to its place."""
        name = _family(sequence)
        if name:
            _, family_prompt, family, _, _ = sequence.order
            _, _, members = self._families.get(name, (0, 0, 0))
            self._families[name] = (family_prompt, family, members + 1)
        heapq.heappush(self._fresh, (self._place(sequence), sequence))

    def _place(self, sequence: Sequence) -> _Order:
        longest, _, family, _, arrival = sequence.order
        return sequence.order if self._prompts_count else (longest, 0, family, 0, arrival)

    def put_longest_prompts_first(self, on: bool) -> None:
        """Whether the longest prompts come first among sequences that may become equally long; off at first."""
        if on != self._prompts_count:
            self._prompts_count = on
            self._fresh = [(self._place(sequence), sequence) for _, sequence in self._fresh]
            heapq.heapify(self._fresh)

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence that lost its state; the one admitted earliest comes back first."""
        self._preempted.appendleft(sequence)

    def drop_preempted(self, sequence: Sequence) -> None:
        """Remove a preempted sequence that turned out to have ended."""
        self._preempted.remove(sequence)

    def peek(self) -> Sequence:
        """The next to be admitted."""
        return self._preempted[0] if self._preempted else self._fresh[0][1]

    def pop(self) -> Sequence:
        """Remove and return the next to be admitted."""
        if self._preempted:
            return self._preempted.popleft()
        _, sequence = heapq.heappop(self._fresh)
        name = _family(sequence)
        if name:
            family_prompt, family, members = self._families.pop(name)
            if members > 1:
                self._families[name] = (family_prompt, family, members - 1)
        return sequence


def _family(sequence: Sequence) -> bytes:
    return sequence.digests[0] if sequence.digests else b""

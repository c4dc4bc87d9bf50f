"""Admission: the order in which waiting sequences are started, and a forecast of what running ones will still need.

How much a sequence may generate is known (``max_tokens``); how much it will is learned from the sequences that ended. A
preemption costs all that it throws away and an idle block costs little, so admission looks at the coming peak of KV
memory: sequences advance together and the shortest leave first, which gives their blocks back (cf. Gong et al.,
Past-Future Scheduler for LLM Serving, arXiv:2507.10150).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate

from batchgen.engine.sequence import Sequence

_MEMORY = 512  # ended sequences remembered
_ENOUGH = 32  # before so many have ended, a sequence is expected to generate the most it may
_Order = tuple[int, int, int, int, int]


class WaitingQueue:
    """Queue of requests pulled from the input but not yet admitted, in the order in which they will be.

    Preempted sequences come first, then the longest expected, then by arrival; those that share a prefix stay together.
    Starting the longest early keeps a handful of stragglers from running the end of a job. The longest expected has the
    most tokens still allowed; among equals, the longest prompt while ``put_longest_prompts_first`` is on (for a family
    that shares a prefix, the prompt of its first member). Without ``longest_first`` only the arrival counts.
    """

    def __init__(self, longest_first: bool = True) -> None:
        self._longest_first = longest_first
        self._preempted: deque[Sequence] = deque()
        self._prompts_count = False
        self._fresh: list[tuple[_Order, Sequence]] = []
        self._arrivals = 0
        # By first block: the first member's prompt length (negative) and arrival, and the number of waiting members.
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
        """Return a fresh sequence that was popped, to its old place."""
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
        """Whether the longest prompts come first among sequences that may become equally long; off by default."""
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
        self._leave_family(sequence)
        return sequence

    def remove(self, sequences: Collection[Sequence]) -> None:
        """Remove fresh sequences, wherever they are."""
        self._fresh = [entry for entry in self._fresh if entry[1] not in sequences]
        heapq.heapify(self._fresh)
        for sequence in sequences:
            self._leave_family(sequence)

    def _leave_family(self, sequence: Sequence) -> None:
        name = _family(sequence)
        if name:
            family_prompt, family, members = self._families.pop(name)
            if members > 1:
                self._families[name] = (family_prompt, family, members - 1)


def _family(sequence: Sequence) -> bytes:
    return sequence.digests[0] if sequence.digests else b""


class OutputLengths:
    """Output lengths of the sequences that ended last, and what they say about one that still runs."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the first lengths of ``_sorted``, when they are asked for

    def add(self, length: int) -> None:
        if len(self._recent) == _MEMORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def expected_more(self, sequence: Sequence) -> int:
        """Tokens the sequence will probably still generate: the mean over the remembered lengths beyond its own."""
        most = max(sequence.max_new_tokens, 0)
        if sequence.request.params.has_fixed_length or len(self._sorted) < _ENOUGH:
            return most
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        place = bisect_right(self._sorted, sequence.num_output_tokens)
        num_longer = len(self._sorted) - place
        if not num_longer:
            return most
        mean = (self._sums[-1] - self._sums[place]) / num_longer
        return min(most, round(mean) - sequence.num_output_tokens)


class PromptTrend:
    """Whether longer prompts have longer answers, by the correlation over the sequences that have ended.

    Only a positive correlation of at least two standard errors counts. It is computed again each time the number of
    ended sequences has doubled: few tests give chance few occasions, and the queue is seldom sorted anew.
    """

    def __init__(self) -> None:
        self.is_rising = False
        self._judged_at = _ENOUGH
        self._num = 0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_yy = self._sum_xy = 0  # x: prompts, y: answers

    def add(self, prompt: int, length: int) -> None:
        self._num += 1
        self._sum_x += prompt
        self._sum_y += length
        self._sum_xx += prompt * prompt
        self._sum_yy += length * length
        self._sum_xy += prompt * length
        if self._num == self._judged_at:
            self._judged_at *= 2
            self.is_rising = self._rises()

    def _rises(self) -> bool:
        """Whether ``r > 2 / sqrt(num)``, in integers: r = covariance / sqrt(variance of x * variance of y)."""
        covariance = self._num * self._sum_xy - self._sum_x * self._sum_y
        variance_x = self._num * self._sum_xx - self._sum_x**2
        variance_y = self._num * self._sum_yy - self._sum_y**2
        return covariance > 0 and self._num * covariance**2 > 4 * variance_x * variance_y


def peak_tokens(held: Iterable[int], more: Iterable[int], block_size: int) -> int:
    """The most tokens of KV memory that sequences will occupy at once.

    Each holds ``held`` tokens now and will add ``more``, one per step, and then give all of them back. The last block
    of a sequence is assumed to be half empty.
    """
    peak = total = 0
    longest_first = sorted(zip(more, held, strict=True), reverse=True)
    for num_alive, (coming, now) in enumerate(longest_first, 1):
        total += now + block_size // 2
        peak = max(peak, total + num_alive * coming)
    return peak

"""What will probably be generated: the KV memory that running sequences will still need, and which rows are long.

What may be generated is known (``max_tokens``), what will be is learned from the sequences that have ended. A
preemption costs all that it throws away, an idle block costs little, so admission looks at the peak to come: sequences
advance together and the shortest leave first, which gives their blocks back (cf. Gong et al., Past-Future Scheduler
for LLM Serving, arXiv:2507.10150).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from batchgen.engine.sequence import Sequence

_MEMORY = 512  # ended sequences remembered
_ENOUGH = 32  # before so many have ended, the most that may come is expected


class OutputLengths:
    """The lengths of what was generated lately."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the first lengths of ``_sorted``, when they are asked for

    def add(self, length: int) -> None:
        """A sequence ended after so many generated tokens."""
        if len(self._recent) == _MEMORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None

    def expected_more(self, sequence: Sequence) -> int:
        """Tokens the sequence will probably still generate: the mean over those that came as far and went on."""
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

    Only a positive correlation of at least two standard errors counts. The judgement is renewed each time the number
    of ended sequences has doubled, so that chance has few occasions and the waiting ones are seldom sorted anew.
    """

    def __init__(self) -> None:
        self.is_rising = False
        self._judged_at = _ENOUGH
        self._num = 0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_yy = self._sum_xy = 0  # x: prompts, y: answers

    def add(self, prompt: int, length: int) -> None:
        """A sequence ended after a prompt and an answer of so many tokens."""
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

    They hold ``held`` tokens now and ``more`` will come to each, one a step; one that is done lets go of all it holds.
    A sequence's last block is taken to be half empty.
    """
    peak = total = 0
    longest_first = sorted(zip(more, held, strict=True), reverse=True)
    for num_alive, (coming, now) in enumerate(longest_first, 1):
        total += now + block_size // 2
        peak = max(peak, total + num_alive * coming)
    return peak

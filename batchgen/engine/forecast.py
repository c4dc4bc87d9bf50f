"""How much KV memory the running sequences will still need, before more are admitted.

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
        if sequence.request.params.ignore_eos or len(self._sorted) < _ENOUGH:
            return most
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        place = bisect_right(self._sorted, sequence.num_output_tokens)
        num_longer = len(self._sorted) - place
        if not num_longer:
            return most
        mean = (self._sums[-1] - self._sums[place]) / num_longer
        return min(most, round(mean) - sequence.num_output_tokens)


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

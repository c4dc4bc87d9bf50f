"""Forecast of KV memory: the most blocks that running sequences will hold at once.

How much a sequence may generate is known (``max_tokens``); how much it will is learned from the sequences that ended. A
preemption costs all that it throws away and an idle block costs little, so admission looks at the coming peak. Until
then sequences advance together, and the shortest leave first, which gives their blocks back (cf. Gong et al.,
Past-Future Scheduler for LLM Serving, arXiv:2507.10150).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence as Sequence_

import numpy as np

from batchgen.core.keys import INT32_MAX
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.sequence import Sequence

_MEMORY = 512  # ended sequences remembered
_ENOUGH = 32  # before so many have ended, a sequence is expected to generate the most it may


class OutputLengths:
    """Output lengths of the sequences that ended last, and what they say about one that still runs."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._means: np.ndarray | None = None  # of the lengths from each place of ``_sorted`` on, rounded

    def add(self, length: int) -> None:
        """Remember the length of a sequence that has ended; of many, forget the oldest."""
        if len(self._recent) == _MEMORY:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._means = None

    def expected_more(self, sequence: Sequence) -> int:
        """Tokens the sequence will probably still generate: the mean over the remembered lengths beyond its own."""
        most, output = max(sequence.max_new_tokens, 0), sequence.num_output_tokens
        if sequence.request.params.has_fixed_length or len(self._sorted) < _ENOUGH:
            return most
        return min(most, int(self._expected()[bisect_right(self._sorted, output)]) - output)

    def expected_more_of_all(self, sequences: Sequence_[Sequence], num_tokens: np.ndarray) -> np.ndarray:
        """``expected_more`` of each, int64, for sequences of these ``num_tokens``."""
        params = [s.request.params for s in sequences]
        outputs = num_tokens - np.array([s.num_prompt_tokens for s in sequences])
        more: np.ndarray = np.array([p.max_tokens for p in params]) - outputs
        more[~np.array([s.generates for s in sequences])] = 0
        if len(self._sorted) >= _ENOUGH:
            means = self._expected()[np.array(self._sorted).searchsorted(outputs, side="right")]
            is_open = np.array([not (p.ignore_eos and p.has_fixed_length) for p in params])
            np.minimum(more, means - outputs, out=more, where=is_open)
        return more.clip(min=0)

    def _expected(self) -> np.ndarray:
        """The expected length of a sequence by the place of its own length; longer than all others, the most it may."""
        if self._means is None:
            sums = np.array(self._sorted)[::-1].cumsum()[::-1]
            self._means = np.append(np.rint(sums / np.arange(len(sums), 0, -1)), INT32_MAX).astype(np.int64)
        return self._means


class MemoryForecast:
    """The coming peak of the blocks in use, for one admission, in which nothing else changes than who is admitted.

    Blocks held by several sequences outlive each of them, so they count apart from those of one holder. The last block
    of a sequence is assumed to be half empty.
    """

    def __init__(self, running: list[Sequence], pool: BlockPool, lengths: OutputLengths, block_size: int) -> None:
        self._running, self._pool, self._lengths, self._size = running, pool, lengths, block_size
        # Once asked for: of each running sequence, by ascending first row, the tokens it will still add (negative) and
        # those it holds alone; and the blocks with one holder.
        self._rows: np.ndarray | None = None
        self._num_sole = 0

    def peak_blocks(self, newcomer: Sequence, prefix: list[int]) -> int:
        """The most blocks held at once if ``newcomer`` runs too, behind the cached blocks ``prefix``."""
        rows = self._with(newcomer, newcomer.num_tokens - len(prefix) * self._size, self._running_rows())
        shared = self._pool.num_blocks - self._pool.num_free + self._pool.num_unused(prefix) - self._num_sole
        return shared - -peak_tokens(rows) // self._size

    def add(self, newcomer: Sequence, prefix: list[int]) -> None:
        """Take in a sequence that was admitted behind ``prefix`` and holds its first blocks."""
        holders = [self._pool.num_holders[block] for block in prefix]
        if 2 in holders:  # a sequence that held such a block alone does so no more
            self._rows = None
        if self._rows is not None:
            num_shared = sum(count > 1 for count in holders)
            self._rows = self._with(newcomer, newcomer.num_tokens - num_shared * self._size, self._rows)
            self._num_sole += len(newcomer.block_table) - num_shared

    def _with(self, newcomer: Sequence, num_held: int, rows: np.ndarray) -> np.ndarray:
        more = -self._lengths.expected_more(newcomer)
        place = rows[0].searchsorted(more)
        column = np.array([[more], [num_held + self._size // 2]])
        return np.concatenate((rows[:, :place], column, rows[:, place:]), axis=1)

    def _running_rows(self) -> np.ndarray:
        if self._rows is None:
            running, size = self._running, self._size
            num_tokens = np.array([len(s.token_ids) + s.num_in_flight for s in running])
            widths = np.array([len(s.block_table) for s in running])
            blocks = np.frombuffer(b"".join([s.block_table for s in running]), dtype=np.int32)
            is_sole = np.frombuffer(self._pool.num_holders, dtype=np.int32)[blocks] == 1
            num_sole = np.diff(np.append(0, is_sole.cumsum())[np.append(0, widths.cumsum())])
            held = num_tokens - (widths - num_sole) * size + size // 2
            more = self._lengths.expected_more_of_all(running, num_tokens)
            self._rows = np.stack((-more, held))[:, more.argsort(kind="stable")[::-1]]
            self._num_sole = int(num_sole.sum())
        return self._rows


def peak_tokens(rows: np.ndarray) -> int:
    """The most tokens of KV memory that sequences will occupy at once.

    A column of ``rows``, int64 [2, num_sequences], is of one sequence: minus the tokens it will add, one per step,
    ascending, and the tokens it holds now; it gives all of them back with the last.
    """
    num_alive = np.arange(1, rows.shape[1] + 1)
    return int((rows[1].cumsum() - num_alive * rows[0]).max(initial=0))

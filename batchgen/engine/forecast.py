"""Forecast of KV memory: the most blocks that running sequences will hold at once, from lengths of ended ones.

An idle block costs less than a preemption (cf. Gong et al., Past-Future Scheduler, arXiv:2507.10150).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

import numpy as np

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.sequence import Sequence

_MEMORY = 512  # ended sequences remembered
_HUGE = 1 << 40
_ENOUGH = 32  # ended sequences from which lengths can be estimated
_UNKNOWN = 1024  # fewest output tokens to expect without an estimate; otherwise twice those so far


class OutputLengths:
    """Output lengths of the sequences that ended last, and the expected length of a running one."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._means: np.ndarray | None = None  # rounded means of the lengths from each place of ``_sorted`` on

    def add(self, length: int) -> None:
        """Remember the length of a sequence that has ended; beyond a fixed number, the oldest is forgotten."""
        if len(self._recent) == _MEMORY:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._means = None

    def expected_more(self, sequence: Sequence) -> int:
        """Tokens the sequence will probably still generate: the mean over the remembered lengths beyond its own."""
        limit, output = max(sequence.max_new_tokens, 0), sequence.num_output_tokens
        if sequence.request.params.has_fixed_length:
            return limit
        index = bisect_right(self._sorted, output)
        if index == len(self._sorted) or len(self._sorted) < _ENOUGH:
            return min(limit, max(output, _UNKNOWN - output))
        return min(limit, int(self._expected()[index]) - output)

    def expected_ends(self, num_tokens: np.ndarray, num_prompt_tokens: np.ndarray) -> np.ndarray:
        """The expected final ``num_tokens``, int64, of sequences that can only end by an end token."""
        outputs = num_tokens - num_prompt_tokens
        lengths: np.ndarray = np.maximum(2 * outputs, _UNKNOWN)
        if len(self._sorted) >= _ENOUGH:
            indexes = np.array(self._sorted).searchsorted(outputs, side="right")
            lengths = np.where(indexes == len(self._sorted), lengths, self._expected()[indexes])
        lengths += num_prompt_tokens
        return lengths

    def _expected(self) -> np.ndarray:
        """For each position in ``_sorted``, the mean of the lengths from there on, int64; a 0 is added at the end."""
        if self._means is None:
            sums = np.array(self._sorted)[::-1].cumsum()[::-1]
            self._means = np.append(np.rint(sums / np.arange(len(sums), 0, -1)), 0).astype(np.int64)
        return self._means


class MemoryForecast:
    """The coming peak of the blocks in use, depending on which sequences are admitted.

    ``begin`` starts an admission, ``add`` takes in each sequence that is admitted. Blocks held by several sequences
    outlive each of them, so they are counted separately. The last block of a sequence is assumed to be half empty.
    """

    def __init__(self, pool: BlockPool, lengths: OutputLengths, block_size: int, max_num_seqs: int) -> None:
        self._pool, self._lengths, self._size = pool, lengths, block_size
        self._running: list[Sequence] = []
        # By convolution slot: the most ``num_tokens`` of a sequence, and its prompt's (huge if its length is fixed).
        self._bounds = np.zeros((2, max_num_seqs), dtype=np.int64)
        # Made when first needed after ``begin``.
        self._rows: np.ndarray | None = None  # [3, running], by the first row: -tokens still to add, tokens alone, slot
        self._num_shared = 0  # blocks with several holders
        self._holder: np.ndarray | None = None  # by block, the slot of a holder

    def begin(self, running: list[Sequence]) -> None:
        """Start an admission; ``running`` is a list that grows with each admitted sequence."""
        self._running, self._rows, self._holder = running, None, None

    def peak_blocks(self, newcomer: Sequence, prefix: list[int]) -> int:
        """The most blocks held at once if ``newcomer`` runs too, after its cached blocks ``prefix``."""
        rows = self._with(newcomer, newcomer.num_tokens - len(prefix) * self._size, self._running_rows())
        return self._num_shared + self._pool.num_unused(prefix) - -peak_tokens(rows) // self._size

    def add(self, newcomer: Sequence, prefix: list[int]) -> None:
        """Take in an admitted sequence, the last one in ``running``, which begins with the cached blocks ``prefix``."""
        slot, params = newcomer.conv_slot, newcomer.request.params
        max_tokens = newcomer.num_prompt_tokens + params.max_tokens if newcomer.generates else 0
        self._bounds[:, slot] = max_tokens, _HUGE if params.has_fixed_length else newcomer.num_prompt_tokens
        if self._rows is None:
            return
        holders = [self._pool.num_holders[block] for block in prefix]
        if 2 in holders:  # blocks that one sequence held are now shared
            holder = self._holders_before()
            slots = holder[[block for block, count in zip(prefix, holders, strict=True) if count == 2]]
            self._rows[1] -= self._size * np.bincount(slots, minlength=self._bounds.shape[1])[self._rows[2]]
            self._num_shared += len(slots)
        if self._holder is not None:
            self._holder[newcomer.block_table] = slot
        num_held = newcomer.num_tokens - sum(count > 1 for count in holders) * self._size
        self._rows = self._with(newcomer, num_held, self._rows)

    def _with(self, newcomer: Sequence, num_held: int, rows: np.ndarray) -> np.ndarray:
        more = -self._lengths.expected_more(newcomer)
        index = rows[0].searchsorted(more)
        slot = -1 if newcomer.conv_slot is None else newcomer.conv_slot
        column = np.array([[more], [num_held + self._size // 2], [slot]])
        return np.concatenate((rows[:, :index], column, rows[:, index:]), axis=1)

    def _running_rows(self) -> np.ndarray:
        if self._rows is None:
            running, size = self._running, self._size
            slots = np.array([s.conv_slot for s in running], dtype=np.int64)
            num_tokens = np.array([len(s.token_ids) for s in running], dtype=np.int64)
            held = num_tokens + size // 2
            widths = [len(s.block_table) for s in running]
            self._num_shared = 0
            if sum(widths) > self._pool.num_blocks - self._pool.num_free:
                is_shared = np.frombuffer(self._pool.num_holders, dtype=np.int32)[_blocks(running)] > 1
                held -= np.diff(is_shared.cumsum()[np.cumsum(widths) - 1], prepend=0) * size
                self._num_shared = self._pool.num_blocks - self._pool.num_free - int((~is_shared).sum())
            max_tokens, num_prompt_tokens = self._bounds[:, slots]
            ends = np.minimum(max_tokens, self._lengths.expected_ends(num_tokens, num_prompt_tokens))
            rows = np.stack((np.minimum(num_tokens - ends, 0), held, slots))
            self._rows = rows[:, rows[0].argsort()]
        return self._rows

    def _holders_before(self) -> np.ndarray:
        """By block, the slot of a sequence that held it before the last one was admitted."""
        if self._holder is None:
            before = self._running[:-1]
            slots, widths = [s.conv_slot or 0 for s in before], [len(s.block_table) for s in before]
            self._holder = np.zeros(self._pool.num_blocks, dtype=np.int64)
            self._holder[_blocks(before)] = np.repeat(slots, widths)
        return self._holder


def _blocks(sequences: list[Sequence]) -> np.ndarray:
    """The blocks of all sequences, one sequence after the other, int32."""
    return np.frombuffer(b"".join([s.block_table for s in sequences]), dtype=np.int32)


def peak_tokens(rows: np.ndarray) -> int:
    """The most tokens of KV memory that sequences will occupy at once.

    A column of ``rows``, int64 [2, num_sequences], is a sequence: the negative number of tokens that it will add, one
    per step, and the number that it holds now; the first row ascends. A sequence frees all tokens with its last one.
    """
    num_alive = np.arange(1, rows.shape[1] + 1)
    return int((rows[1].cumsum() - num_alive * rows[0]).max(initial=0))

"""How much of a stream repeats itself, counted in bounded memory by hashes of its items.

It sees hashes and weights, never the items; what they stand for is ``plan_survey``'s business.
"""

from __future__ import annotations

from array import array

import numpy as np

MAX_KEPT = 1 << 21  # distinct hashes held: 24 MiB, and about four times that for a moment while they are merged
_MAX_PENDING = 1 << 19


class Distinct:
    """The weight of the distinct items among all that were added.

    Exact up to ``max_kept`` distinct items. Beyond that only hashes that end in enough zero bits are kept, which is
    a uniform sample of the items, and figures become estimates (``is_exact`` says which). 64-bit hashes collide once
    in 2**64 / n**2 cases, too seldom to matter.
    """

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._skipped_bits = 0
        self._hashes = np.empty(0, np.int64)
        self._weights = np.empty(0, np.int32)
        self._pending_hashes = array("q")
        self._pending_weights = array("i")
        self.num_added = 0
        self.weight_added = 0

    @property
    def is_exact(self) -> bool:
        """Whether every distinct item is held."""
        return not self._skipped_bits

    def add(self, item_hash: int, weight: int = 1) -> None:
        """Count an item by its 64-bit signed hash; equal items must come with equal weights."""
        self._pending_hashes.append(item_hash)
        self._pending_weights.append(weight)
        self.num_added += 1
        self.weight_added += weight
        if len(self._pending_hashes) >= _MAX_PENDING:
            self._merge()

    def repeated(self) -> tuple[int, int]:
        """How many of the added items were there already, and their weight together."""
        self._merge()
        scale = 1 << self._skipped_bits
        num_distinct = min(len(self._hashes) * scale, self.num_added)
        weight = min(int(self._weights.sum(dtype=np.int64)) * scale, self.weight_added)
        return self.num_added - num_distinct, self.weight_added - weight

    def _merge(self) -> None:
        hashes = np.concatenate((self._hashes, np.frombuffer(self._pending_hashes, np.int64)))
        weights = np.concatenate((self._weights, np.frombuffer(self._pending_weights, np.int32)))
        self._pending_hashes, self._pending_weights = array("q"), array("i")
        self._hashes, first = np.unique(hashes, return_index=True)
        self._weights = weights[first]
        self._drop_skipped()
        while len(self._hashes) > self._max_kept:
            self._skipped_bits += 1
            self._drop_skipped()

    def _drop_skipped(self) -> None:
        if self._skipped_bits:
            kept = self._hashes & ((1 << self._skipped_bits) - 1) == 0
            self._hashes, self._weights = self._hashes[kept], self._weights[kept]

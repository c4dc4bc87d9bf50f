"""Pool of KV blocks: which are free, which are shared, and what the full ones hold. Plain Python, no tensors.

A block belongs to the sequences that hold it, several at once if they share a prefix. A full block may be labelled with
a digest under which other sequences find it. It keeps its content after its last holder frees it, until the memory is
needed: the block unused longest is emptied first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16  # no input can be made whose prefixes collide


class BlockPool:
    """``num_blocks`` interchangeable blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._unused: OrderedDict[int, None] = OrderedDict()  # full, labelled and free; oldest first
        self._num_holders = [0] * num_blocks
        self._digest: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._unused)

    def allocate(self, count: int) -> list[int]:
        """``count`` empty blocks; the caller has made sure that so many are free."""
        if count > self.num_free:
            raise AssertionError(f"asked for {count} blocks, {self.num_free} are free")
        taken = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._block[self._digest.pop(block)]
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Release one hold on each block; the last block of a prefix will be emptied before those it continues."""
        for block in reversed(blocks):
            if not self._num_holders[block]:
                raise AssertionError(f"block {block} freed twice")
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                if block in self._digest:
                    self._unused[block] = None
                else:
                    self._empty.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the labels of ``blocks`` with one holder: once free, these are the first to be used again."""
        for block in blocks:
            if block in self._digest and self._num_holders[block] == 1:
                del self._block[self._digest.pop(block)]

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known run of ``digests``, from the first on."""
        found = []
        for digest in digests:
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free."""
        return sum(not self._num_holders[block] for block in blocks)

    def num_sole(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` have exactly one holder."""
        return sum(self._num_holders[block] == 1 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that ``find`` named."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._unused[block]
            self._num_holders[block] += 1

    def label(self, block: int, digest: bytes) -> None:
        """Make a full block known under a digest, unless another block is."""
        if digest not in self._block and block not in self._digest:
            self._block[digest] = block
            self._digest[block] = digest

    def check(self, held: list[int]) -> None:
        """Assert that every block is either free or in ``held``, as often as it is counted as held."""
        holders = Counter(held)
        assert all(self._num_holders[b] == holders[b] for b in range(self.num_blocks)), "holders are miscounted"
        free = [*self._empty, *self._unused]
        assert len(set(free)) == len(free), "a block is free twice"
        assert len(holders) + len(free) == self.num_blocks, "blocks free + held != total"
        assert not any(self._num_holders[b] for b in free), "a free block is held"
        assert all(self._block[digest] == block for block, digest in self._digest.items()), "a digest leads elsewhere"
        assert len(self._block) == len(self._digest), "a digest without a block"
        assert not any(b in self._digest for b in self._empty), "an empty block has content"


def extend_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the digests of those full blocks of ``token_ids`` that ``digests`` does not reach yet.

    A block's digest is the BLAKE2b of the digest before it and its own tokens, so equal digests mean equal tokens from
    the first position of the sequence on.
    """
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        before = digests[-1] if digests else b""
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        digests.append(blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest())

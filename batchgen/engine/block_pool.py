"""Pool of KV blocks: tracks free and shared blocks, and the content of full ones. Plain Python, no tensors.

A full block can be found by its hash even after its last holder freed it; the least recently used is emptied first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_HASH_BYTES = 16  # no input can be made whose prefixes collide


class BlockPool:
    """``num_blocks`` interchangeable blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        self._num_begun = 0  # blocks from here on have never been used
        self._empty: list[int] = []  # a stack: the block freed last is warm in the cache
        self._unused: OrderedDict[int, None] = OrderedDict()  # full, registered and free, oldest first
        self.num_holders = array("i", bytes(4 * num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def allocate(self, count: int) -> list[int]:
        """``count`` empty blocks; the caller has made sure that they are free."""
        if count > self.num_free:
            raise AssertionError(f"asked for {count} blocks, {self.num_free} are free")
        self.num_free -= count
        taken = [self._empty.pop() if self._empty else self._begin_or_evict() for _ in range(count)]
        for block in taken:
            self.num_holders[block] = 1
        return taken

    def _begin_or_evict(self) -> int:
        if self._num_begun < self.num_blocks:
            self._num_begun += 1
            return self._num_begun - 1
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def free(self, blocks: Sequence[int]) -> None:
        """Release one hold on each block; the first blocks of a prefix will be emptied last."""
        for block in reversed(blocks):
            if not self.num_holders[block]:
                raise AssertionError(f"block {block} freed twice")
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self.num_free += 1
                if block in self._hash_of:
                    self._unused[block] = None
                else:
                    self._empty.append(block)

    def unregister(self, blocks: Iterable[int]) -> None:
        """Forget the content of ``blocks`` with one holder: once free, they are the first to be used again."""
        for block in blocks:
            if block in self._hash_of and self.num_holders[block] == 1:
                self._forget(block)

    def find(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known run of ``block_hashes``, from the first on."""
        blocks = []
        for block_hash in block_hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Iterable[int]) -> int:
        return sum(not self.num_holders[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that ``find`` named."""
        for block in blocks:
            if not self.num_holders[block]:
                self.num_free -= 1
                del self._unused[block]
            self.num_holders[block] += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block known under a hash, unless another block has that hash."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def check(self, held: list[int]) -> None:
        """Assert that every block is either free or in ``held``, and that its count of holders is right."""
        holders = Counter(held)
        assert all(self.num_holders[b] == holders[b] for b in range(self.num_blocks)), "holders are miscounted"
        empty = [*range(self._num_begun, self.num_blocks), *self._empty]
        free = [*empty, *self._unused]
        assert len(set(free)) == len(free), "a block is free twice"
        assert self.num_free == len(free) == self.num_blocks - len(holders), "blocks free + held != total"
        assert not any(self.num_holders[b] for b in free), "a free block is held"
        assert all(self._block_of[h] == block for block, h in self._hash_of.items()), "a hash leads elsewhere"
        assert len(self._block_of) == len(self._hash_of), "a hash without a block"
        assert self._hash_of.keys().isdisjoint(empty), "an empty block has content"
        assert self._hash_of.keys() >= self._unused.keys(), "a block without content is kept"


def extend_block_hashes(block_hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that follow the ones in ``block_hashes``.

    A block's hash is the BLAKE2b of the previous block's hash and its own tokens, so equal hashes mean equal tokens
    from the first position of the sequence on.
    """
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        before = block_hashes[-1] if block_hashes else b""
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        block_hashes.append(blake2b(before + tokens, digest_size=_HASH_BYTES).digest())

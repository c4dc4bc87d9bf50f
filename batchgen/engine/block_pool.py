"""Which blocks of KV memory are free. Plain Python; knows neither tensors nor sequences."""

from __future__ import annotations


class BlockPool:
    """``num_blocks`` interchangeable blocks, handed out and taken back one by one."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has made sure that there are so many."""
        if count > len(self._free):
            raise AssertionError(f"asked for {count} blocks, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back."""
        for block in reversed(blocks):
            if self._is_free[block]:
                raise AssertionError(f"block {block} freed twice")
            self._is_free[block] = 1
            self._free.append(block)

    def check(self, held: list[int]) -> None:
        """Assert that every block is either free or in ``held``, once."""
        assert len(set(held)) == len(held), "a block is held twice"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert len(held) + len(self._free) == self.num_blocks, "blocks free + held != total"
        assert all(self._is_free[b] for b in self._free), "a free block is marked as held"
        assert not any(self._is_free[b] for b in held), "a held block is marked as free"

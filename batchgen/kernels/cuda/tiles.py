"""The sequence that a program works for, derived on the device, so that the host need not copy a work list.

Sequence i owns tiles of T tokens, from number ``cu_seqlens[i] // T + i``: as many as it needs, or one more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_ARRIVALS = 1 << 14  # for 2,048 sequences with 8 KV heads


def num_tiles(num_tokens: int, num_seqs: int, tokens: int) -> int:
    """The number of programs that cover any batch of these sizes in tiles of ``tokens``."""
    # Sequence i owns cu_seqlens[i + 1] // T - cu_seqlens[i] // T + 1 tiles: this is their sum.
    return num_tokens // tokens + num_seqs


def power_of_two(n: int) -> int:
    """The smallest power of two >= n; Triton's ranges must be powers of two."""
    return 1 << (n - 1).bit_length()


class SplitCounters:
    """Counters of the programs that have arrived, all zero between launches.

    Recordings hold their address, so it stays as long as this object lives; more counters get another address.
    """

    def __init__(self) -> None:
        self._counters: list[Tensor] = []

    def at_least(self, count: int, device: torch.device) -> Tensor:
        """Counters, int32 [``count`` or more]."""
        if not self._counters or len(self._counters[-1]) < count:
            size = max(_MIN_ARRIVALS, power_of_two(count))
            self._counters.append(torch.zeros(size, dtype=torch.int32, device=device))
        return self._counters[-1]


@triton.jit
def sequence_of(tile, cu_seqlens, num_seqs, TOKENS: tl.constexpr):
    """The last sequence whose tiles start at or before ``tile``."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def tile_of(tile, cu_seqlens, num_seqs, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr):
    """(sequence, first token of the tile, end of the sequence's tokens); an empty tile starts at or after its end.

    ``ONE_EACH`` says that every sequence has one token, so that nothing needs to be looked up.
    """
    if ONE_EACH:
        return tile, tile, tile + 1
    else:
        sequence = sequence_of(tile, cu_seqlens, num_seqs, TOKENS)
        start = tl.load(cu_seqlens + sequence)
        first = start + (tile - start // TOKENS - sequence) * TOKENS
        return sequence, first, tl.load(cu_seqlens + sequence + 1)

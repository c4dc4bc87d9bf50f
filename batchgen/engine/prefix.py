"""Names for the content of full blocks: equal digests mean equal tokens from the first position of a sequence on.

A block's digest is made of its own tokens and of the digest of the block before it, so one name stands for the whole
prefix that ends with it. 128 bits of BLAKE2b: nobody's input can make two prefixes collide.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def extend_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the digests of those full blocks of ``token_ids`` that ``digests`` does not reach yet."""
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        before = digests[-1] if digests else b""
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        digests.append(blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest())

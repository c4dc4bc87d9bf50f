"""The likeliest tokens of rows of logits, on any device.

Ties are decided by token id, so that no result depends on how a device sorts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 0xFFFFFFFF


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids int64 and float32 logits [num_rows, k] of the largest of each row, largest first, of equals the lowest ids.

    The k largest are in the k blocks with the largest maxima, so that one pass over a row leaves few logits to sort.
    """
    num_rows, width = logits.shape
    k = min(k, width)
    if k == 0:
        return logits.new_empty(num_rows, 0, dtype=torch.int64), logits.new_empty(num_rows, 0, dtype=torch.float32)
    candidates = ids = torch.arange(width, device=logits.device)
    values, size = logits, 1 << ((width // k).bit_length() // 2)  # of a block, about the square root
    num_blocks = width // size
    if size > 1:
        maxima = logits[:, : num_blocks * size].reshape(num_rows, num_blocks, size).amax(2)
        blocks = _largest(maxima, ids[:num_blocks], k)
        inside = (blocks * size)[:, :, None] + ids[:size]
        rest = ids[num_blocks * size :].expand(num_rows, -1)
        candidates = torch.cat([inside.flatten(1), rest], dim=1)
        values = logits.gather(1, candidates)
    chosen = _largest(values, candidates, k)
    return chosen, logits.gather(1, chosen).float()


def _largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids of the k largest values [num_rows, n] of each row, largest first, of equals the lowest; a NaN is large.

    Value and id make one integer, which is larger where the value is or the id is lower.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # no -0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    top = ((ordered << 32) + (_LOW_BITS - ids)).topk(k, dim=1).values
    return _LOW_BITS - (top & _LOW_BITS)

"""Masks of tokens: which may come next in the constrained sequences of a step, as bits on the device."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.observers import Constraints
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import upload


class TokenMask(NamedTuple):
    """Allowed tokens of some rows of logits: rows int64 [num_masked], bits int32 [num_masked, words]; on the device."""

    rows: Tensor
    bits: Tensor


def build_mask(
    constraints: Constraints, sequences: Sequence_[Sequence], vocab_size: int, device: torch.device
) -> TokenMask | None:
    """The mask of the constrained ones among ``sequences``, which are about to be sampled; None without any."""
    active = [
        (row, s.constraint) for row, s in enumerate(sequences) if s.constraint is not None and s.constraint.is_active
    ]
    if not active:
        return None
    bits = np.empty((len(active), -(-vocab_size // 32)), dtype=np.int32)
    constraints.fill([constraint for _, constraint in active], bits)
    rows = torch.tensor([row for row, _ in active])
    return TokenMask(upload(rows, device), upload(torch.from_numpy(bits), device))

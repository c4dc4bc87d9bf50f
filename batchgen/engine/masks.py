"""Masks of tokens: which may come next in the constrained sequences of a step, as bits on the device."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.drafts import Ahead
from batchgen.engine.observers import Constraints
from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import upload


class TokenMask(NamedTuple):
    """Allowed tokens of some rows of logits: rows int64 [num_masked], bits int32 [num_masked, words]; on the device."""

    rows: Tensor
    bits: Tensor


def build_mask(
    constraints: Constraints | None, sequences: Sequence_[Sequence | Ahead], vocab_size: int, device: torch.device
) -> TokenMask | None:
    """The mask of ``sequences`` that are about to be sampled and must leave tokens out; None if none must."""
    guided = {row: s.constraint for row, s in enumerate(sequences) if s.constraint and s.constraint.is_active}
    fixed = {row: s.rules.bits for row, s in enumerate(sequences) if s.rules is not None and s.rules.bits is not None}
    rows = [*guided, *(row for row in fixed if row not in guided)]
    if not rows:
        return None
    bits = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    if guided and constraints is not None:
        constraints.fill([*guided.values()], bits[: len(guided)])
    for place, row in enumerate(rows):
        if row in fixed:
            bits[place] &= fixed[row]
    return TokenMask(upload(torch.tensor(rows), device), upload(torch.from_numpy(bits), device))

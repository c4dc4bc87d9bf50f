"""Constraints: which tokens may come next in a sequence, and the masks of all constrained sequences of a step.

The engine knows no grammar: whoever makes it brings the ``Constraints``. Tokens that a constraint forces are part of
its definition, not a shortcut, since a model may spell the same text in other tokens: they are appended whatever the
batch, the moment they are known, and computed with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sequence import Sequence
from batchgen.kernels.inputs import upload


class Constraint(Protocol):
    """Follows the generated text of one sequence.

    Attributes:
        is_active: whether it restricts the next token.
        forced: the only token that may come next, None if there are several.
        is_complete: whether the text so far fits.
        is_over: whether it fits and nothing may follow.
        error: why the constraint cannot be followed any further; empty while it can.
    """

    error: str

    @property
    def is_active(self) -> bool: ...

    @property
    def forced(self) -> int | None: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    def push(self, token_id: int) -> None:
        """Take in the next token, which is no end token. May raise TokenizerError."""


class Constraints(Protocol):
    """Makes the constraints of a model, and their masks."""

    def begin(self, text: str, prompt_token_ids: Sequence_[int]) -> Constraint:
        """The constraint that ``SamplingParams.structured_outputs`` asks for behind a prompt."""

    def fill(self, constraints: Sequence_[Any], bits: np.ndarray) -> None:
        """Write which tokens may come next into ``bits`` (int32 [num_constraints, words]), a bit per token.

        All constraints are of ``begin``.
        """


class TokenMask(NamedTuple):
    """Allowed tokens of some rows of logits: rows int64 [num_masked], bits int32 [num_masked, words]; on the device."""

    rows: Tensor
    bits: Tensor


def build_mask(
    constraints: Constraints | None, sequences: Sequence_[Sequence], vocab_size: int, device: torch.device
) -> TokenMask | None:
    """The mask of the constrained ones among ``sequences``, which are about to be sampled; None without any."""
    active = [
        (row, s.constraint) for row, s in enumerate(sequences) if s.constraint is not None and s.constraint.is_active
    ]
    if not active or constraints is None:
        return None
    bits = np.empty((len(active), -(-vocab_size // 32)), dtype=np.int32)
    constraints.fill([constraint for _, constraint in active], bits)
    rows = torch.tensor([row for row, _ in active])
    return TokenMask(upload(rows, device), upload(torch.from_numpy(bits), device))

"""Pooler: makes a text's vector from the hidden states of its tokens; takes the place of the sampler.

It computes in float32, text by text and in a fixed order, so that a vector's bits do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequence_

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sampler import Sampler
from batchgen.engine.sequence import Sequence
from batchgen.kernels.interface import Kernels
from batchgen.model.vectors import VectorHead


class Pooler(Sampler):
    """Pools the hidden states of the tokens that ``Request.pooling`` names, from a model without logits."""

    def __init__(
        self,
        head: VectorHead,
        kernels: Kernels,
        eos_token_ids: frozenset[int],
        num_slots: int = 0,
        *,
        skipped: Collection[int] = (),
    ) -> None:
        """``skipped`` are the ids of tokens whose own vectors are left out."""
        super().__init__(kernels, eos_token_ids, num_slots)
        self._head = head
        self._skipped = np.array([*skipped], dtype=np.int64)
        self._sums: dict[Sequence, np.ndarray] = {}  # of partly computed texts: [tokens, width]

    @torch.inference_mode()
    def score(self, logits: Tensor, scored: Sequence_[tuple[Sequence, range]]) -> None:
        """Take in hidden states [num_rows, width], a row for each in order; sets the vectors of complete texts."""
        states, start = logits.float().cpu().numpy(), 0
        for sequence, indexes in scored:
            rows, start = states[start : start + len(indexes)], start + len(indexes)
            rows = np.concatenate((self._sums.pop(sequence, rows[:0]), rows))
            pooling, generation = sequence.request.pooling, sequence.generation
            if pooling == "mean":
                rows = _sum(rows)
            generation.next_scored += len(indexes)
            if generation.is_scored:
                self._sums[sequence] = rows
                continue
            if pooling == "mean":
                rows = rows / np.float32(sequence.num_prompt_tokens)
            if pooling == "tokens" and len(self._skipped):
                rows = rows[~np.isin(sequence.request.prompt_token_ids, self._skipped)]
                if not len(rows):
                    generation.fail("each token of this text is one whose vector the checkpoint leaves out")
                    continue
            generation.num_vectors = len(rows)
            vectors = self._head(rows) if np.isfinite(rows).all() else rows  # some heads make numbers of infinity
            if not np.isfinite(vectors).all():
                generation.fail("the model's hidden states over this text are not finite")
            generation.vector = vectors.tobytes()


def _sum(rows: np.ndarray) -> np.ndarray:
    """The sum [1, width] of ``rows``, always added one row after the other: numpy sums a single column in pairs."""
    return np.add.reduce(rows, axis=0, keepdims=True) if rows.shape[1] > 1 else np.add.accumulate(rows)[-1:]

"""How often each token was seen in a sequence, and what that does to its logit.

The counts of a sequence are kept up to date token by token; a step only gathers them, so that a penalty costs a few
additions for each distinct token instead of a pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np
import torch
from torch import Tensor

from batchgen.core.records import SamplingParams
from batchgen.kernels.inputs import upload


class TokenCounts:
    """The distinct tokens of a sequence, each with the number of times it was generated (0: in the prompt only)."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt: Sequence_[int], output: Sequence_[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.array(distinct + [0] * 32, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        for token in output:
            self.add(token)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        """The tokens, int64."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of ``ids`` was generated, float32."""
        return self._counts[: len(self._place)]


def penalize(
    logits: Tensor, rows: Sequence_[int], counts: Sequence_[TokenCounts], params: Sequence_[SamplingParams]
) -> None:
    """Lower the logits of tokens seen before, in place, in ``rows`` of float32 logits [num_seqs, vocab_size].

    The repetition penalty divides a positive logit and multiplies a negative one (Keskar et al., CTRL,
    arXiv:1909.05858, section 4.1); then ``frequency_penalty * count`` and, where the count is not 0,
    ``presence_penalty`` are taken off, as OpenAI and vLLM define them.
    """
    sizes = [len(c.ids) for c in counts]

    def spread(values: Sequence_[float], dtype: type = np.float32) -> Tensor:
        return upload(torch.from_numpy(np.repeat(np.array(values, dtype=dtype), sizes)), logits.device)

    places = spread(rows, np.int64)
    columns = upload(torch.from_numpy(np.concatenate([c.ids for c in counts])), logits.device)
    times = upload(torch.from_numpy(np.concatenate([c.counts for c in counts])), logits.device)
    seen = logits[places, columns]
    repetition = spread([p.repetition_penalty for p in params])
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen = seen - spread([p.frequency_penalty for p in params]) * times
    seen = seen - spread([p.presence_penalty for p in params]) * (times > 0)
    logits[places, columns] = seen

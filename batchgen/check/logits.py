"""Records the logits of a run and compares another run's with them.

Logits are compared, not only tokens: equal tokens can hide different logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from batchgen.core.errors import GateFailed
from batchgen.core.records import Request
from batchgen.engine import Engine
from batchgen.engine.sampler import Sampler, TokenMask
from batchgen.engine.sequence import Sequence as Sequence_
from batchgen.kernels.interface import Kernels


class LogitsRecorder(Sampler):
    """Sampler that keeps a copy of all logits as they were before sampling.

    ``logits`` holds rows [vocab_size] by request key and index of the output token that they belong to.
    """

    def __init__(self, kernels: Kernels, eos_token_ids: frozenset[int], num_slots: int = 0) -> None:
        super().__init__(kernels, eos_token_ids, num_slots)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[Sequence_],
        mask: TokenMask | None = None,
        best: Tensor | None = None,
    ) -> Tensor:
        for sequence, row in zip(sequences, logits.to("cpu", copy=True), strict=True):
            self.logits[sequence.request.key, sequence.num_output_tokens] = row
        return super().sample(logits, sequences, mask, best)

    def score(self, logits: Tensor, scored: Sequence[tuple[Sequence_, range]]) -> None:
        rows = iter(logits.to("cpu", copy=True))
        for sequence, indexes in scored:
            for index in indexes:
                self.logits[sequence.request.key, index - sequence.num_prompt_tokens] = next(rows)
        super().score(logits, scored)


class StatesRecorder(LogitsRecorder):
    """Keeps the hidden states of a model without a head: of each prompt's tokens, by the index that follows."""

    def score(self, logits: Tensor, scored: Sequence[tuple[Sequence_, range]]) -> None:
        rows = iter(logits.to("cpu", copy=True))
        for sequence, indexes in scored:
            sequence.generation.next_scored += len(indexes)
            for index in indexes:
                self.logits[sequence.request.key, index - 1] = next(rows)


@dataclass
class Trace:
    """Output tokens of requests by key, and the logits of each by key and index."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of all logits as float32: the same on machines that compute the same bits."""
        digest = blake2b(digest_size=16)
        for place in sorted(self.logits):
            digest.update(self.logits[place].float().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def record(self, engine: Engine, requests: Sequence[Request]) -> Trace:
        """Add a run of requests on an engine whose sampler is a ``LogitsRecorder``; texts have their own tokens.

        Raises:
            GateFailed: a request ends with an error.
        """
        assert isinstance(engine.sampler, LogitsRecorder)
        texts = {request.key: request.prompt_token_ids for request in requests if request.pooling}
        for result in engine.run(requests):
            if result.error is not None:
                raise GateFailed(f"request {result.key} cannot be run: {result.error.message}")
            self.tokens[result.key] = texts.get(result.key, result.token_ids)
        self.logits |= engine.sampler.logits
        return self


@dataclass(frozen=True, slots=True)
class Divergence:
    """First place where a run differs from the expected one: output token ``index`` of request ``key``.

    ``got`` was chosen in place of ``expected``; it is the same token if only the logits differ, by at most ``gap``,
    and None if the run has no token there.
    """

    key: int
    index: int
    expected: int
    got: int | None
    gap: float


class LogitsComparison:
    """Compares a run with the ``expected`` one, request by request, as far as their tokens are the same.

    Rows of logits must be equal to the bit or, with a ``tolerance``, differ by at most that share of the row's largest
    logit. ``num_flipped`` counts rows with another likeliest token; ``divergence`` is that of the first request.
    """

    def __init__(self, expected: Trace, got: Trace, tolerance: float = 0.0) -> None:
        self.largest_gap = self.largest_share = 0.0
        self.num_compared = self.num_flipped = 0
        self.divergence: Divergence | None = None
        for key in sorted(got.tokens):
            divergence = self._compare(key, expected, got, tolerance)
            self.divergence = self.divergence or divergence

    def _compare(self, key: int, expected: Trace, got: Trace, tolerance: float) -> Divergence | None:
        divergence = None
        tokens = got.tokens[key]
        for index, wanted in enumerate(expected.tokens[key]):
            token = tokens[index] if index < len(tokens) else None
            gap, share = self._gap(expected.logits[key, index], got.logits.get((key, index)))
            is_apart = not share <= tolerance  # NaN is apart
            if divergence is None and (is_apart or token != wanted):
                divergence = Divergence(key, index, wanted, token, gap if is_apart else 0.0)
            if token != wanted:
                break
        return divergence

    def _gap(self, wanted: Tensor, row: Tensor | None) -> tuple[float, float]:
        """The largest gap between two logits of a row, and its share of the largest logit."""
        if row is None:  # the run ended before
            return 0.0, 0.0
        self.num_compared += 1
        if torch.equal(row, wanted):
            return 0.0, 0.0
        got, expected = row.float(), wanted.float()
        gap = float((got - expected).abs().max())
        share = gap / max(float(expected.abs().max()), 1e-30)
        self.largest_gap, self.largest_share = max(self.largest_gap, gap), max(self.largest_share, share)
        self.num_flipped += int(got.argmax()) != int(expected.argmax())
        return gap, share

"""What a run computed, row of logits by row of logits, kept or held against what it should have been.

Logits are compared, not only tokens: two runs may choose the same tokens from numbers that differ, until one day
they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.core.errors import GateFailed
from batchgen.core.records import Request
from batchgen.engine import Engine
from batchgen.engine.sampler import Sampler
from batchgen.engine.sequence import Sequence
from batchgen.kernels.interface import Kernels

See = Callable[[Sequence, int, Tensor], None]
"""Told a sequence, the index of a generated token, and the logits [vocab_size] it is chosen from."""


class Witness(Sampler):
    """A sampler that shows every row of logits to ``see`` before anything is done to it."""

    def __init__(self, kernels: Kernels, eos_token_ids: frozenset[int], see: See) -> None:
        super().__init__(kernels, eos_token_ids)
        self._see = see

    def sample(self, logits: Tensor, sequences: Sequence_[Sequence]) -> Tensor:
        """See ``Sampler.sample``."""
        for sequence, row in zip(sequences, logits.cpu(), strict=True):
            self._see(sequence, sequence.num_output_tokens, row)
        return super().sample(logits, sequences)

    def score(self, logits: Tensor, scored: Sequence_[tuple[Sequence, range]]) -> None:
        """See ``Sampler.score``."""
        rows = iter(logits.cpu())
        for sequence, indexes in scored:
            for index in indexes:
                self._see(sequence, index - sequence.num_prompt_tokens, next(rows))
        super().score(logits, scored)


def tokens_of(engine: Engine, requests: Iterable[Request]) -> dict[int, tuple[int, ...]]:
    """Run requests; their tokens by key.

    Raises:
        GateFailed: a request has no result but an error.
    """
    tokens = {}
    for result in engine.run(requests):
        if result.error is not None:
            raise GateFailed(f"request {result.key} cannot be run: {result.error.message}")
        tokens[result.key] = result.token_ids
    return tokens


class Trace:
    """The tokens of requests by key, and the logits behind each by key and index."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}

    def see(self, sequence: Sequence, index: int, row: Tensor) -> None:
        """Keep a row."""
        self.logits[sequence.request.key, index] = row.clone()

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return len(self.logits)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a run left the expected one: token ``index`` of request ``key``.

    ``got`` is the token chosen in place of ``expected``, the same one where only the logits differ, by ``gap`` at
    most, and None where there is none.
    """

    key: int
    index: int
    expected: int
    got: int | None
    gap: float


class Comparison:
    """Holds the rows of a run against a trace of the same requests; a row behind other tokens is not compared.

    Rows must be equal to the bit or, with a ``tolerance``, differ by no more than that share of the row's largest
    logit. ``num_flipped`` counts rows whose likeliest token is another one.
    """

    def __init__(self, trace: Trace, tolerance: float = 0.0) -> None:
        self._trace = trace
        self._tolerance = tolerance
        self.largest_gap = self.largest_share = 0.0
        self.num_compared = self.num_flipped = 0
        self._apart: dict[int, tuple[int, float]] = {}  # by key: index of the first row that is, and its gap

    def see(self, sequence: Sequence, index: int, row: Tensor) -> None:
        """Compare a row."""
        key, tokens = sequence.request.key, self._trace.tokens[sequence.request.key]
        first = sequence.num_prompt_tokens
        known = tuple(sequence.token_ids[first : first + index])  # without a pending token
        if index >= len(tokens) or known != tokens[: len(known)]:
            return
        self.num_compared += 1
        expected = self._trace.logits[key, index]
        if torch.equal(row, expected):
            return
        got, wanted = row.float(), expected.float()
        gap = float((got - wanted).abs().max())
        share = gap / max(float(wanted.abs().max()), 1e-30)
        self.largest_gap, self.largest_share = max(self.largest_gap, gap), max(self.largest_share, share)
        self.num_flipped += int(got.argmax()) != int(wanted.argmax())
        if not share <= self._tolerance:  # NaN is apart
            self._apart.setdefault(key, (index, gap))

    def divergence(self, chosen: Mapping[int, tuple[int, ...]]) -> Divergence | None:
        """That of the first request which has one, in its logits or in the tokens ``chosen``."""
        for key, got in sorted(chosen.items()):
            expected = self._trace.tokens[key]
            differ = (i for i, token in enumerate(expected) if got[i : i + 1] != (token,))
            first_other = next(differ, len(expected))
            first_apart, gap = self._apart.get(key, (len(expected), 0.0))
            index = min(first_other, first_apart)
            if index < len(expected):
                token = got[index] if index < len(got) else None
                return Divergence(key, index, expected[index], token, gap if index == first_apart else 0.0)
        return None

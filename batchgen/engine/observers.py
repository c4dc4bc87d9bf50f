"""Watchers of the tokens of one sequence: observers see each token and may end it, rules restrict next tokens.

Rules are stateless, made once for all rows with the same values; the engine knows ``Constraints``, not grammars.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from batchgen.core.records import FinishReason, SamplingParams

MAX_PERIOD = 64  # tokens of the longest run that counts as a loop
_MAX_KEPT = 64  # rules, each of kilobytes for a list of some thousand tokens


class Stop(NamedTuple):
    """The reason why an observer ends a sequence, with the stop string that it found."""

    reason: FinishReason
    stop: str | None = None


class Observer(Protocol):
    """Takes the generated tokens of one sequence."""

    def push(self, token_id: int) -> Stop | None:
        """Take in the next token; returns a ``Stop`` if the sequence ends with it. May raise TokenizerError."""


class StopMatcher(Protocol):
    """Looks for stop strings in a text that grows token by token."""

    def push(self, token_id: int) -> str | None:
        """Take in the next generated token; returns the stop string that it completes, if any."""


class Constraint(Protocol):
    """Follows the generated text of one sequence.

    Attributes:
        is_active: whether it restricts the next token.
        forced: the only token that may come next, or None. It is appended unsampled, though the model
            might split its text into other tokens.
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
        """Take in the next token, which is not an end token. May raise TokenizerError."""

    def release(self) -> None:
        """Free large state until it is needed again: for each running sequence many others wait."""


class Constraints(Protocol):
    """Makes the constraints of a model, and their masks."""

    def begin(self, text: str, prompt_token_ids: Sequence[int]) -> Constraint:
        """The constraint that ``SamplingParams.structured_outputs`` asks for after a prompt."""

    def fill(self, constraints: Sequence[Any], bits: np.ndarray) -> None:
        """Write the tokens that may come next into ``bits``, int32 [num_constraints, words], a bit per token.

        A constraint that fails gets an ``error``, and all its bits are set.
        """


class StopObserver:
    """Ends a text with a stop string."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher

    def push(self, token_id: int) -> Stop | None:
        stop = self._matcher.push(token_id)
        return None if stop is None else Stop(FinishReason.STOP, stop)


class LoopDetector:
    """Ends a text that repeats one run of up to ``MAX_PERIOD`` tokens ``max_repeats`` times; constant time per token.

    For every period p it counts how many tokens in a row equal the token p places before. Once that count reaches (k -
    1) * p, a run of p tokens has been repeated k times.
    """

    __slots__ = ("_matches", "_max_repeats", "_recent")

    def __init__(self, max_repeats: int) -> None:
        self._max_repeats = max_repeats
        self._recent: deque[int] = deque(maxlen=MAX_PERIOD)  # the newest token first
        self._matches = [0] * MAX_PERIOD  # by period, from 1 on

    def push(self, token_id: int) -> Stop | None:
        is_loop = False
        for index, earlier in enumerate(self._recent):
            if earlier != token_id:
                self._matches[index] = 0
                continue
            self._matches[index] += 1
            is_loop |= self._matches[index] >= (self._max_repeats - 1) * (index + 1)
        self._recent.appendleft(token_id)
        return Stop(FinishReason.REPETITION) if is_loop else None


class HostTokenCounts:
    """Counts of each distinct token that a sequence generated (0: in the prompt only), for the sampler's penalties.

    Kept up to date token by token, so that a penalty costs a few additions per distinct token instead of a pass over
    the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._index = {token: index for index, token in enumerate(distinct)}
        self._ids = np.array(distinct + [0] * 32, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def push(self, token_id: int) -> None:
        """Count a generated token; never ends the sequence."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """Counts of each of ``ids`` among the generated tokens, float32."""
        return self._counts[: len(self._index)]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """Rules of ``allowed_token_ids``, ``bad_words`` and ``logit_bias``.

    Attributes:
        bits: int32 [ceil(vocab_size / 32)], a bit per token that may come at all; None if all may.
        endings: the last tokens of bad words, by their other tokens; ``sizes``: the numbers of these other tokens.
        biased_ids: int64 [num_biased].
        biases: float32 [num_biased], what is added to their logits.
    """

    bits: np.ndarray | None
    endings: Mapping[tuple[int, ...], Sequence[int]]
    sizes: frozenset[int]
    biased_ids: np.ndarray
    biases: np.ndarray

    def endings_of(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        """The tokens that would complete a bad word; the output is the last part of ``token_ids``."""
        sizes = [size for size in self.sizes if size <= num_output_tokens]
        return [token for size in sizes for token in self.endings.get(tuple(token_ids[-size:]), ())]


def rules_for(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> TokenRules | None:
    """The rules of rows with these values, None if they are empty; all ids are below ``vocab_size``."""
    rules = params.allowed_token_ids, bad_words, params.logit_bias
    return _made(*rules, vocab_size) if any(rules) else None


@lru_cache(maxsize=_MAX_KEPT)
def _made(
    allowed: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    logit_bias: tuple[tuple[int, float], ...],
    vocab_size: int,
) -> TokenRules:
    endings: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for *start, last in bad_words:
        endings[tuple(start)].append(last)
    bits = _bits(allowed, endings.pop((), []), vocab_size)
    ids, biases = zip(*logit_bias, strict=True) if logit_bias else ((), ())
    sizes = frozenset(map(len, endings))
    return TokenRules(bits, dict(endings), sizes, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32))


def _bits(allowed: Sequence[int], forbidden: Sequence[int], vocab_size: int) -> np.ndarray | None:
    if not (allowed or forbidden):
        return None
    may_come = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    may_come[list(allowed) or slice(vocab_size)] = 1
    may_come[list(forbidden)] = 0
    return np.packbits(may_come, bitorder="little").view(np.int32)

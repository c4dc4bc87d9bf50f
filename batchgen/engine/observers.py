"""Observers of one sequence: each takes every generated token in turn, and may end the sequence with it.

A new kind of observer is a class here and a line in ``observers_for``. What they ask for counts from ``min_tokens`` on.
A constraint also says which tokens may come next. The engine knows no grammar: whoever makes it brings ``Constraints``.
Tokens that a constraint forces are part of its definition, not a shortcut, since a model may spell the same text in
other tokens: they are appended whatever the batch, as soon as they are known, and computed with the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from batchgen.core.records import FinishReason, SamplingParams

MAX_PERIOD = 64  # tokens of the longest run that counts as a loop


class Ending(NamedTuple):
    """Why an observer ends a sequence, with the stop string that was found."""

    reason: FinishReason
    stop: str | None = None


class Observer(Protocol):
    """Takes the generated tokens of one sequence."""

    def push(self, token_id: int) -> Ending | None:
        """Take in the next token; an ``Ending`` if the sequence should end with it. May raise TokenizerError."""


class StopMatcher(Protocol):
    """Looks for stop strings in a text that grows token by token."""

    def push(self, token_id: int) -> str | None:
        """Take in the next generated token; the stop string that it completes, if any."""


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

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these, none of them an end token, may come next one after the other."""

    def followed_by(self, token_id: int) -> Constraint:
        """The constraint as it is after one more token; this one stays as it is."""

    def rest(self) -> None:
        """Let go of what takes much memory until it is needed again: many sequences wait for each that runs."""


class Constraints(Protocol):
    """Makes the constraints of a model, and their masks."""

    def begin(self, text: str, prompt_token_ids: Sequence[int]) -> Constraint:
        """The constraint that ``SamplingParams.structured_outputs`` asks for behind a prompt."""

    def fill(self, constraints: Sequence[Any], bits: np.ndarray) -> None:
        """Write which tokens may come next into ``bits`` (int32 [num_constraints, words]), a bit per token.

        All constraints are of ``begin``.
        """


def observers_for(
    params: SamplingParams, stop_matcher: Callable[[tuple[str, ...]], StopMatcher] | None
) -> list[Observer]:
    """The observers that end a sequence with these parameters, most important first."""
    observers: list[Observer] = []
    if params.stop and stop_matcher is not None:
        observers.append(StopObserver(stop_matcher(params.stop)))
    if params.max_repeats:
        observers.append(LoopDetector(params.max_repeats))
    return observers


class StopObserver:
    """Ends a text with a stop string."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher

    def push(self, token_id: int) -> Ending | None:
        found = self._matcher.push(token_id)
        return None if found is None else Ending(FinishReason.STOP, found)


class LoopDetector:
    """Ends a text that repeats one run of up to ``MAX_PERIOD`` tokens ``max_repeats`` times; constant time per token.

    For every period p it counts how many tokens in a row equal the token p places before. A run of p tokens has been
    repeated k times once that count reaches (k - 1) * p.
    """

    __slots__ = ("_matches", "_max_repeats", "_recent")

    def __init__(self, max_repeats: int) -> None:
        self._max_repeats = max_repeats
        self._recent: deque[int] = deque(maxlen=MAX_PERIOD)  # the newest token first
        self._matches = [0] * MAX_PERIOD  # by period, from 1 on

    def push(self, token_id: int) -> Ending | None:
        is_loop = False
        for place, earlier in enumerate(self._recent):
            if earlier != token_id:
                self._matches[place] = 0
                continue
            self._matches[place] += 1
            is_loop |= self._matches[place] >= (self._max_repeats - 1) * (place + 1)
        self._recent.appendleft(token_id)
        return Ending(FinishReason.REPETITION) if is_loop else None


class TokenCounts:
    """How often each distinct token of a sequence was generated (0: in the prompt only), for the sampler's penalties.

    Kept up to date token by token, so that a penalty costs a few additions per distinct token instead of a pass over
    the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.array(distinct + [0] * 32, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def push(self, token_id: int) -> None:
        """Count a generated token; never ends the sequence."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1

    def followed_by(self, token_id: int) -> TokenCounts:
        """The counts after one more generated token; these stay as they are."""
        after = TokenCounts(())
        after._place, after._ids, after._counts = dict(self._place), self._ids.copy(), self._counts.copy()
        after.push(token_id)
        return after

    @property
    def ids(self) -> np.ndarray:
        """The tokens, int64."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of ``ids`` was generated, float32."""
        return self._counts[: len(self._place)]

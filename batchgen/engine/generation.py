"""Generation of one sequence: its tokens, their observers, its end, and log-probabilities.

The scheduler does not need it. A new way to watch tokens is an ``observers.Observer``, not a field here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from batchgen.core.errors import RowError, RowErrorCode, TokenizerError
from batchgen.core.keys import INT32_MAX
from batchgen.core.logprobs import Logprobs
from batchgen.core.records import FinishReason, Request, Sample, SamplingParams
from batchgen.engine.observers import (
    Constraint,
    Constraints,
    HostTokenCounts,
    LoopDetector,
    Observer,
    StopMatcher,
    StopObserver,
    TokenRules,
    rules_for,
)
from batchgen.text.reasoning import Thoughts


class TextTools(NamedTuple):
    """Makers of stop matchers, constraints and trackers of thoughts; each is None without a tokenizer."""

    stop_matcher: Callable[[tuple[str, ...]], StopMatcher] | None = None
    constraints: Constraints | None = None
    thoughts: Callable[[Sequence[int], int], Thoughts] | None = None


def _ending_observers(params: SamplingParams, text: TextTools) -> list[Observer]:
    """The observers that end a sequence with these parameters, most important first."""
    observers: list[Observer] = []
    if params.stop and text.stop_matcher is not None:
        observers.append(StopObserver(text.stop_matcher(params.stop)))
    if params.max_repeats:
        observers.append(LoopDetector(params.max_repeats))
    return observers


def unusable(request: Request, vocab_size: int, text: TextTools) -> RowError | None:
    """Error of a request that the model cannot run, or None."""
    for tokens in filter(None, request.token_lists):
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab_size:
                return RowError(RowErrorCode.BAD_PARAM, f"token id {token} is not among the model's {vocab_size}")
    if () in request.labels:
        return RowError(RowErrorCode.BAD_PARAM, "labels: one of the texts has no tokens")
    makers = {
        "stop": text.stop_matcher,
        "structured_outputs": text.constraints,
        "thinking_token_budget": text.thoughts,
    }
    for name, maker in makers.items():
        if request.params.gives(name) and maker is None:
            return RowError(RowErrorCode.BAD_PARAM, f"{name} needs a tokenizer, which this engine lacks: give it one")
    return None


@dataclass(slots=True, eq=False, repr=False)
class Generation:
    """The text of one sample so far, or a text to be scored.

    Attributes:
        token_ids: the sequence's own list: prompt and output, or prompt and label.
        generates: whether tokens are generated after the prompt; if not, given ones are scored.
        counts, thoughts: two of the ``observers``: token counts for the sampler, and a thinking budget.
        fast_path_until: below this number of tokens, only ``end_ids`` (with -1) end the text, and the sampler only
            draws; 0 until this is known.
        logprobs, scores: log-probabilities of generated and of given tokens, in parts.
        next_scored, end_scored: the tokens still to be scored, as indexes into ``token_ids``.
    """

    request: Request
    token_ids: list[int]
    generates: bool
    observers: list[Observer] = field(default_factory=list)
    counts: HostTokenCounts | None = None
    thoughts: Thoughts | None = None
    constraint: Constraint | None = None
    rules: TokenRules | None = None
    eos_token_ids: frozenset[int] = frozenset()
    max_model_len: int = INT32_MAX
    fast_path_until: int = 0
    end_ids: frozenset[int] = frozenset()
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    error: RowError | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)
    next_scored: int = 0
    end_scored: int = 0
    vector: bytes = b""
    num_vectors: int = 0

    def begin(
        self, text: TextTools, vocab_size: int, eos_token_ids: frozenset[int], max_model_len: int, *, counts: bool
    ) -> int:
        """Set up observers (``counts``: penalties too) after an earlier run's tokens; returns how many are forced."""
        self.eos_token_ids, self.max_model_len = eos_token_ids, max_model_len
        request, params = self.request, self.request.params
        self.observers = _ending_observers(params, text)
        if params.has_penalties and counts:
            self.counts = HostTokenCounts(request.prompt_token_ids)
            self.observers.append(self.counts)
        if params.thinking_token_budget is not None and text.thoughts is not None:
            self.thoughts = text.thoughts(request.prompt_token_ids, params.thinking_token_budget)
            self.observers.append(self.thoughts)
        self.rules = rules_for(params, request.bad_words, vocab_size)
        if params.structured_outputs and text.constraints is not None:
            self.constraint = text.constraints.begin(params.structured_outputs, request.prompt_token_ids)
        del self.token_ids[len(self.token_ids) - len(request.output_token_ids) :]  # appended one by one below
        for token_id in request.output_token_ids:
            if self.is_finished:  # the rest is of the row's next turn
                break
            self.token_ids.append(token_id)
            self._judge()
        num_forced = self._append_forced()
        if self.constraint is not None:
            self.constraint.release()
        return num_forced

    def append(self, token_id: int, at: float) -> int:
        """Append a sampled token and those forced after it; returns their number. -1 fails the text instead."""
        if len(self.token_ids) < self.fast_path_until and token_id not in self.end_ids:
            self.token_ids.append(token_id)
            return 1
        if token_id < 0:
            self._fail_without_token()
            return 0
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = at
        self._judge()
        return 1 + self._append_forced()

    def _append_forced(self) -> int:
        num_forced = 0
        while (token_id := self._next_forced) is not None:
            num_forced += 1
            self.token_ids.append(token_id)
            self._judge()
        if self.constraint is not None and self.constraint.error:
            self.fail(f"structured_outputs: {self.constraint.error}", RowErrorCode.BAD_PARAM)
        return num_forced

    @property
    def closing(self) -> int | None:
        """The next token of the marker that ends thoughts over budget; it overrides rules and constraints."""
        return None if self.thoughts is None else self.thoughts.forced

    @property
    def _forced(self) -> int | None:
        if (closing := self.closing) is not None:
            return closing
        return None if self.constraint is None else self.constraint.forced

    @property
    def _next_forced(self) -> int | None:
        """The next forced token, to be appended without sampling.

        It is None, and the token is sampled from a mask of one token, if log-probabilities are asked for, and while a
        prompt is being scored: the sequence must not end before all scores are there.
        """
        is_sampled = self.request.params.logprobs is not None or self.is_scored
        return None if self.is_finished or is_sampled else self._forced

    def _judge(self) -> None:
        """Decide whether the newest token ends the sequence; to be called once per token."""
        try:
            self.finish_reason = self._finish_reason()
        except TokenizerError as error:  # no text to look for stop strings in
            self.fail(str(error))

    def _finish_reason(self) -> FinishReason | None:
        params, constraint, ending = self.request.params, self.constraint, None
        newest, num_output_tokens = self.token_ids[-1], self.num_output_tokens
        is_forced = self._forced == newest
        if constraint is not None and newest not in self.eos_token_ids:
            constraint.push(newest)
        for observer in self.observers:  # each sees every token; the first has precedence
            stop = observer.push(newest)
            is_loop = stop is not None and stop.reason is FinishReason.REPETITION
            if not (is_loop and is_forced):  # the model does not choose forced tokens
                ending = ending or stop
        if num_output_tokens >= params.min_tokens:
            if newest in params.stop_token_ids or (newest in self.eos_token_ids and not params.ignore_eos):
                return FinishReason.STOP
            if ending is not None:
                self.matched_stop = ending.stop
                return ending.reason
        if constraint is not None and constraint.is_over:
            return FinishReason.STOP
        if num_output_tokens >= params.max_tokens or len(self.token_ids) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def end(self, at: float) -> None:
        """Note the end of the text; for a scored text, which does not end with a token, also its finish reason."""
        self.finished_at = at
        if not self.generates:
            self.finish_reason = FinishReason.STOP if self.request.labels else FinishReason.LENGTH
            self.first_token_at = at

    def check_scores(self) -> None:
        """Fail the sequence if a log-probability is not finite; to be called after the last score."""
        if not all(isfinite(value) for part in (*self.scores, *self.logprobs) for value in part.own):
            self.fail("the model's logits over the given tokens are not finite")

    def fail(self, message: str, code: RowErrorCode = RowErrorCode.INTERNAL) -> None:
        self.error = RowError(code, message)
        self.finish_reason = FinishReason.STOP

    def _fail_without_token(self) -> None:
        position = f"token {len(self.token_ids)}"
        if self.rules is None and self.constraint is None:
            self.fail(f"the model's logits after {position} are not finite")
            return
        keys = "allowed_token_ids, bad_words, min_tokens or structured_outputs"
        self.fail(f"{keys} leave no token to follow {position}, or the logits are not finite", RowErrorCode.BAD_PARAM)

    def take_fast_path(self, until: int) -> None:
        """Set ``fast_path_until`` if nothing watches the tokens and all given tokens are scored."""
        params = self.request.params
        is_asking = self.needs_host or params.has_penalties or self.rules is not None or bool(self.observers)
        if not is_asking and self.num_output_tokens >= params.min_tokens:
            self.fast_path_until = until
            ends = frozenset() if params.ignore_eos else self.eos_token_ids
            self.end_ids = ends.union(params.stop_token_ids, (-1,))

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose ids are known."""
        return len(self.token_ids) - len(self.request.prompt_token_ids) if self.generates else 0

    @property
    def needs_host(self) -> bool:
        """Whether the next step needs the last one's tokens on the host, or gives scores or log-probabilities."""
        has_endings = self.rules is not None and bool(self.rules.endings)
        may_think = self.thoughts is not None and not self.thoughts.is_over
        has_history = has_endings or may_think or self.counts is not None or self.constraint is not None
        return has_history or self.is_scored or not self.generates or self.request.params.logprobs is not None

    def score_given(self) -> None:
        """Mark which tokens of the prompt and of an earlier run are scored, for log-probabilities or pooling."""
        params, prompt = self.request.params, len(self.request.prompt_token_ids)
        self.next_scored = 1 if params.prompt_logprobs is not None else prompt
        self.end_scored = prompt if params.logprobs is None else len(self.token_ids)
        self.next_scored = min(self.next_scored, self.end_scored)
        if self.request.pooling:  # hidden states come from the positions that score the next token
            self.next_scored = prompt if self.request.pooling == "last" else 1
            self.end_scored = 2 if self.request.pooling == "cls" else prompt + 1

    def score_label(self) -> None:
        self.next_scored, self.end_scored = len(self.request.prompt_token_ids), len(self.token_ids)

    @property
    def is_scored(self) -> bool:
        return self.next_scored < self.end_scored

    def scored_parts(self, indexes: range) -> Iterator[tuple[int, int]]:
        """Split ``indexes`` into given and generated tokens: (their number, how many likeliest tokens each gets)."""
        end = min(max(self.num_given, indexes.start), indexes.stop)
        for count, num_top in (
            (end - indexes.start, self.request.params.prompt_logprobs),
            (indexes.stop - end, self.request.params.logprobs),
        ):
            if count:
                yield count, num_top or 0

    def add_scores(self, logprobs: Logprobs) -> None:
        """Add the log-probabilities of one of the ``scored_parts``: the tokens from ``next_scored`` on."""
        (self.logprobs if self.next_scored >= self.num_given else self.scores).append(logprobs)
        self.next_scored += len(logprobs)

    @property
    def num_given(self) -> int:
        return len(self.request.prompt_token_ids) if self.generates else len(self.token_ids)

    def to_sample(self) -> Sample:
        """The generated tokens and why they ended, once they have."""
        num_top = self.request.params.logprobs
        logprobs = None if num_top is None else Logprobs.joined(self.logprobs, num_top)
        tokens = tuple(self.token_ids[len(self.request.prompt_token_ids) :])
        is_complete = self.matched_stop is None and self.constraint.is_complete if self.constraint else None
        return Sample(tokens, self.finish_reason, self.matched_stop, logprobs, is_complete)

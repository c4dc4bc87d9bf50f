"""The engine's state of one sequence of tokens while it is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchgen.core.records import FinishReason, Request, Sample, TokenLogprob
from batchgen.engine.looping import LoopWatch

if TYPE_CHECKING:
    from batchgen.engine.group import Group
    from batchgen.engine.penalties import TokenCounts


class StopWatch(Protocol):
    """Looks for stop strings in a text that grows token by token."""

    def push(self, token_id: int) -> str | None:
        """Take in the next generated token; the stop string that it completes, if any."""


class Sequence:
    """The tokens so far of one sample, or of a text to be scored, and where their state is kept.

    What is computed lags behind what is known: a sequence owes ``num_owed`` tokens to the cache. A fresh prompt
    owes all of itself, a decoding sequence owes one, a preempted one owes what its cached blocks do not hold; nothing
    else tells these phases apart.

    Tokens from ``next_scored`` up to ``end_scored`` (indexes into ``token_ids``) are still to be scored: their
    log-probabilities are wanted from the position before each. ``digests`` name the full blocks in order, as far as
    they have been asked for.

    ``num_pending`` is 1 while a token has been sampled on the device whose id the host does not know yet: it counts
    as a token, but ``token_ids`` ends before it.
    """

    __slots__ = (
        "block_table",
        "conv_slot",
        "counts",
        "digests",
        "end_scored",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "generates",
        "group",
        "logprobs",
        "loop_watch",
        "matched_stop",
        "max_computed_tokens",
        "next_scored",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "request",
        "sample_index",
        "scores",
        "stop_watch",
        "token_ids",
    )

    def __init__(self, request: Request, group: Group, sample_index: int = 0) -> None:
        self.request = request
        self.group = group
        self.sample_index = sample_index
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.generates = request.params.max_tokens > 0
        self.num_computed_tokens = 0
        self.max_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_pending = 0
        self.block_table: list[int] = []
        self.digests: list[bytes] = []
        self.conv_slot: int | None = None
        self.order = (0, 0, 0, 0, 0)  # see WaitingQueue
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | None = None
        self.stop_watch: StopWatch | None = None
        self.loop_watch = LoopWatch(request.params.max_repeats) if request.params.max_repeats else None
        self.counts: TokenCounts | None = None
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[TokenLogprob] = []
        self.next_scored = self.end_scored = 0
        self.num_preemptions = 0
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    def score_choice(self, choice: tuple[int, ...]) -> None:
        """Generate nothing, but score these tokens after the prompt."""
        self.token_ids = [*self.request.prompt_token_ids, *choice]
        self.generates = False
        self.next_scored, self.end_scored = self.num_prompt_tokens, len(self.token_ids)

    def score_given(self) -> None:
        """Score what the request brings as far as it asks for that: the prompt, and tokens generated earlier."""
        params, prompt = self.request.params, self.num_prompt_tokens
        self.next_scored = 1 if params.prompt_logprobs is not None else prompt
        self.end_scored = prompt if params.logprobs is None else len(self.token_ids)
        self.next_scored = min(self.next_scored, self.end_scored)

    def num_top(self, index: int) -> int:
        """How many of the likeliest tokens are wanted beside the one at ``index``."""
        params = self.request.params
        return (params.logprobs if self._is_output(index) else params.prompt_logprobs) or 0

    def book_score(self, logprob: TokenLogprob) -> None:
        """Take in the log-probability of the token ``next_scored``."""
        (self.logprobs if self._is_output(self.next_scored) else self.scores).append(logprob)
        self.next_scored += 1

    def _is_output(self, index: int) -> bool:
        return self.generates and index >= self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens so far, a pending one included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, a pending one included."""
        return self.num_tokens - self.num_prompt_tokens if self.generates else 0

    @property
    def num_owed(self) -> int:
        """Tokens whose KV and convolution state are not cached yet."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def max_new_tokens(self) -> int:
        """Tokens this sequence may still generate before ``max_tokens`` ends it."""
        return self.request.params.max_tokens - self.num_output_tokens if self.generates else 0

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens whose state may come from elsewhere: the logits of the others are wanted."""
        wanted_from = self.next_scored if self.next_scored < self.end_scored else self.num_tokens
        return wanted_from - 1

    def completes(self, count: int) -> bool:
        """Whether computing ``count`` more tokens leaves nothing owed, so that the next token can be chosen."""
        return self.generates and count == self.num_owed

    def scored_in(self, count: int) -> range:
        """Which tokens (indexes) the logits of the next ``count`` computed positions score."""
        done = self.num_computed_tokens
        return range(max(self.next_scored, done + 1), min(self.end_scored, done + count + 1))

    @property
    def is_finished(self) -> bool:
        """Whether no further token will be generated."""
        return self.finish_reason is not None

    def append(self, token_id: int, at: float) -> None:
        """Add a generated token, at an instant of the engine's clock."""
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = at
        if self.counts is not None:
            self.counts.add(token_id)

    def stop_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Why the newest token ends the sequence, or None; to be asked once for each, with none pending."""
        params = self.request.params
        newest = self.token_ids[-1]
        stop = self.stop_watch.push(newest) if self.stop_watch is not None else None
        is_loop = self.loop_watch.push(newest) if self.loop_watch is not None else False
        if self.num_output_tokens >= params.min_tokens:
            if newest in params.stop_token_ids or (newest in eos_token_ids and not params.ignore_eos):
                return FinishReason.STOP
            if stop is not None:
                self.matched_stop = stop
                return FinishReason.STOP
            if is_loop:
                return FinishReason.REPETITION
        if self.max_new_tokens <= 0 or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def to_sample(self) -> Sample:
        """What was generated."""
        logprobs = tuple(self.logprobs) if self.request.params.logprobs is not None else None
        tokens = tuple(self.token_ids[self.num_prompt_tokens :])
        return Sample(tokens, self.finish_reason, self.matched_stop, logprobs)

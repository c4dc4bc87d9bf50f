"""State of the requests under way: ``Sequence`` (one sample), ``Group`` (one request), ``Schedule`` (one step's work).

Most requests are one sequence. ``n`` samples are one each (greedy samples are equal, so one stands for all), choices to
be scored are one each behind the same prompt. The prefix cache computes once what the sequences of a group share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchgen.core.errors import RowError
from batchgen.core.records import FinishReason, Request, Result, Sample, Timings, TokenLogprob

if TYPE_CHECKING:
    from batchgen.engine.observers import Observer, TokenCounts


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
        "matched_stop",
        "max_computed_tokens",
        "next_scored",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "observers",
        "order",
        "request",
        "sample_index",
        "scores",
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
        self.observers: list[Observer] = []
        self.counts: TokenCounts | None = None  # one of the observers, which the sampler reads
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

    def stop_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Why the newest token ends the sequence, or None; to be asked once for each, with none pending."""
        params = self.request.params
        newest = self.token_ids[-1]
        ending = None
        for observer in self.observers:
            asked = observer.push(newest)
            ending = ending or asked
        if self.num_output_tokens >= params.min_tokens:
            if newest in params.stop_token_ids or (newest in eos_token_ids and not params.ignore_eos):
                return FinishReason.STOP
            if ending is not None:
                self.matched_stop = ending.stop
                return ending.reason
        if self.max_new_tokens <= 0 or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def to_sample(self) -> Sample:
        """What was generated."""
        logprobs = tuple(self.logprobs) if self.request.params.logprobs is not None else None
        tokens = tuple(self.token_ids[self.num_prompt_tokens :])
        return Sample(tokens, self.finish_reason, self.matched_stop, logprobs)


class Group:
    """The sequences of one request.

    ``twins`` are identical requests that wait for the same result, known as such by their ``digest`` (see
    ``duplicates``; None where none was made).
    """

    __slots__ = ("digest", "error", "request", "sequences", "submitted_at", "twins")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.digest: bytes | None = None
        self.error: RowError | None = None
        self.twins: list[Group] = []
        if request.choices:
            self.sequences = [Sequence(request, self, i) for i in range(len(request.choices))]
            for sequence, choice in zip(self.sequences, request.choices, strict=True):
                sequence.score_choice(choice)
            return
        num_different = 1 if request.params.is_greedy else request.params.n
        if num_different > 1:  # what an earlier run generated is that of no one sample
            request = self.request = replace(request, output_token_ids=())
        self.sequences = [Sequence(request, self, i) for i in range(num_different)]
        self.sequences[0].score_given()

    @property
    def is_finished(self) -> bool:
        """Whether no sequence has anything left to do."""
        return all(s.finished_at is not None for s in self.sequences)

    @property
    def resumable_tokens(self) -> tuple[int, ...]:
        """Generated tokens from which a later run can go on; none where they are those of several samples."""
        sequence = self.sequences[0]
        is_one = len(self.sequences) == 1 and sequence.generates
        return tuple(sequence.token_ids[sequence.num_prompt_tokens :]) if is_one else ()

    def result(self) -> Result:
        """What came of the request, once it has finished or failed."""
        first = self.sequences[0]
        base = Result(self.request.key, len(self.request.prompt_token_ids), error=self.error, timings=self._timings())
        if self.error is not None:
            return base
        if self.request.choices:
            return self._scored(base)
        samples = [s.to_sample() for s in self.sequences]
        samples += samples[:1] * (self.request.params.n - len(samples))
        return replace(
            base,
            token_ids=samples[0].token_ids,
            finish_reason=samples[0].finish_reason,
            stop=samples[0].stop,
            logprobs=samples[0].logprobs,
            more_samples=tuple(samples[1:]),
            prompt_logprobs=tuple(first.scores) if self.request.params.prompt_logprobs is not None else None,
        )

    def result_for_twin(self, result: Result) -> Result:
        """The same for an identical request: it only waited."""
        waited = time.monotonic() - self.submitted_at
        cached = len(self.request.prompt_token_ids)
        timings = Timings(queue_s=waited, ttft_s=waited, total_s=waited, cached_tokens=cached)
        return replace(result, key=self.request.key, timings=timings)

    def _scored(self, base: Result) -> Result:
        sums = tuple(_total(s.scores) for s in self.sequences)
        best = max(range(len(sums)), key=lambda i: sums[i])  # the first of equals
        tokens = self.request.choices[best]
        return replace(base, token_ids=tokens, finish_reason=FinishReason.STOP, choice_logprobs=sums)

    def _timings(self) -> Timings:
        preemptions = sum(s.num_preemptions for s in self.sequences)
        scheduled = [s.first_scheduled_at for s in self.sequences if s.first_scheduled_at is not None]
        first = [s.first_token_at for s in self.sequences if s.first_token_at is not None]
        end = [s.finished_at for s in self.sequences if s.finished_at is not None]
        if not (scheduled and first and end):  # ended before it could begin
            return Timings(preemptions=preemptions)
        start, begun, answered, ended = self.submitted_at, min(scheduled), min(first), max(end)
        brought = len(self.request.output_token_ids)  # by a resumed one
        longest = max(s.num_output_tokens for s in self.sequences) - brought
        return Timings(
            queue_s=begun - start,
            prefill_s=answered - begun,
            decode_s=ended - answered,
            ttft_s=answered - start,
            tpot_s=(ended - answered) / max(1, longest - 1),
            total_s=ended - start,
            cached_tokens=sum(s.num_cached_tokens for s in self.sequences),
            preemptions=preemptions,
        )


def _total(scores: list[TokenLogprob]) -> float:
    return sum(score.logprob for score in scores)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work.

    Attributes:
        entries: ordered (sequence, num_scheduled_tokens), every count at least 1.
        resumed: sequences that start behind a cached prefix, whose convolution state comes with its last block.
    """

    entries: tuple[tuple[Sequence, int], ...]
    resumed: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(count for _, count in self.entries)

    @property
    def num_attended(self) -> int:
        """Positions that the step's tokens attend to: each token to itself and all before it. Ask before booking."""
        return sum(n * s.num_computed_tokens + n * (n + 1) // 2 for s, n in self.entries)

    @property
    def completing(self) -> list[Sequence]:
        """The sequences that will owe nothing after the step, so that their next token can be sampled."""
        return [s for s, count in self.entries if s.completes(count)]

    @property
    def scored(self) -> list[tuple[Sequence, range]]:
        """The tokens (indexes) that this step's logits score, by sequence."""
        return [(s, found) for s, count in self.entries if (found := s.scored_in(count))]

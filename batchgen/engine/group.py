"""A request's sequences, and how what they come to is put together into its one result.

Most requests are one sequence. ``n`` samples are one each (greedy ones are all alike, so one stands for all), choices
to be scored are one each behind the same prompt. What they share, the prefix cache computes once.
"""

from __future__ import annotations

import time
from dataclasses import replace

from batchgen.core.errors import RowError
from batchgen.core.records import FinishReason, Request, Result, Timings, TokenLogprob
from batchgen.engine.sequence import Sequence


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

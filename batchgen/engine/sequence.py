"""State of the requests under way: ``Sequence`` (one sample), ``RequestState`` (one request).

Each sample and each label to be scored is a sequence; greedy samples share one, and the prefix cache shares the prompt.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from operator import truediv

from batchgen.core.errors import RowError
from batchgen.core.logprobs import Logprobs
from batchgen.core.records import FinishReason, Request, Result, Sample, Timings
from batchgen.engine.generation import Generation


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens so far of one sample, or of a text to be scored, and where their state is kept.

    It owes ``num_owed`` tokens to the cache: a new sequence its prompt, a decoding one a token, a preempted one all
    tokens that it finds no cached block for; phases differ only in this. The scheduler owns all but ``generation``.
    """

    request: Request
    state: RequestState
    sample_index: int = 0
    label: InitVar[tuple[int, ...] | None] = None  # tokens after the prompt, to be scored; nothing is generated
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    generates: bool = field(init=False)
    generation: Generation = field(init=False)
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0  # before a preemption
    decoded_from: int = field(init=False)  # the first token neither given nor computed before a preemption
    num_cached_tokens: int = 0  # taken over from the prefix cache
    num_preemptions: int = 0
    block_table: array[int] = field(default_factory=partial(array, "i"))  # memory that a step copies unchanged
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks in order, made when needed
    conv_slot: int | None = None
    max_state_tokens: int = 0  # most tokens whose state it will hold while it runs
    first_scheduled_at: float | None = None

    def __post_init__(self, label: tuple[int, ...] | None) -> None:
        output_ids = self.request.output_token_ids if label is None else label
        self.token_ids = [*self.request.prompt_token_ids, *output_ids]
        self.decoded_from = len(self.token_ids)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.generates = label is None and self.request.params.max_tokens > 0
        self.generation = Generation(self.request, self.token_ids, self.generates)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens if self.generates else 0

    @property
    def num_owed(self) -> int:
        """Tokens whose KV and convolution state are not cached yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_new_tokens(self) -> int:
        """Tokens this sequence may still generate before ``max_tokens`` ends it."""
        return self.request.params.max_tokens - self.num_output_tokens if self.generates else 0

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens whose state may come from the prefix cache: the last is computed, for the next one's logits."""
        return (self.generation.next_scored if self.generation.is_scored else self.num_tokens) - 1

    def completes(self, count: int) -> bool:
        """Whether computing ``count`` more tokens leaves nothing owed, so that the next token can be sampled."""
        return self.generates and self.num_computed_tokens + count == len(self.token_ids)

    def scored_in(self, count: int) -> range:
        """Indexes of the tokens that the logits of the next ``count`` computed positions score."""
        done, generation = self.num_computed_tokens, self.generation
        return range(max(generation.next_scored, done + 1), min(generation.end_scored, done + count + 1))


class RequestState:
    """The sequences of one request, whose outcomes it combines into one result.

    ``followers`` are identical requests that wait for the same result, by key and instant of submission; ``digest``
    identifies them (see ``Duplicates``; None before it is made). ``refusal`` is why it cannot run.
    """

    __slots__ = ("digest", "followers", "refusal", "request", "sequences", "submitted_at")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.digest: bytes | None = None
        self.followers: list[tuple[int, float]] = []
        self.refusal: RowError | None = None
        if request.labels:
            self.sequences = [Sequence(request, self, i, label) for i, label in enumerate(request.labels)]
            for sequence in self.sequences:
                sequence.generation.score_label()
            return
        if request.text_lengths:
            texts = [replace(request, prompt_token_ids=text, text_lengths=()) for text in request.texts]
            self.sequences = [Sequence(text, self, i) for i, text in enumerate(texts)]
            for sequence in self.sequences:
                sequence.generation.score_given()
            return
        num_different = 1 if request.params.is_greedy else request.params.n
        if num_different > 1:  # the tokens of an earlier run belong to no single sample
            request = self.request = replace(request, output_token_ids=())
        self.sequences = [Sequence(request, self, i) for i in range(num_different)]
        self.sequences[0].generation.score_given()

    @property
    def error(self) -> RowError | None:
        """Error in place of a result: the request was refused, or a sequence has failed."""
        return self.refusal or next((s.generation.error for s in self.sequences if s.generation.error), None)

    @property
    def is_finished(self) -> bool:
        return all(s.generation.finished_at is not None for s in self.sequences)

    @property
    def resumable_tokens(self) -> tuple[int, ...]:
        """Generated tokens from which a later run can continue; () if they belong to several samples."""
        sequence = self.sequences[0]
        is_one = len(self.sequences) == 1 and sequence.generates
        return tuple(sequence.token_ids[sequence.num_prompt_tokens :]) if is_one else ()

    def result(self) -> Result:
        """The result of the request, once it has finished or failed."""
        first, params = self.sequences[0], self.request.params
        base = Result(self.request.key, len(self.request.prompt_token_ids), error=self.error, timings=self._timings())
        if self.error is not None:
            return base
        if self.request.labels:
            sums = tuple(sum(value for part in s.generation.scores for value in part.own) for s in self.sequences)
            means = tuple(map(truediv, sums, map(len, self.request.labels)))
            scored = replace(base, label_logprobs=sums, label_means=means)
            scores = scored.label_scores(params)
            best = Sample(self.request.labels[scores.index(max(scores))], FinishReason.STOP)
            return replace(scored, samples=(best,))
        if self.request.pooling:
            vector = b"".join(s.generation.vector for s in self.sequences)
            num_vectors = sum(s.generation.num_vectors for s in self.sequences)
            return replace(base, samples=(Sample((), FinishReason.STOP),), vector=vector, num_vectors=num_vectors)
        samples = [s.generation.to_sample() for s in self.sequences]
        samples += samples[:1] * (params.n - len(samples))
        num_top = params.prompt_logprobs
        prompt_logprobs = None if num_top is None else Logprobs.joined(first.generation.scores, num_top)
        return replace(base, samples=tuple(samples), prompt_logprobs=prompt_logprobs)

    def _timings(self) -> Timings:
        preemptions = sum(s.num_preemptions for s in self.sequences)
        scheduled = [s.first_scheduled_at for s in self.sequences if s.first_scheduled_at is not None]
        first = [at for s in self.sequences if (at := s.generation.first_token_at) is not None]
        end = [at for s in self.sequences if (at := s.generation.finished_at) is not None]
        if not (scheduled and first and end):  # ended before it could begin
            return Timings(preemptions=preemptions)
        start, begun, answered, ended = self.submitted_at, min(scheduled), min(first), max(end)
        num_resumed = len(self.request.output_token_ids)
        longest = max(s.num_output_tokens for s in self.sequences) - num_resumed
        return Timings(
            queue_s=begun - start,
            prefill_s=answered - begun,
            decode_s=ended - answered,
            ttft_s=answered - start,
            tpot_s=(ended - answered) / max(1, longest - 1),
            total_s=ended - start,
            cached_tokens=min(len(self.request.prompt_token_ids), *(s.num_cached_tokens for s in self.sequences)),
            preemptions=preemptions,
        )

"""Data types of the pipeline: Row -> Request -> Result. All are frozen, and none needs torch.

Input, engine and output share only these types; ``output.record_builder`` makes the records of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any

from batchgen.core import keys
from batchgen.core.errors import RowError
from batchgen.core.keys import INT32_MAX, INT64_MAX, MAX_SAMPLES, integer, key, number, one_of
from batchgen.core.logprobs import Logprobs

POOLINGS = ("cls", "last", "mean", "tokens")  # the first token, the last, the mean of all, or each of them


class FinishReason(StrEnum):
    """Cause of a sequence's end."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    REPETITION = "repetition"  # caught in a loop, see SamplingParams.max_repeats


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two input rows from which reading can continue; ``index`` is the position of the row there.

    ``file`` counts the input's files from 0; ``offset`` is what its format can seek to (a byte of the uncompressed
    text, a row group); ``row`` counts rows inside that unit.
    """

    file: int
    offset: int
    row: int
    index: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for the choice of one request's tokens; names and meanings are vLLM's.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1``, ``min_p == 0``, ``repetition_penalty == 1`` and the
    other penalties at 0 switch a filter off. The repetition penalty counts prompt and output, presence and frequency
    penalties the output alone. ``seed`` keys the randomness together with the request's key, sample and position, so
    tokens never depend on the batch. ``logprobs`` and ``prompt_logprobs`` ask for that many most likely tokens in
    addition to the chosen or given one (0: only that one; None: no log-probabilities at all), before any penalty or
    temperature. ``stop`` strings are not part of the text. After ``thinking_token_budget`` tokens of thought the marker
    that ends thoughts is forced (None: never). ``max_repeats`` ends a row whose newest tokens repeat one run of up to
    64 tokens this many times (0: never). ``logit_bias`` holds token ids with what is added to their logits, before
    penalties. Only ``allowed_token_ids``, if given, may come, and no token that completes one of ``bad_words`` in the
    output. ``structured_outputs`` is the canonical text of ``core.structured``, "" for free text. ``labels`` are texts
    to be scored as continuations instead of generating; ``by`` "mean" takes the label with the best mean of
    log-probabilities per token, not the best sum. ``config.sampling.merge_params`` checks values.
    """

    max_tokens: int = key(integer(0, INT32_MAX), "Maximum number of tokens to generate", 256)
    min_tokens: int = key(integer(0, INT32_MAX), "Generate at least N tokens", 0)
    temperature: float = key(keys.TEMPERATURE, "0: most likely token; higher: more random", 0.0)
    top_p: float = key(number(0, 1, above_low=True), "Keep the most likely tokens up to this total probability", 1.0)
    top_k: int = key(keys.TOP_K, "Keep the K most likely tokens; 0: all", 0)
    min_p: float = key(number(0, 1), "Drop tokens less likely than this share of the top one", 0.0)
    # vLLM: above 0; beyond these bounds float32 logits overflow
    repetition_penalty: float = key(number(0.01, 100), "Above 1, tokens of prompt and output become less likely", 1.0)
    presence_penalty: float = key(number(-2, 2), "Above 0, tokens of the output become less likely", 0.0)
    frequency_penalty: float = key(number(-2, 2), "Above 0, tokens become less likely with each use", 0.0)
    seed: int = key(integer(-INT64_MAX - 1), "Seed of all random choices", 0)
    stop: tuple[str, ...] = key(keys.STOP, "Text that ends the output; may be repeated", ())
    stop_token_ids: tuple[int, ...] = key(keys.TOKEN_IDS, "Token ids that end the output too, such as 2,7", ())
    ignore_eos: bool = key(keys.BOOL, "Continue after an EOS token, for benchmarks", False)
    n: int = key(integer(1, MAX_SAMPLES), "Samples per row", 1)
    logprobs: int | None = key(keys.LOGPROBS, "Add each token's log-probability and the K most likely ones", None)
    prompt_logprobs: int | None = key(keys.LOGPROBS, "Add the prompt's log-probabilities and perplexity", None)
    thinking_token_budget: int | None = key(
        keys.THINKING_BUDGET, "Maximum number of tokens of thought; -1: no limit", None
    )
    max_repeats: int = key(keys.MAX_REPEATS, "End a row whose last tokens repeat N times; 0: never", 0)
    logit_bias: tuple[tuple[int, float], ...] = key(
        keys.LOGIT_BIAS, 'Added to the logits of tokens, such as {"50256": -100}', ()
    )
    allowed_token_ids: tuple[int, ...] = key(keys.ALLOWED_TOKEN_IDS, "The only tokens that may be generated", ())
    bad_words: tuple[str, ...] = key(keys.BAD_WORDS, "Text that may not be generated; may be repeated", ())
    structured_outputs: str = key(keys.STRUCTURED, "JSON schema, regex, choice or grammar that the text must fit", "")
    labels: tuple[str, ...] = key(keys.LABELS, "Label that a row may get; may be repeated", ())
    by: str = key(one_of("sum", "mean"), "mean: compare mean log-probabilities per token", "sum", flag="labels-by")

    def gives(self, key: str) -> bool:
        """Whether a key whose default is empty or None has a value."""
        return getattr(self, key) not in ((), "", None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_fixed_length(self) -> bool:
        """Whether nothing but ``max_tokens`` can end the answer."""
        return self.ignore_eos and not (self.stop or self.stop_token_ids or self.max_repeats)

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before count less or more than others."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One input row; its columns come first, then its id, then its prompt.

    ``index`` is its 0-based position in the whole input and its stable key; ``line`` is the 1-based line (or row) in
    ``source``; ``after`` is where the next row starts. A row with an ``error`` cannot become a request; ``text`` is its
    line if it could not be parsed. ``params`` and ``prompt_token_ids`` (``Request.identity_tokens``) are the request's.
    An earlier run generated ``output_token_ids``. ``answers`` are ranges of the assistant's tokens in a prompt.
    """

    index: int
    source: str
    line: int
    columns: dict[str, Any]
    after: Cursor
    id: str | int | None = None
    error: RowError | None = None
    text: str | None = None
    params: SamplingParams = SamplingParams()
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    answers: tuple[tuple[int, int], ...] | None = None

    @property
    def key(self) -> int:
        """The name of the row in requests and results."""
        return self.index

    def failed(self, error: RowError) -> Row:
        return replace(self, error=error)


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenized row, ready for the engine. With ``labels`` or ``pooling`` it generates nothing.

    Attributes:
        key: the row's index.
        output_token_ids: tokens of an earlier run, after which the engine continues.
        labels: the tokens of ``params.labels``, which are scored.
        bad_words: the tokens of each way to write one of ``params.bad_words``.
        num_row_chars: about the row's memory until its result.
        pooling: the tokens whose hidden states make up the vector (``POOLINGS``), or "".
        text_lengths: lengths of texts that get a vector each.
        rng_key: key of the row's randomness (``config.identity``), if not ``key``.
        num_unseen: last tokens of a text that no token attends to; they attend to the tokens before them.
        turn: its number, from 0, among the row's ``num_turns`` requests.
    """

    key: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: tuple[int, ...] = ()
    labels: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_row_chars: int = field(default=0, compare=False)
    pooling: str = ""
    text_lengths: tuple[int, ...] = ()
    rng_key: int | None = None
    num_unseen: int = 0
    turn: int = 0
    num_turns: int = 1

    @property
    def has_next(self) -> bool:
        """Whether the prompt of another request will begin with this prompt and its answer."""
        return self.turn + 1 < self.num_turns

    @property
    def identity_tokens(self) -> tuple[int, ...]:
        """The prompt's tokens, by which a result is found again; for several texts, also -1 and their lengths."""
        return (*self.prompt_token_ids, -1, *self.text_lengths) if self.text_lengths else self.prompt_token_ids

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The texts in the prompt: one, or as many as there are ``text_lengths``."""
        lengths = self.text_lengths or (len(self.prompt_token_ids),)
        return [
            self.prompt_token_ids[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
        ]

    @property
    def token_lists(self) -> tuple[tuple[int, ...], ...]:
        """Every list of token ids in the request that must be checked, all but ``stop_token_ids``."""
        biased = tuple(token for token, _ in self.params.logit_bias)
        lists = self.prompt_token_ids, self.output_token_ids, self.params.allowed_token_ids, biased
        return *lists, *self.labels, *self.bad_words


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated sequence: all its token ids, the end token included.

    ``stop`` is the stop string that ended it, completed by its last token. ``logprobs`` has one entry per token.
    ``is_complete`` is whether the text fits its ``structured_outputs``, None without any.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    logprobs: Logprobs | None = None
    is_complete: bool | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds of one monotonic clock; everything here depends on the schedule.

    ``queue_s`` runs from submission to the first scheduling, ``prefill_s`` to the first token, ``decode_s`` to the
    last; ``ttft_s`` and ``total_s`` count from submission; ``tpot_s`` is decode time / (tokens - 1), for the tokens
    that this run generated for the longest sample. ``cached_tokens`` of the prompt were not computed; in a copy of an
    identical answer these are all.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a request: its ``n`` samples, or an error without samples.

    ``label_logprobs`` sums the log-probabilities of each label's tokens, ``label_means`` are per token; the best label
    is the sample. ``prompt_logprobs`` has one entry per prompt token but the first. ``vector`` has the float32 numbers
    of ``num_vectors`` vectors, one after the other; then the sample is empty.
    """

    key: int
    num_prompt_tokens: int
    samples: tuple[Sample, ...] = ()
    timings: Timings = field(default_factory=Timings)
    error: RowError | None = None
    prompt_logprobs: Logprobs | None = None
    label_logprobs: tuple[float, ...] = ()
    label_means: tuple[float, ...] = ()
    vector: bytes = b""
    num_vectors: int = 1

    def label_scores(self, params: SamplingParams) -> tuple[float, ...]:
        """The log-probabilities that decide between the labels: means per token, or sums."""
        return self.label_means if params.by == "mean" else self.label_logprobs

    @property
    def first(self) -> Sample:
        """The first sample. Raises IndexError if the request failed."""
        return self.samples[0]

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples; 0 if labels were scored."""
        return 0 if self.label_logprobs else sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_computed_tokens(self) -> int:
        """About how many tokens the engine computed for the result; 0 if it is a copy of an identical request's."""
        new = self.num_prompt_tokens - self.timings.cached_tokens
        return new + self.num_generated_tokens if new else 0

"""Rows to requests: finds each row's prompt and sampling values, tokenizes in batches, checks the length.

Every row gets an answer, a ``Request`` or an error, and rows do not affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, TypeVar

from batchgen.config.identity import limit_of, rng_key_of
from batchgen.config.job import InputSpec
from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.errors import RowErrorCode, TokenizerError, UsageError
from batchgen.core.logprobs import ALWAYS_TOP, MAX_RECORD_BYTES, record_bytes
from batchgen.core.records import Request, Row, SamplingParams
from batchgen.core.units import shown
from batchgen.input.content import Chat, Content, ContentFinder, PlainText
from batchgen.input.rows import Embedded, RowProblem, bounded, num_chars
from batchgen.text.chat import ChatTemplateError
from batchgen.text.grammar import Grammars
from batchgen.text.grammar_source import GrammarError
from batchgen.text.reasoning import Reasoning
from batchgen.text.template_caps import HiddenError
from batchgen.text.tokenizer import Tokenizer

_MAX_ENCODED_CHARS = 1 << 20  # characters tokenized at once: the tokenizer needs some 50 bytes of memory for each
_MAX_DRAFTED_CHARS = 1 << 24  # characters held at once: a chat template can make much text out of a short row
_EMBEDDED = SamplingParams(max_tokens=0)
# Sampling keys that are about text.
_NEEDS_TOKENIZER = ("stop", "labels", "bad_words", "structured_outputs", "thinking_token_budget")

_Made = TypeVar("_Made")
Texts = Mapping[PlainText, list[int] | TokenizerError]  # texts and their tokens


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row whose prompts (one, unless it asks for several vectors) are texts to be tokenized, or its own token ids."""

    row: Row
    params: SamplingParams
    prompts: Sequence[PlainText | list[int]]
    answers: tuple[tuple[int, int], ...] | None = None

    @property
    def texts(self) -> list[PlainText]:
        return [prompt for prompt in self.prompts if isinstance(prompt, PlainText)]


class RequestBuilder:
    """Builds the requests of one job. Raises UsageError if [input] or [sampling] cannot work with this tokenizer.

    A row's prompt is in the column that [input] names, else in the first of ``prompt_token_ids``, ``messages``,
    ``prompt`` and ``text`` that is not null, or in the body of an OpenAI Batch line. The row's system message overrides
    the job's, its ``sampling`` object the job's values. A label's tokens, white space included, follow the prompt's.

    Args:
        settings: sampling parameters; if they are ``Embedded``, rows become vectors.
        tokenizer: without one, rows must bring ``prompt_token_ids``, below ``vocab_size``.
        max_model_len: the context. A prompt leaves room in it for a token to generate, or for the longest label; a
            row that does not generate may fill it.
        max_tokens_unset: whether a request in OpenAI's form without ``max_tokens`` may fill it, as at OpenAI.
        packs_logprobs: whether log-probabilities are packed arrays, for which the assistant's turns are found.
    """

    def __init__(
        self,
        spec: InputSpec,
        settings: SamplingParams | Embedded,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        max_tokens_unset: bool = False,
        packs_logprobs: bool = False,
    ) -> None:
        self._spec = spec
        self.packs_logprobs = packs_logprobs
        self._fills_context = max_tokens_unset
        self._embedded = settings if isinstance(settings, Embedded) else None
        self.finder = ContentFinder(spec, tokenizer, vocab_size, self._embedded)
        self._sampling = sampling = _EMBEDDED if isinstance(settings, Embedded) else settings
        self._tokenizer = tokenizer
        self._grammars, self._vocab_size = grammars, vocab_size
        self._max_model_len = max_model_len
        self.cut_at = max_model_len if self._embedded and self._embedded.cuts else None  # the length of cut texts
        if refused := self._refusal(sampling):
            raise UsageError(f"{'classify' if refused.startswith('labels') else 'sampling'}.{refused}")
        try:
            self._check_grammar(sampling)
        except GrammarError as error:
            raise UsageError(f"sampling.structured_outputs: {error}") from None

    def build(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Request | None]]:
        """Each row with its prompt and its request, in order; a row that cannot run comes with an error and None.

        All rows are tokenized together, but a row's grammar is compiled only when the iterator reaches it: compiling
        may take seconds, during which no step runs and a stop has to wait.
        """
        for drafts in bounded(self._drafts(rows), _num_chars, _MAX_DRAFTED_CHARS):
            yield from self._requests(drafts)

    def _requests(self, drafts: Sequence[_Draft | Row]) -> Iterator[tuple[Row, Request | None]]:
        sound = [draft for draft in drafts if isinstance(draft, _Draft)]
        lists = {draft.params.labels for draft in sound}  # most rows have the job's, so they are few
        lists |= {_ways_to_write(draft.params.bad_words) for draft in sound}
        texts = self._encode(
            [
                *(text for draft in sound for text in draft.texts),
                *(_apart(text) for listed in lists for text in listed),
            ]
        )
        for draft in drafts:
            made = _attempt(draft.row, self._request, draft, texts) if isinstance(draft, _Draft) else draft
            yield (made, None) if isinstance(made, Row) else made

    def _drafts(self, rows: Sequence[Row]) -> Iterator[_Draft | Row]:
        for row in rows:
            yield row if row.error is not None else _attempt(row, self._draft, row)

    def _closed(self, content: Content) -> Content:
        """The content, without a header for another answer if it is a chat to be scored that ends with an answer."""
        prompt = content.prompt
        is_scored = content.overrides.get("max_tokens", self._sampling.max_tokens) == 0
        if not isinstance(prompt, Chat) or not is_scored or prompt.variables["messages"][-1]["role"] != "assistant":
            return content
        return replace(content, prompt=replace(prompt, variables={**prompt.variables, "add_generation_prompt": False}))

    def _draft(self, row: Row) -> _Draft:
        content = self._closed(self.finder.find(row.columns))
        prompt, chat = content.prompt, None
        if isinstance(prompt, Chat):
            assert self._tokenizer is not None, "ContentFinder refuses chats without one"
            text, chat = next(self._tokenizer.render_chats([prompt.variables])), prompt.variables
            if isinstance(text, ChatTemplateError):
                what = text.describe(prompt.name, prompt.num_added) if isinstance(text, HiddenError) else str(text)
                raise RowProblem(RowErrorCode.TEMPLATE_ERROR, what)
            prompt = PlainText(text, add_special_tokens=False)
        if self._embedded is not None:
            return self._embedded_draft(row, [prompt, *content.more], self._embedded)
        try:
            base, is_open = self._sampling, self._fills_context and self._spec.is_batch_line(row.columns)
            base = replace(base, max_tokens=self._max_model_len) if is_open else base
            params = merge_params(base, content.overrides)
        except ParamError as error:
            raise RowProblem(RowErrorCode.BAD_PARAM, str(error)) from error
        if refused := self._refusal(params):
            raise RowProblem(RowErrorCode.BAD_PARAM, refused)
        if bool(params.labels) != bool(self._sampling.labels):
            what = f"labels = {shown(params.labels, 80)}: the job gives labels to all rows or to none"
            raise RowProblem(RowErrorCode.BAD_PARAM, f"{what}; set [classify] labels, in whose place a row's own come")
        draft = _Draft(row, params, [prompt])
        longest = self._min_tokens(max(params.labels, key=len, default=""))
        self._check_estimate(draft, longest)
        return draft if chat is None else replace(draft, answers=self._answers_in(chat, prompt, params))

    def _answers_in(
        self, chat: Mapping[str, Any], prompt: PlainText | list[int], params: SamplingParams
    ) -> tuple[tuple[int, int], ...] | None:
        """The (start, end) tokens of the assistant's turns; None if the record has no column for them."""
        wanted = self.packs_logprobs and params.prompt_logprobs is not None
        if not wanted or not isinstance(prompt, PlainText) or self._tokenizer is None:
            return None
        try:
            return self._tokenizer.turns(chat, prompt.text)
        except ChatTemplateError as error:
            raise RowProblem(RowErrorCode.TEMPLATE_ERROR, str(error)) from None

    def _embedded_draft(self, row: Row, prompts: Sequence[PlainText | list[int]], embedded: Embedded) -> _Draft:
        made = [PlainText(embedded.whole(p.text), True) if isinstance(p, PlainText) else p for p in prompts]
        draft = _Draft(row, _EMBEDDED, made)
        if not embedded.truncates:
            self._check_estimate(draft, 0)
        return draft

    def _check_estimate(self, draft: _Draft, longest_label: int) -> None:
        for prompt in draft.prompts:
            is_text = isinstance(prompt, PlainText)
            num_tokens = self._min_tokens(prompt.text) if isinstance(prompt, PlainText) else len(prompt)
            self._check_length(draft, num_tokens, longest_label, is_estimate=True, is_counted=not is_text)

    def _cut(self, token_ids: tuple[int, ...], embedded: Embedded, *, is_text: bool) -> tuple[int, ...]:
        """The text's tokens, cut to as many as the model takes; tokens that the tokenizer adds at the end are kept."""
        max_tokens = self._max_model_len - (embedded.num_markers if is_text else 0)
        if len(token_ids) <= max_tokens or not embedded.truncates:
            return token_ids
        closing = min(self._num_closing, max_tokens - 1) if is_text else 0
        return token_ids[: max_tokens - closing] + token_ids[len(token_ids) - closing :]

    @cached_property
    def _num_closing(self) -> int:
        """The number of tokens that the tokenizer adds after each text."""
        bare, whole = (self._tokenizer.encode_batch(["a"], add)[0] if self._tokenizer else [] for add in (False, True))
        if isinstance(bare, TokenizerError) or isinstance(whole, TokenizerError):
            return 0
        return next((len(whole) - i - len(bare) for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)

    def _refusal(self, params: SamplingParams) -> str:
        """The reason, beginning with a key, why this model cannot work with ``params``; "" if it can."""
        named = next((key for key in _NEEDS_TOKENIZER if params.gives(key)), "")
        if named and self._tokenizer is None:
            return f"{named} needs a tokenizer and this model has none; name one in model.tokenizer"
        if params.thinking_token_budget is not None and not self._has_thoughts:
            why = "neither the chat template nor the tokenizer names a marker that ends thoughts, such as </think>"
            return f"thinking_token_budget = {params.thinking_token_budget}: this model does not think: {why}"
        for key, ids in (("allowed_token_ids", params.allowed_token_ids), ("logit_bias", dict(params.logit_bias))):
            if max(ids, default=0) >= self._vocab_size:
                return f"{key} holds the token id {max(ids)}, and the model has {self._vocab_size} tokens"
        for key, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if (number or 0) > self._vocab_size:
                return f"{key} = {number}: the model has {self._vocab_size} tokens"
        return ""

    @cached_property
    def _has_thoughts(self) -> bool:
        return self._tokenizer is not None and Reasoning(self._tokenizer).has_markers

    def _check_grammar(self, params: SamplingParams) -> None:
        """Raises GrammarError for ``structured_outputs`` that cannot be compiled."""
        if params.structured_outputs and self._grammars is not None:
            self._grammars.check(params.structured_outputs)

    def _min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens in ``text``, so that a book is refused without being tokenized."""
        token_bytes = self._tokenizer.max_token_bytes if self._tokenizer else None
        return -(-len(text) // token_bytes) if token_bytes else 0

    def _encode(self, all_texts: Sequence[PlainText]) -> Texts:
        """The tokens of each text; equal texts are tokenized once."""
        encoded: dict[PlainText, list[int] | TokenizerError] = {}
        if self._tokenizer is None:
            return encoded
        texts = dict.fromkeys(all_texts)
        for add_special_tokens in (False, True):
            wanted = [text for text in texts if text.add_special_tokens == add_special_tokens]
            for batch in bounded(wanted, _num_chars, _MAX_ENCODED_CHARS):
                token_ids = self._tokenizer.encode_batch([text.text for text in batch], add_special_tokens)
                encoded |= zip(batch, token_ids, strict=True)
        return encoded

    def _request(self, draft: _Draft, texts: Texts) -> tuple[Row, Request]:
        parts = [texts[prompt] if isinstance(prompt, PlainText) else prompt for prompt in draft.prompts]
        parts += [texts[_apart(text)] for text in (*draft.params.labels, *_ways_to_write(draft.params.bad_words))]
        encoded: list[tuple[int, ...]] = []
        for tokens in parts:
            if isinstance(tokens, TokenizerError):
                raise RowProblem(RowErrorCode.INTERNAL, str(tokens))
            encoded.append(tuple(tokens))
        prompts, others = encoded[: len(draft.prompts)], encoded[len(draft.prompts) :]
        if self._embedded is not None:
            are_texts = [isinstance(prompt, PlainText) for prompt in draft.prompts]
            prompts = [
                self._cut(ids, self._embedded, is_text=is_text) for ids, is_text in zip(prompts, are_texts, strict=True)
            ]
        side, num_unseen = self._embedded and self._embedded.side, 0
        if side and isinstance(draft.prompts[0], PlainText):
            prompts, num_unseen = side.applied(prompts[0])
        labels, bad_words = others[: len(draft.params.labels)], others[len(draft.params.labels) :]
        for prompt in prompts:
            self._check_length(draft, len(prompt), max(map(len, labels), default=0))
        self._check_logprobs(draft.params, len(prompts[0]))
        if not all(prompts):  # a tokenizer without bos may drop all of a text
            raise RowProblem(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
        for key, lists in (("labels", labels), ("bad_words", bad_words)):
            if () in lists:
                raise RowProblem(RowErrorCode.BAD_PARAM, f"{key}: one of the texts has no tokens")
        try:
            self._check_grammar(draft.params)
        except GrammarError as error:
            raise RowProblem(RowErrorCode.BAD_PARAM, f"structured_outputs: {error}") from error
        row, size = draft.row, num_chars(draft.row.columns)
        pooling = self._embedded.pooling if self._embedded else ""
        lengths = tuple(map(len, prompts)) if len(prompts) > 1 else ()
        rest = (tuple(labels), tuple(bad_words), size, pooling, lengths, rng_key_of(row.id, row.index), num_unseen)
        request = Request(row.index, tuple(chain(*prompts)), draft.params, row.output_token_ids, *rest)
        return replace(
            row, params=draft.params, prompt_token_ids=request.identity_tokens, answers=draft.answers
        ), request

    def logprob_bytes(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """About how many bytes the log-probabilities of a row take at most in its record."""
        max_tokens = params.n * limit_of(params, num_prompt_tokens, self._max_model_len)
        nums_top = params.prompt_logprobs, params.logprobs
        return record_bytes(nums_top, (num_prompt_tokens, max_tokens), is_packed=self.packs_logprobs)

    def _check_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises RowProblem if log-probabilities, more than ``ALWAYS_TOP`` per token, would make a record too large."""
        nums_top = {name: getattr(params, name) or 0 for name in ("logprobs", "prompt_logprobs")}
        if max(nums_top.values()) <= ALWAYS_TOP:
            return
        if (size := self.logprob_bytes(params, num_prompt_tokens)) > MAX_RECORD_BYTES:
            what = ", ".join(f"{name} = {number}" for name, number in nums_top.items() if number)
            why = f"the record would have up to {size >> 20:,} MiB of them; at most {MAX_RECORD_BYTES >> 20} MiB"
            raise RowProblem(RowErrorCode.BAD_PARAM, f"{what}: {why}; lower it, or max_tokens")

    def _check_length(
        self, draft: _Draft, num_tokens: int, longest_label: int, *, is_estimate: bool = False, is_counted: bool = True
    ) -> None:
        """Raises RowProblem too_long for a prompt that leaves no room; an estimate is shown as a lower bound."""
        room = longest_label or (1 if draft.params.max_tokens else 0)
        limit = self._max_model_len - room
        if num_tokens <= limit:
            return
        about = "at least " if is_estimate else ""
        length = f"{'' if is_counted else about}{num_tokens}"
        limits = f"the context of {self._max_model_len} allows at most {max(limit, 0)}"
        before_labels = f" before a label of {about}{longest_label}" if longest_label else ""
        raise RowProblem(RowErrorCode.TOO_LONG, f"the prompt has {length} tokens; {limits}{before_labels}")


def _attempt(row: Row, make: Callable[..., _Made], *args: object) -> _Made | Row:
    """The result of ``make``, or the row with the error of the RowProblem that it raises."""
    try:
        return make(*args)
    except RowProblem as problem:
        return row.failed(problem.error)


def _apart(text: str) -> PlainText:
    """A text to be tokenized without added special tokens."""
    return PlainText(text, add_special_tokens=False)


@lru_cache(maxsize=256)
def _ways_to_write(words: tuple[str, ...]) -> tuple[str, ...]:
    """Each word as it begins a text and as it follows a space: vLLM's meaning of ``bad_words``."""
    bare = [word.lstrip() or word for word in words]
    return tuple(dict.fromkeys(way for word in bare for way in (word, f" {word}")))


def _num_chars(item: PlainText | _Draft | Row) -> int:
    """Number of characters of an item that have to be tokenized."""
    if isinstance(item, _Draft):
        return sum(len(text.text) for text in item.texts)
    return len(item.text) if isinstance(item, PlainText) else 0

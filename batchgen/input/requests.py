"""Records to requests: finds a row's prompt and sampling values, tokenizes in batches, holds prompts to the context.

Every row gets an answer, a ``Request`` or a ``BadRow``, and no row can disturb its neighbours. It knows no file
format and nothing about how tokens are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batchgen.config.job import InputSpec
from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.errors import RowError, RowErrorCode, TokenizerError, UsageError
from batchgen.core.records import BadRow, Record, Request, SamplingParams
from batchgen.input.content import Chat, Content, ContentFinder, PlainText
from batchgen.input.rows import RowProblem, bad_row
from batchgen.text.chat import ChatTemplateError
from batchgen.text.tokenizer import Tokenizer

_MAX_ENCODED_CHARS = 1 << 20  # characters tokenized at once: the tokenizer needs some 50 bytes of memory for each
_MAX_DRAFTED_CHARS = 1 << 24  # characters held at once: a chat template can make much text out of a short row
_NEEDS_TOKENIZER = ("stop", "choices")  # sampling keys that are about text

_Item = TypeVar("_Item")
Texts = Mapping[PlainText, list[int] | TokenizerError]  # texts and the tokens they come to


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row on its way; ``prompt`` is token ids where the row brought them."""

    record: Record
    params: SamplingParams
    prompt: PlainText | list[int]


class RequestBuilder:
    """Builds the requests of one job.

    A row's prompt is the column or template that [input] names; where it names none, the first that is there and
    not null of ``prompt_token_ids``, ``messages`` and ``prompt``, or a row's only column ``text``, or the body of
    an OpenAI Batch line. A row whose messages begin with a system message keeps it in place of the job's.
    Sampling values come from the job, then from those of its ``sampling.columns`` that the row has, then from the
    row's ``sampling`` object; ``card`` is what ``preset = "card"`` stands for in a row. A choice is tokenized by itself
    and its tokens follow the prompt's, so it is taken as it stands: "yes" and " yes" are two choices.

    ``tokenizer`` is None for a model that has none: rows must then bring ``prompt_token_ids``. A prompt has at most
    ``max_model_len - 1`` tokens, which leaves room to generate one; the longest choice needs its own room, and a row
    that generates nothing needs none. Ids that rows bring must be below ``vocab_size``.
    Raises UsageError when [input] or [sampling] cannot work with this tokenizer.
    """

    def __init__(
        self,
        spec: InputSpec,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        card: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._sampling = sampling
        self._card = card
        self._tokenizer = tokenizer
        self._finder = ContentFinder(spec, tokenizer, vocab_size, columns)
        self._max_model_len = max_model_len
        if missing := self._needs_tokenizer(sampling):
            raise UsageError(f"sampling.{missing}; name one in model.tokenizer")

    def build(self, rows: Sequence[Record]) -> list[Request | BadRow]:
        """One answer per row, in the order of ``rows``."""
        groups = _batches(self._drafts(rows), _num_chars, _MAX_DRAFTED_CHARS)
        return [answer for drafts in groups for answer in self._requests(drafts)]

    def _requests(self, drafts: Sequence[_Draft | BadRow]) -> Iterator[Request | BadRow]:
        sound = [draft for draft in drafts if isinstance(draft, _Draft)]
        lists = {draft.params.choices for draft in sound}  # most rows have the job's, so they are few
        texts = self._encode(
            [
                *(draft.prompt for draft in sound if isinstance(draft.prompt, PlainText)),
                *(_choice(choice) for choices in lists for choice in choices),
            ]
        )
        for draft in drafts:
            yield self._request(draft, texts) if isinstance(draft, _Draft) else draft

    def _drafts(self, rows: Sequence[Record]) -> Iterator[_Draft | BadRow]:
        contents = [self._content(record) for record in rows]
        prompts = [content.prompt for content in contents if isinstance(content, Content)]
        chats = [prompt.messages for prompt in prompts if isinstance(prompt, Chat)]
        rendered = self._tokenizer.render_chats(chats) if self._tokenizer else iter(())
        for record, content in zip(rows, contents, strict=True):
            if isinstance(content, BadRow):
                yield content
                continue
            prompt = content.prompt
            text = next(rendered) if isinstance(prompt, Chat) else ""
            if isinstance(text, ChatTemplateError):
                yield bad_row(record, RowError(RowErrorCode.TEMPLATE_ERROR, str(text)), self._spec)
            else:
                prompt = PlainText(text, add_special_tokens=False) if isinstance(prompt, Chat) else prompt
                yield self._draft(record, prompt, content.overrides)

    def _content(self, record: Record) -> Content | BadRow:
        try:
            return self._finder.find(record.columns)
        except RowProblem as problem:
            return bad_row(record, problem.error, self._spec)

    def _draft(self, record: Record, prompt: PlainText | list[int], overrides: Mapping[str, Any]) -> _Draft | BadRow:
        try:
            params = merge_params(self._sampling, overrides, self._card)
        except ParamError as error:
            return bad_row(record, RowError(RowErrorCode.BAD_PARAM, str(error)), self._spec)
        if missing := self._needs_tokenizer(params):
            return bad_row(record, RowError(RowErrorCode.BAD_PARAM, missing), self._spec)
        draft = _Draft(record, params, prompt)
        longest = self._min_tokens(max(params.choices, key=len, default=""))
        num_tokens = self._min_tokens(prompt.text) if isinstance(prompt, PlainText) else len(prompt)
        return self._too_long(draft, num_tokens, longest, is_estimate=True) or draft

    def _needs_tokenizer(self, params: SamplingParams) -> str:
        """What is asked for that a model without a tokenizer cannot do; empty if nothing is."""
        if self._tokenizer is not None:
            return ""
        named = next((key for key in _NEEDS_TOKENIZER if getattr(params, key)), "")
        return f"{named} needs a tokenizer and this model has none" if named else ""

    def _min_tokens(self, text: str) -> int:
        """The fewest tokens ``text`` can come to, as far as can be known: spares tokenizing a book."""
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
            for batch in _batches(wanted, _num_chars, _MAX_ENCODED_CHARS):
                token_ids = self._tokenizer.encode_batch([text.text for text in batch], add_special_tokens)
                encoded |= zip(batch, token_ids, strict=True)
        return encoded

    def _request(self, draft: _Draft, texts: Texts) -> Request | BadRow:
        found = [texts[draft.prompt] if isinstance(draft.prompt, PlainText) else draft.prompt]
        found += [texts[_choice(name)] for name in draft.params.choices]
        encoded: list[list[int]] = []
        for tokens in found:
            if isinstance(tokens, TokenizerError):
                return bad_row(draft.record, RowError(RowErrorCode.INTERNAL, str(tokens)), self._spec)
            encoded.append(tokens)
        token_ids, *choices = encoded
        if too_long := self._too_long(draft, len(token_ids), max(map(len, choices), default=0)):
            return too_long
        if not token_ids:  # a tokenizer without bos may drop all of a text
            error = RowError(RowErrorCode.EMPTY_PROMPT, "the prompt comes to no tokens")
            return bad_row(draft.record, error, self._spec)
        if [] in choices:
            error = RowError(RowErrorCode.BAD_PARAM, "choices: one of them comes to no tokens")
            return bad_row(draft.record, error, self._spec)
        return Request(draft.record.index, tuple(token_ids), draft.params, choices=tuple(map(tuple, choices)))

    def _too_long(
        self, draft: _Draft, num_tokens: int, longest_choice: int, *, is_estimate: bool = False
    ) -> BadRow | None:
        """The error row of a prompt that leaves no room for what is asked for; None where it does."""
        room = longest_choice or (1 if draft.params.max_tokens else 0)
        limit = self._max_model_len - room
        if num_tokens <= limit:
            return None
        about = "at least " if is_estimate else ""  # ids that a row brings need no estimate
        given = f"{about if isinstance(draft.prompt, PlainText) else ''}{num_tokens}"
        limits = f"the context of {self._max_model_len} takes prompts of at most {max(limit, 0)}"
        with_choices = f" before a choice of {about}{longest_choice}" if longest_choice else ""
        message = f"prompt of {given} tokens; {limits}{with_choices}"
        return bad_row(draft.record, RowError(RowErrorCode.TOO_LONG, message), self._spec)


def _choice(text: str) -> PlainText:
    return PlainText(text, add_special_tokens=False)


def _num_chars(item: PlainText | _Draft | BadRow) -> int:
    """How much text yet to be tokenized an item holds."""
    prompt = item.prompt if isinstance(item, _Draft) else item
    return len(prompt.text) if isinstance(prompt, PlainText) else 0


def _batches(items: Iterable[_Item], num_chars: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """``items`` in runs that hold no more than ``most`` characters, or one item."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        if batch and total + num_chars(item) > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += num_chars(item)
    if batch:
        yield batch

"""Records to requests: finds a row's prompt and sampling values, tokenizes in batches, holds prompts to the context.

Every row gets an answer, a ``Request`` or a ``BadRow``, and no row can disturb its neighbours. It knows no file
format and nothing about how tokens are generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchgen.data.content import ContentFinder, PromptText
from batchgen.data.params import ParamError, merge_params
from batchgen.data.rows import RowProblem, bad_row
from batchgen.data.tokenizer import Tokenizer
from batchgen.errors import RowError, RowErrorCode
from batchgen.records import BadRow, Record, Request, SamplingParams
from batchgen.spec import InputSpec

_MAX_ENCODED_CHARS = 1 << 20  # characters tokenized at once: the tokenizer needs some 50 bytes of memory for each


@dataclass(slots=True)
class _Draft:
    """A row on its way; ``text`` is what still has to be tokenized, None where the row brought ids."""

    record: Record
    params: SamplingParams
    text: PromptText | None
    token_ids: list[int]


class RequestBuilder:
    """Builds the requests of one job.

    A row's prompt is the column or template that [input] names; where it names none, the first that is there and
    not null of ``prompt_token_ids``, ``messages`` and ``prompt``, or a row's only column ``text``, or the body of
    an OpenAI Batch line. A row whose messages begin with a system message keeps it in place of the job's.
    Sampling values come from the job, then from columns of their names, then from the row's ``sampling`` object.

    ``tokenizer`` is None for a model that has none: rows must then bring ``prompt_token_ids``. A prompt has at most
    ``max_model_len - 1`` tokens, which leaves room to generate one; ids that rows bring must be below ``vocab_size``.
    Raises UsageError when [input] cannot work with this tokenizer.
    """

    def __init__(
        self,
        spec: InputSpec,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._spec = spec
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._finder = ContentFinder(spec, tokenizer, vocab_size)
        self._max_prompt_tokens = max_model_len - 1

    def build(self, rows: Sequence[Record]) -> list[Request | BadRow]:
        """One answer per row, in the order of ``rows``."""
        drafts = [self._draft(record) for record in rows]
        self._tokenize(draft for draft in drafts if isinstance(draft, _Draft))
        return [self._request(draft) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _draft(self, record: Record) -> _Draft | BadRow:
        try:
            content = self._finder.find(record.columns)
            params = merge_params(self._sampling, content.overrides) if content.overrides else self._sampling
        except RowProblem as problem:
            return bad_row(record, problem.error, self._spec)
        except ParamError as error:
            return bad_row(record, RowError(RowErrorCode.BAD_PARAM, str(error)), self._spec)
        if not isinstance(content.prompt, PromptText):
            return _Draft(record, params, None, content.prompt)
        if at_least := self._min_tokens(content.prompt.text):
            return self._too_long(record, f"at least {at_least}")
        return _Draft(record, params, content.prompt, [])

    def _min_tokens(self, text: str) -> int:
        """The fewest tokens ``text`` can come to if that is too many already, else 0: spares tokenizing a book."""
        token_bytes = self._tokenizer.max_token_bytes if self._tokenizer else None
        if token_bytes is None or len(text) <= token_bytes * self._max_prompt_tokens:
            return 0
        return -(-len(text) // token_bytes)

    def _tokenize(self, drafts: Iterable[_Draft]) -> None:
        texts = [(draft, draft.text) for draft in drafts if draft.text is not None]
        if self._tokenizer is None or not texts:
            return
        for add_special_tokens in (False, True):
            alike = [(draft, text.text) for draft, text in texts if text.add_special_tokens == add_special_tokens]
            for batch in _batches(alike):
                encoded = self._tokenizer.encode_batch([text for _, text in batch], add_special_tokens)
                for (draft, _), token_ids in zip(batch, encoded, strict=True):
                    draft.token_ids = token_ids

    def _request(self, draft: _Draft) -> Request | BadRow:
        if len(draft.token_ids) > self._max_prompt_tokens:
            return self._too_long(draft.record, str(len(draft.token_ids)))
        if not draft.token_ids:  # a tokenizer without bos may drop all of a text
            error = RowError(RowErrorCode.EMPTY_PROMPT, "the prompt comes to no tokens")
            return bad_row(draft.record, error, self._spec)
        return Request(draft.record.index, tuple(draft.token_ids), draft.params)

    def _too_long(self, record: Record, num_tokens: str) -> BadRow:
        limit = f"the context of {self._max_prompt_tokens + 1} takes prompts of at most {self._max_prompt_tokens}"
        return bad_row(record, RowError(RowErrorCode.TOO_LONG, f"prompt of {num_tokens} tokens; {limit}"), self._spec)


def _batches(texts: Sequence[tuple[_Draft, str]]) -> Iterator[list[tuple[_Draft, str]]]:
    """``texts`` in runs that hold no more characters than are tokenized at once, or one text."""
    batch: list[tuple[_Draft, str]] = []
    num_chars = 0
    for draft, text in texts:
        if batch and num_chars + len(text) > _MAX_ENCODED_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append((draft, text))
        num_chars += len(text)
    if batch:
        yield batch

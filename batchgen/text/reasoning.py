"""Reasoning of a thinking model, separated from its answer by the markers that its chat template names.

It can only be at the beginning of an answer; a special marker is looked for among tokens, as decoding drops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

from batchgen.core.errors import TokenizerError
from batchgen.text.stop_strings import StopStrings, ends_in
from batchgen.text.tokenizer import Tokenizer


class Reasoning:
    """The markers of the model with this tokenizer, by which answers are split and thoughts are counted.

    The closing marker is ``AnswerFacts.closing``; the opening one follows from it. ``has_markers`` is whether the model
    thinks at all (``AnswerFacts.thinks``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.closing = tokenizer.answer_facts.closing
        self.opening = self.closing.replace("/", "", 1).replace("END_", "START_").replace("end_", "start_")
        self.has_markers = tokenizer.answer_facts.thinks

    @cached_property
    def shown(self) -> Tokenizer:
        """The tokenizer, whose ``decode`` writes out the markers even if they are special tokens."""
        return self._tokenizer.showing_in((self.opening, self.closing))

    @cached_property
    def closing_ids(self) -> tuple[int, ...]:
        """The tokens of the closing marker by itself. Raises TokenizerError."""
        if (token_id := self._tokenizer.token_id(self.closing)) is not None:
            return (token_id,)
        [token_ids] = self._tokenizer.encode_batch([self.closing], add_special_tokens=False)
        if isinstance(token_ids, TokenizerError):
            raise token_ids
        return tuple(token_ids)

    def is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the answer to a prompt begins inside thoughts: the prompt ends in an opening marker, blanks aside.

        Text may follow the marker if the marker begins the last turn, as in a final message that is continued: there it
        comes after a special token, or after a line of one word that names the role.
        """
        if ends_in(self._tokenizer, prompt_token_ids, self.opening):
            return True
        markers = {self._tokenizer.token_id(marker) for marker in (self.opening, self.closing)}
        special = self._tokenizer.silent_token_ids - markers
        positions = range(len(prompt_token_ids) - 1, -1, -1)
        turn = next((position for position in positions if prompt_token_ids[position] in special), None)
        if turn is None:
            return False
        text = self.shown.decode(prompt_token_ids[turn + 1 :])
        header, opening, thoughts = text.partition(self.opening)
        names_a_role = len(header.split()) == 1 and header.endswith("\n")  # otherwise a text quotes the marker
        return bool(opening) and (names_a_role or not header.strip()) and self.closing not in thoughts

    def split(self, token_ids: Sequence[int], text: str, *, is_open: bool) -> tuple[str | None, str]:
        """The reasoning (None without any) and the rest of the text; newlines next to markers are left out.

        ``text`` is the text of ``token_ids`` up to a stop string. If the reasoning does not end, the rest is "".
        """
        begin, end = find_marker(self._tokenizer, self.opening, token_ids, text)
        if begin < 0 or text[:begin].strip():
            if not is_open:
                return None, text
            end = 0
        close, rest = find_marker(self._tokenizer, self.closing, token_ids, text, end)
        if close < 0:
            return text[end:].strip("\n"), ""
        return text[end:close].strip("\n"), text[rest:].lstrip("\n")

    def thoughts(self, prompt_token_ids: Sequence[int], budget: int) -> Thoughts:
        """A follower of the thoughts of an answer to this prompt, before its first token."""
        return Thoughts(self, budget, is_open=self.is_open(prompt_token_ids))


class Thoughts:
    """Follows the thoughts of one answer, token by token, up to a budget of tokens.

    Thoughts begin with the answer if the prompt has opened them, otherwise after an opening marker at the beginning of
    the answer. They end with the closing marker. ``is_over`` is whether they have ended or can no longer begin.
    """

    __slots__ = ("_budget", "_finder", "_head", "_markers", "_newest", "_num_tokens", "is_over")

    def __init__(self, markers: Reasoning, budget: int, *, is_open: bool) -> None:
        self.is_over = False
        self._markers = markers
        self._budget = budget
        self._num_tokens = 0
        self._finder: StopStrings | None = None
        self._head: list[int] = []  # the beginning of the answer, until it is known whether it opens thoughts
        self._newest = deque[int](maxlen=len(markers.closing.encode()))  # the closing marker has a byte each at worst
        if is_open:
            self._open()

    def _open(self) -> None:
        self._finder = StopStrings(self._markers.shown, (self._markers.closing,))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of thought so far, without markers and at most the budget."""
        return min(self._num_tokens, self._budget)

    @property
    def forced(self) -> int | None:
        """The token that must come next once the budget is spent: the next token of the closing marker."""
        num_forced = self._num_tokens - self._budget
        return None if self.is_over or self._finder is None or num_forced < 0 else self._markers.closing_ids[num_forced]

    def push(self, token_id: int) -> None:
        """Take in the next token of the answer. May raise TokenizerError."""
        if self.is_over:
            return
        if self._finder is None:
            self._look_for_opening(token_id)
            return
        self._num_tokens += 1
        self._newest.append(token_id)
        if self._finder.push(token_id) is not None:
            self._num_tokens -= self._num_closing
            self.is_over = True
        elif self._num_tokens == self._budget + len(self._markers.closing_ids):
            self.is_over = True

    def _look_for_opening(self, token_id: int) -> None:
        self._head.append(token_id)
        text, opening = self._markers.shown.decode(self._head).lstrip(), self._markers.opening
        if text.startswith(opening):
            self._open()
        elif not text:
            self._head.clear()
        elif not opening.startswith(text):
            self.is_over = True

    @property
    def _num_closing(self) -> int:
        """Number of the newest tokens that hold the closing marker."""
        newest, closing = [*self._newest], self._markers.closing
        sizes = range(1, len(newest))
        return next((n for n in sizes if closing in self._markers.shown.decode(newest[-n:])), len(newest))


def find_marker(
    tokenizer: Tokenizer, marker: str, token_ids: Sequence[int], text: str, start: int = 0
) -> tuple[int, int]:
    """(begin, end) of a marker in the text of tokens, at ``start`` at the earliest; begin is -1 if it is missing."""
    token_id = tokenizer.token_id(marker)
    if token_id in tokenizer.silent_token_ids:
        for number, other_id in enumerate(token_ids):
            at = len(tokenizer.decode(token_ids[:number])) if other_id == token_id else -1
            if at >= start:
                return at, at
    at = text.find(marker, start)
    return at, at + len(marker)


def text_behind(
    tokenizer: Tokenizer, marker: str, prompt_token_ids: Sequence[int], token_ids: Sequence[int], text: str
) -> str:
    """Text after the first mention of a marker, or all of it if the prompt ends in the marker; else ""."""
    if ends_in(tokenizer, prompt_token_ids, marker):
        return text
    begin, end = find_marker(tokenizer, marker, token_ids, text)
    return "" if begin < 0 else text[end:]

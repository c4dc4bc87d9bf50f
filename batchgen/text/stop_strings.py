"""Stop strings: found in a text that grows token by token, and cut off the finished text.

They may begin and end inside tokens, so text is compared; it has special tokens only if a stop string names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchgen.text.tokenizer import Tokenizer
from batchgen.text.turns import common_length

_BLANKS = 32  # tokens: more than a prompt has after a marker
_UNDECODED = "\ufffd"  # decoded from bytes that form no character (yet)
_MAX_OPEN = 8  # tokens whose text may still change


class Decode(Protocol):
    """The text of token ids, as ``Tokenizer.decode`` makes it."""

    def __call__(self, ids: Sequence[int], *, skip_special_tokens: bool = True, shown_in: str = "") -> str: ...


class StopStrings:
    """Search for stop strings in one text that grows token by token, at a constant cost per token.

    The text of the newest, open tokens may still change. The last settled tokens are kept as context, since a decoder
    may write the first token that it gets differently, and the end of their text is kept too. ``DecodeStream`` would
    hold back unfinished characters.
    """

    __slots__ = ("_context", "_num_kept", "_offset", "_open", "_open_text", "_stop", "_tail", "_tokenizer", "remainder")

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer.showing_in(stop)
        self._stop = stop
        self._num_kept = max(map(len, stop), default=1) - 1  # characters in which an unfinished stop string may begin
        self._context: list[int] = []
        self._offset = 0  # characters of the context
        self._open: list[int] = []
        self._open_text = ""
        self._tail = ""  # the end of the settled text
        self.remainder = ""

    def push(self, token_id: int) -> str | None:
        """Add the next token; returns the stop string that it completes, or None.

        If there are several, it is the one that begins first, or the longest of those. A stop string that an earlier
        token completed does not count again. ``remainder`` is the text after it in that token.
        """
        if token_id in self._tokenizer.silent_token_ids or token_id >= self._tokenizer.vocab_size:
            return None  # another special token, or a row of the model beyond the vocabulary: without text
        self._open.append(token_id)
        text = self._text_of(self._open)
        window, match = self._tail + text, None
        if any(stop in window for stop in self._stop):
            match = _first_completed(window, self._stop, len(self._tail) + common_length(self._open_text, text))
        self._open_text = text
        if not text.endswith(_UNDECODED):
            self._settle(len(self._open), text)
        elif len(self._open) >= _MAX_OPEN:
            cut = self._clean_cut()
            self._settle(cut, self._text_of(self._open[:cut]))
        if match is None:
            return None
        self.remainder = window[match[0] + len(match[1]) :]
        return match[1]

    def _text_of(self, tokens: list[int]) -> str:
        """The text of open tokens after the context."""
        return self._tokenizer.decode(self._context + tokens)[self._offset :]

    def _settle(self, num_tokens: int, text: str) -> None:
        """Settle the first open tokens, whose text is ``text``."""
        tail = self._tail + text
        self._tail = tail[max(0, len(tail) - self._num_kept) :]
        if text:
            self._context = self._open[:num_tokens]
            self._offset = len(self._tokenizer.decode(self._context))
        self._open = self._open[num_tokens:]
        self._open_text = self._text_of(self._open) if self._open else ""

    def _clean_cut(self) -> int:
        """Number of open tokens that can be settled without cutting a character that may still be completed.

        UTF-8 has at most 4 bytes per character, so ``_MAX_OPEN`` tokens have such a cut.
        """
        tokens, decode = self._open, self._tokenizer.decode
        cuts = range(len(tokens) - 1, 0, -1)
        return next((i for i in cuts if decode(tokens[:i]) + decode(tokens[i:]) == decode(tokens)), len(tokens))


def cut_text(decode: Decode, token_ids: Sequence[int], stop: str) -> str:
    """Generated text up to the stop string that the last token completed; earlier ones came before ``min_tokens``."""
    text, plain = decode(token_ids, shown_in=stop), decode(token_ids)
    match = _first_completed(text, (stop,), common_length(decode(token_ids[:-1], shown_in=stop), text))
    if match is None:
        return plain
    end, count, before = match[0], len(token_ids), text
    if text == plain:
        return text[:end]
    while len(before) > end:  # back to the token in which it begins: special tokens before it are without text
        count -= 1
        before = decode(token_ids[:count], shown_in=stop)
    return decode(token_ids[:count]) + text[len(before) : end]


def _first_completed(text: str, stop: Sequence[str], old: int) -> tuple[int, str] | None:
    """The position and text of the stop string that begins first, or the longest of those, ending after ``old``."""
    starts = ((text.find(item, max(0, old - len(item) + 1)), item) for item in stop)
    return min(((at, item) for at, item in starts if at >= 0), key=lambda m: (m[0], -len(m[1])), default=None)


def ends_in(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], marker: str) -> bool:
    """Whether a prompt ends in a text that is not empty, blanks aside. Special tokens count as text."""
    last = prompt_token_ids[-_BLANKS - len(marker.encode()) :]  # a byte each at worst
    _, last_marker, rest = tokenizer.decode(last, skip_special_tokens=False).rpartition(marker)
    return bool(last_marker) and not rest.strip()

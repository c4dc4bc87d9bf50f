"""Stop strings: watched for while tokens come one by one, and cut off the finished text.

A stop string may begin and end inside tokens, and a character may take several tokens, so text is what is compared.
Watching costs the same for every token: it decodes the newest few, never the whole text. Nothing here knows when a
match counts (``min_tokens``); that is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchgen.text.tokenizer import Tokenizer

_UNDECODED = "\ufffd"  # what bytes that form no character (yet) are decoded to
_MAX_OPEN = 8  # tokens whose text may still change


class StopStrings:
    """Makes the watch of each text of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, stop: tuple[str, ...]) -> StopWatch:
        """A watch for these strings, at the start of a text."""
        return StopWatch(self._tokenizer, stop)


class StopWatch:
    """Looks for stop strings in one text that grows token by token.

    Tokens whose text is settled are dropped but for a few, the context: a decoder may write the first token of a
    sequence in another way than later ones. Of settled text only what a stop string may begin in is kept.
    """

    __slots__ = (
        "_context",
        "_decode",
        "_num_kept",
        "_offset",
        "_open",
        "_seen",
        "_silent",
        "_stop",
        "_tail",
        "_vocab_size",
    )

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decode = tokenizer.decode
        self._silent = tokenizer.silent_token_ids
        self._vocab_size = tokenizer.vocab_size
        self._stop = stop
        self._num_kept = max(map(len, stop), default=1) - 1  # characters that may begin a stop string yet to end
        self._context: list[int] = []
        self._offset = 0  # characters of the context
        self._open: list[int] = []
        self._seen = ""  # the text of the open tokens so far
        self._tail = ""  # the end of the settled text

    def push(self, token_id: int) -> str | None:
        """Take in the next token; the stop string that it completes, or None.

        Of several it is the one that begins first, of those the longest. What an earlier token completed does not
        count again.
        """
        if token_id in self._silent or token_id >= self._vocab_size:  # a model may have more rows than tokens
            return None
        self._open.append(token_id)
        text = self._text_of(self._open)
        window, found = self._tail + text, None
        if any(stop in window for stop in self._stop):
            found = _first_completed(window, self._stop, len(self._tail) + _num_common(self._seen, text))
        self._seen = text
        if not text.endswith(_UNDECODED):
            self._settle(len(self._open), text)
        elif len(self._open) >= _MAX_OPEN:
            cut = self._clean_cut()
            self._settle(cut, self._text_of(self._open[:cut]))
        return found[1] if found else None

    def _text_of(self, tokens: list[int]) -> str:
        """The text of open tokens where they stand."""
        return self._decode(self._context + tokens)[self._offset :]

    def _settle(self, num_tokens: int, text: str) -> None:
        """Declare the text of the first open tokens final."""
        tail = self._tail + text
        self._tail = tail[max(0, len(tail) - self._num_kept) :]
        if text:
            self._context = self._open[:num_tokens]
            self._offset = len(self._decode(self._context))
        self._open = self._open[num_tokens:]
        self._seen = self._text_of(self._open) if self._open else ""

    def _clean_cut(self) -> int:
        """How many open tokens can be settled without cutting a character that may still be completed.

        UTF-8 has at most 4 bytes a character, so there is such a cut among so many tokens.
        """
        tokens, decode = self._open, self._decode
        cuts = range(len(tokens) - 1, 0, -1)
        return next((i for i in cuts if decode(tokens[:i]) + decode(tokens[i:]) == decode(tokens)), len(tokens))


def cut_text(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop: str) -> str:
    """The text of generated tokens up to the stop string which the last of them completed.

    Earlier occurrences, let pass for the sake of ``min_tokens``, stay.
    """
    text = decode(token_ids)
    found = _first_completed(text, (stop,), _num_common(decode(token_ids[:-1]), text))
    return text[: found[0]] if found else text


def _first_completed(text: str, stop: Sequence[str], old: int) -> tuple[int, str] | None:
    """The stop string that begins first, of those the longest, and where; it must end beyond ``old`` characters."""
    places = ((text.find(item, max(0, old - len(item) + 1)), item) for item in stop)
    return min(((at, item) for at, item in places if at >= 0), key=lambda m: (m[0], -len(m[1])), default=None)


def _num_common(first: str, second: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))

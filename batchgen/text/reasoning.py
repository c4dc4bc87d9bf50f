"""Reasoning of a thinking model, split from the text of its answer by the markers that its chat template names.

A marker is looked for among the tokens too: where it is a special token, decoding leaves it out of the text. Reasoning
stands at the beginning of an answer or nowhere: a marker that a text merely quotes splits nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from batchgen.text.stop_strings import ends_in
from batchgen.text.tokenizer import Tokenizer

_NAME = r"[\w:.-]{0,24}(?:think|thought|reason)[\w:.-]{0,24}"
_CLOSING = re.compile(rf"<(/){_NAME}>|\[(/){_NAME}\]|<\|(END_){_NAME}\|>", re.IGNORECASE)
_USUAL = "</think>"


class Reasoning:
    """Splits answers of the model with this tokenizer.

    The closing marker is the first that the chat template mentions, such as ``[/THINK]`` or ``<|END_THINKING|>``, but
    ``</think>`` where it mentions that or none; the opening one follows from it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        found = None if _USUAL in source else _CLOSING.search(source)
        self.closing = found[0] if found else _USUAL
        self.opening = self.closing.replace("/", "", 1).replace("END_", "START_").replace("end_", "start_")

    def is_open(self, prompt_end: Sequence[int]) -> bool:
        """Whether a prompt with these last tokens ends in an opening marker, so that its answer begins inside."""
        return ends_in(self._tokenizer, prompt_end, self.opening)

    def split(self, token_ids: Sequence[int], text: str, *, is_open: bool) -> tuple[str | None, str]:
        """The reasoning, None where there is none, and the rest of the text; newlines beside markers are left out.

        ``text`` is that of ``token_ids``, up to a stop string. Reasoning without an end leaves no text.
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


def find_marker(
    tokenizer: Tokenizer, marker: str, token_ids: Sequence[int], text: str, start: int = 0
) -> tuple[int, int]:
    """Where a marker begins and ends in the text of tokens, at ``start`` at the earliest; -1 where it is not."""
    token_id = tokenizer.token_id(marker)
    if token_id in tokenizer.silent_token_ids:
        for place, found in enumerate(token_ids):
            at = len(tokenizer.decode(token_ids[:place])) if found == token_id else -1
            if at >= start:
                return at, at
    at = text.find(marker, start)
    return at, at + len(marker)


def text_behind(
    tokenizer: Tokenizer, marker: str, prompt_token_ids: Sequence[int], token_ids: Sequence[int], text: str
) -> str:
    """What stands behind the first mention of a marker in the text of tokens; "" where it is not there.

    Where the prompt ends in the marker, that is the whole text.
    """
    if ends_in(tokenizer, prompt_token_ids, marker):
        return text
    begin, end = find_marker(tokenizer, marker, token_ids, text)
    return "" if begin < 0 else text[end:]

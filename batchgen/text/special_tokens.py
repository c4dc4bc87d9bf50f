"""Special tokens in the texts of rows: found, or tokenized as plain text while those of a template stay special.

Parts of a prompt that come from a row are put between two characters of private use before the prompt is made. What
stands outside of them in the prompt is the template's: its special tokens are replaced by stand-ins, which a second
tokenizer has as tokens and which are replaced back, while it knows no other special token. So every rule of the
tokenizer about what stands beside a special token holds as ever.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken

from batchgen.core.errors import TokenizerError

_BEGIN, _END = "\U0010fffc", "\U0010fffd"  # around a part of a row
_FIRST = 0x100000  # the stand-in of the first special token; Unicode will never give these characters a meaning
_OWN = re.compile(f"[{chr(_FIRST)}-\U0010ffff]")
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_Value = TypeVar("_Value")


class SpecialTokens:
    """The special tokens of a tokenizer, such as ``<|im_start|>``."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in sorted(added.items()) if token.special and token.content}
        self._texts = {token.content: number for number, token in enumerate(special.values())}
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._any_case = re.compile(self._whole.pattern, re.IGNORECASE)
        lowered = [text.casefold() for text in self._texts]
        self._beginnings = {text[:size] for text in lowered for size in range(1, len(text))}
        self._ends = {text[-size:] for text in lowered for size in range(1, len(text))}
        self._longest = max(map(len, lowered), default=0)
        self._second = tokenizers.Tokenizer.from_str(backend.to_str())
        self._second.encode_special_tokens = True
        self._second.add_tokens([_stand_in(number, token) for number, token in enumerate(special.values())])
        stand_ins = [self._second.token_to_id(chr(_FIRST + number)) for number in range(len(special))]
        self._ids = dict(zip(stand_ins, special, strict=True))
        self._special = frozenset(special)
        self._unknown = getattr(backend.model, "unk_token", None)

    def found(self, value: Any) -> str | None:
        """A special token in the texts of a value; None where there is none."""
        if isinstance(value, str):
            match = self._whole.search(value)
            return match[0] if match else None
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        tokens = map(self.found, items) if isinstance(items, list) else iter(())
        return next(filter(None, tokens), None)

    def marked(self, value: _Value) -> _Value:
        """A value in whose texts all that could be, or begin or end, a special token is marked as a row's."""
        if isinstance(value, str):
            return self._marked_text(value) if self._is_suspect(value) else value  # type: ignore[return-value]
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}  # type: ignore[return-value]
        return [self.marked(item) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]

    def _marked_text(self, text: str) -> str:
        """Blanks at both ends stay outside, since templates trim them."""
        core = text.strip()
        before, _, behind = text.partition(core)
        return f"{before}{_BEGIN}{core}{_END}{behind}"

    def _is_suspect(self, text: str) -> bool:
        """Whether a text holds a special token in any case, or may form one with a neighbour."""
        core = text.strip().casefold()
        sizes = range(1, min(self._longest, len(core) + 1))
        edges = any(core[-size:] in self._beginnings or core[:size] in self._ends for size in sizes)
        return edges or bool(self._any_case.search(text))

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int] | TokenizerError:
        """Token ids of a prompt with marks (see ``are_sound``); an error where the tokenizer has no plain ones."""
        pieces = _MARKS.split(prompt)
        for place in range(0, len(pieces), 2):
            pieces[place] = self._whole.sub(lambda match: chr(_FIRST + self._texts[match[0]]), pieces[place])
        text = "".join(pieces)
        encoding = self._second.encode(text, add_special_tokens=add_special_tokens)
        plain = {self._second.token_to_id(self._unknown or ""), *self._ids}
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)  # 1: put around the text
        others = [token_id for token_id, is_put in pairs if not is_put and token_id not in plain]
        if wrong := next((self._second.id_to_token(t) for t in others if t in self._special), None):
            return TokenizerError(f"the tokenizer has no other tokens for the special token {wrong} in the row")
        if sum(token_id in self._ids for token_id in encoding.ids) != len(_OWN.findall(text)):
            return TokenizerError("the tokenizer takes special tokens that stand alone, not beside a row's text")
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]


def _stand_in(number: int, token: AddedToken) -> AddedToken:
    """A token of one character, with the rules of a special token about what stands beside it."""
    rules = {rule: getattr(token, rule) for rule in ("single_word", "lstrip", "rstrip")}
    return AddedToken(chr(_FIRST + number), normalized=False, special=False, **rules)


def are_sound(prompt: str, marked: str) -> bool:
    """Whether marks changed nothing else in a prompt, and each part between two of them is whole.

    They do where a template looks into a text or cuts it, and where the row has such characters itself.
    """
    marks = _MARKS.findall(marked)
    is_whole = marks == [_BEGIN, _END] * (len(marks) // 2)
    return is_whole and "".join(_MARKS.split(marked)) == prompt and not _OWN.search(prompt)

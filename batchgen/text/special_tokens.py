"""Special tokens that texts of rows write: found, or tokenized as plain text while those of a template stay special.

A prompt is made twice: once as it is, and once with a mark, a character of private use, beside each character of the
row. No special token with a character of the row is left in the second, so its special tokens are those of the template
and of the job. Where the first has the same ones, the row writes none. Else those of the second are replaced by
stand-ins, which a second tokenizer has as tokens and which are replaced back, while it knows no other special token. So
the tokenizer's rules about what stands beside a special token hold as ever. A tokenizer that normalizes texts before
it looks for special tokens finds more than a text writes out: see ``normalized``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken

from batchgen.core.errors import TokenizerError

_MARK = "\U0010ffff"  # beside each character of a row
_FIRST = 0x100000  # the stand-in of the first special token; Unicode will never give these characters a meaning
_OWN = re.compile(f"[{chr(_FIRST)}-{_MARK}]")
_TEXTS = ("content", "text")  # keys of a chat whose text is never one of a template's words
_Value = TypeVar("_Value")


class SpecialTokens:
    """The special tokens of a tokenizer, such as ``<|im_start|>``."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in sorted(added.items()) if token.special and token.content}
        self._texts = {token.content: number for number, token in enumerate(special.values())}
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._is_trimmed = not any(text[0].isspace() or text[-1].isspace() for text in self._texts)
        names = (token.content for token in special.values() if token.normalized and backend.normalizer)
        self.normalized = next(names, None)
        self._second = tokenizers.Tokenizer.from_str(backend.to_str())
        self._second.encode_special_tokens = True
        self._second.add_tokens([_stand_in(number, token) for number, token in enumerate(special.values())])
        stand_ins = [self._second.token_to_id(chr(_FIRST + number)) for number in range(len(special))]
        self._ids = dict(zip(stand_ins, special, strict=True))
        self._special = frozenset(special)
        self._unknown = getattr(backend.model, "unk_token", None)

    def written(self, prompt: str) -> list[str]:
        """The special tokens that a prompt writes out, in order."""
        return self._whole.findall(prompt)

    def marked(self, value: _Value, words: Collection[str] = ()) -> _Value:
        """A value of a row, its texts with marks, but not those of ``words``, by which a template finds its way."""
        if isinstance(value, str):
            is_word = value in words and not self._whole.search(value)
            return value if is_word else self._marked_text(value)  # type: ignore[return-value]
        if isinstance(value, dict):
            items = ((key, self._marked_item(key, item, words)) for key, item in value.items())
            return {self.marked(key, words): item for key, item in items}  # type: ignore[return-value]
        return [self.marked(item, words) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]

    def _marked_item(self, key: Any, item: Any, words: Collection[str]) -> Any:
        """Templates may count the characters of a call's id."""
        if isinstance(item, str) and str(key).endswith("id") and item.isalnum():
            return self.marked(item, () if any(item in text for text in self._texts) else (item,))
        return self.marked(item, () if key in _TEXTS and isinstance(item, str) else words)

    def _marked_text(self, text: str) -> str:
        """Blanks at both ends stay without marks, since templates trim them, where no special token has such ends."""
        core = (text.strip() if self._is_trimmed else "") or text
        before, _, behind = text.partition(core) if core else ("", "", "")
        return f"{before}{_MARK}{_MARK.join(core)}{_MARK}{behind}" if core else text

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int] | TokenizerError:
        """Token ids of a prompt with marks; an error where the tokenizer has no plain ones."""
        text = without_marks(self._whole.sub(lambda match: chr(_FIRST + self._texts[match[0]]), prompt))
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


def has_own(prompt: str) -> bool:
    """Whether a prompt without marks has a character that serves as a mark or as a stand-in."""
    return bool(_OWN.search(prompt))


def without_marks(prompt: str) -> str:
    """A prompt without its marks."""
    return prompt.replace(_MARK, "")

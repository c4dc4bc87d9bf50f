"""Special tokens that the text of a row writes out, such as ``<|im_start|>``, so that a job can refuse the row.

Only a row's own texts are searched, so a token that a chat template completes or changes is not found.
"""

from __future__ import annotations

import re

import tokenizers


class SpecialTokens:
    """The special tokens of a tokenizer; ``normalized`` is the first one that other spellings also match, or None."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        special = [token for _, token in sorted(added.items()) if token.special and token.content]
        longest_first = sorted((token.content for token in special), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        names = (token.content for token in special if token.normalized and backend.normalizer)
        self.normalized = next(names, None)

    def written(self, text: str) -> list[str]:
        """The special tokens that a text writes out, in order."""
        return self._whole.findall(text)

    def first_in(self, value: object) -> str:
        """The first special token in the texts of a row's value, keys included; or ""."""
        values = [value]
        while values:
            item = values.pop()
            if isinstance(item, str) and (match := self._whole.search(item)):
                return match[0]
            if isinstance(item, dict):
                values += [*item.values(), *item.keys()]
            elif isinstance(item, list):
                values += item
        return ""

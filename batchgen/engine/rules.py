"""Rules of a row about its tokens, whatever the text means: which may come, which complete a bad word, what is biased.

They are made once for all rows that ask for the same, and hold no state. They change logits that the sampler sees; the
log-probabilities of a row are those of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from batchgen.core.records import SamplingParams

_MAX_KEPT = 64  # rules, each of kilobytes for a list of some thousand tokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """What ``allowed_token_ids``, ``bad_words`` and ``logit_bias`` ask for.

    Attributes:
        bits: int32 [ceil(vocab_size / 32)], a bit per token that may come at all; None if all may.
        endings: of the bad words of several tokens the last ones, by those before; these have ``sizes`` tokens.
        biased_ids: int64 [num_biased].
        biases: float32 [num_biased], what is added to their logits.
    """

    bits: np.ndarray | None
    endings: Mapping[tuple[int, ...], Sequence[int]]
    sizes: frozenset[int]
    biased_ids: np.ndarray
    biases: np.ndarray

    def endings_of(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        """The tokens that would complete a bad word within the output, the last ones of ``token_ids``."""
        sizes = [size for size in self.sizes if size <= num_output_tokens]
        return [token for size in sizes for token in self.endings.get(tuple(token_ids[-size:]), ())]


def rules_for(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> TokenRules | None:
    """The rules of rows that ask for these, None if they ask for nothing; all ids are below ``vocab_size``."""
    asked = params.allowed_token_ids, bad_words, params.logit_bias
    return _made(*asked, vocab_size) if any(asked) else None


@lru_cache(maxsize=_MAX_KEPT)
def _made(
    allowed: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    logit_bias: tuple[tuple[int, float], ...],
    vocab_size: int,
) -> TokenRules:
    endings: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for *start, last in bad_words:
        endings[tuple(start)].append(last)
    bits = _bits(allowed, endings.pop((), []), vocab_size)
    ids, biases = zip(*logit_bias, strict=True) if logit_bias else ((), ())
    sizes = frozenset(map(len, endings))
    return TokenRules(bits, dict(endings), sizes, np.array(ids, dtype=np.int64), np.array(biases, dtype=np.float32))


def _bits(allowed: Sequence[int], forbidden: Sequence[int], vocab_size: int) -> np.ndarray | None:
    if not (allowed or forbidden):
        return None
    may_come = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    may_come[list(allowed) or slice(vocab_size)] = 1
    may_come[list(forbidden)] = 0
    return np.packbits(may_come, bitorder="little").view(np.int32)

"""Texts that a guide lets random logits write, with the vocabulary of the sample model or any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from batchgen.core.structured import canonical
from batchgen.text.grammar import Grammars, Guide
from batchgen.text.tokenizer import Tokenizer

SAMPLE = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
_ENDING = frozenset('"}],0 1')  # characters with which texts come to their end


def sample_grammars(folder: Path = SAMPLE, vocab_size: int = 0) -> Grammars:
    tokenizer = Tokenizer.load(folder)
    return Grammars(tokenizer, vocab_size or tokenizer.vocab_size, tokenizer.eos_token_ids)


def allowed(grammars: Grammars, guide: Guide) -> list[int]:
    """The tokens that the guide's mask allows next; those behind the vocabulary are looked at, too."""
    bits = np.zeros((1, -(-grammars.vocab_size // 32)), dtype=np.int32)
    grammars.fill([guide], bits)
    return [int(token) for token in np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0]]


def write(grammars: Grammars, text: str, random: Random, most: int = 400, free: int = 30) -> tuple[list[int], Guide]:
    """Random tokens that fit a canonical text, without the end token; after ``free``, ones that end it are likelier."""
    guide = grammars.begin(text, [])
    tokens: list[int] = []
    ends = set(grammars.eos_token_ids)
    while len(tokens) < most and not guide.error and not guide.is_over:
        choices = allowed(grammars, guide)
        if guide.error or not choices or (ends.intersection(choices) and random.random() < 0.3):
            break
        closing = [token for token in choices if _ends(grammars, token)] if len(tokens) > free else []
        plain = [token for token in choices if token not in ends]
        if not plain:
            break
        tokens.append(random.choice(closing if closing and random.random() < 0.8 else plain))
        guide.push(tokens[-1])
    return tokens, guide


def _ends(grammars: Grammars, token: int) -> bool:
    return set(grammars.tokenizer.decode([token])) <= _ENDING


def complete_texts(grammars: Grammars, asked: dict[str, Any], seeds: Sequence[int] = range(8)) -> list[str]:
    """The texts that came to an end, of one for each seed; GrammarError if the guides refuse to begin."""
    text = canonical(asked)
    grammars.check(text)
    found = []
    for seed in seeds:
        tokens, guide = write(grammars, text, Random(seed))
        assert not guide.error, guide.error
        if guide.is_complete:
            found.append(grammars.tokenizer.decode(tokens))
    return found

"""Constrained requests for tiny models with the sample tokenizer, and constraints of plain lists for the engine.

Constraints of real grammars bring forced tokens in runs, tokens that share beginnings and markers in free text. Those
of ``Lists`` are exact: which tokens may come at which place, and when one fails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.core.records import Request, SamplingParams
from batchgen.core.structured import canonical
from batchgen.engine.generation import TextTools
from batchgen.text.grammar import Grammars
from batchgen.text.reasoning import Reasoning
from batchgen.text.stop_strings import StopStrings
from batchgen.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "sample_data" / "tiny-lfm2"
VOCAB_SIZE = 640  # of the tokenizer there
EOS = 7


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def parts(**more: Any) -> dict[str, Any]:
    """What an engine needs beside a model and sizes to run rows of ``asked``."""
    grammars = Grammars(tokenizer(), VOCAB_SIZE, [EOS])
    stop_matcher = partial(StopStrings, tokenizer())
    return {"text": TextTools(stop_matcher, grammars, Reasoning(tokenizer()).thoughts), "eos_token_ids": [EOS]} | more


PERSON = {
    "type": "object",
    "properties": {
        "person": {"type": "string", "maxLength": 4},
        "is_adult": {"type": "boolean"},
        "kind": {"enum": ["customer", "supplier"]},
    },
    "required": ["person", "is_adult", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 5}
CONSTANT = {"const": {"answer": "always the same"}}
GRAMMARS: dict[str, dict[str, Any]] = {
    "object": {"json": PERSON},
    "list": {"json": LIST},
    "constant": {"json": CONSTANT},
    "regex": {"regex": "The answer is [a-z]{2,6}(, or [0-9]+){0,2}\\."},
    "choice": {"choice": ["yes", "yes and no", "not at all", "nothing"]},
    # The token that ends the marker may go on with any letters.
    "thoughts before": {"regex": "[a-c]{2,9}( and more of it)?", "after": "</think>"},
    "free before": {"regex": "[^!]{0,12}! (stop|go on without a question)", "after": "a"},
}


def ids_of(text: str) -> tuple[int, ...]:
    [found] = tokenizer().encode_batch([text], add_special_tokens=False)
    assert not isinstance(found, Exception)
    return tuple(found)


def grammar(name: str) -> str:
    return canonical(GRAMMARS[name])


def params_of(rng: random.Random, structured: str) -> SamplingParams:
    """Parameters of every kind that goes with a constraint, alone and together."""
    return SamplingParams(
        max_tokens=rng.choice([3, 9, 40, 40]),
        temperature=rng.choice([0.0, 0.0, 1.0]),
        top_k=rng.choice([0, 30]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        seed=rng.randint(0, 3),
        n=rng.choice([1, 1, 1, 3]),
        stop=rng.choice([(), (), ("er", "w"), ("and",)]),
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        max_repeats=rng.choice([0, 0, 3]),
        structured_outputs=structured,
        logit_bias=rng.choice([(), (), ((69, 9.0), (73, 6.0), (91, -40.0))]),
    )


@cache
def asked(per_grammar: int = 3) -> tuple[Request, ...]:
    """Rows of every grammar and free ones in turn, with common beginnings; every seventh is one before it again."""
    rng = random.Random(20)
    stems = [tuple(rng.randrange(8, VOCAB_SIZE) for _ in range(length)) for length in (21, 9)]
    kinds = [*map(grammar, GRAMMARS), "", ""]
    thinking = [kinds.index(grammar("thoughts before")), len(kinds) - 1]
    made: list[Request] = []
    for key in range(per_grammar * len(kinds)):
        prompt = rng.choice(stems) + tuple(rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randint(0, 12)))
        params = params_of(rng, kinds[key % len(kinds)])
        if key % len(kinds) in thinking:
            prompt += ids_of("<think>")
            params = replace(params, thinking_token_budget=rng.choice([0, 1, 3, 8, 20]))
        made.append(Request(key, prompt, params))
    again = [replace(twin, key=1000 + twin.key) for twin in made[::7]]
    return (*made, *again)


@dataclass
class Steps:
    """A ``Constraint`` of lists: the text is over once each place has one of its tokens.

    ``fails`` is when it errs: at its "begin", with the "push" of the token of place ``at``, or the "fill" for that.
    """

    allowed: list[list[int]]
    fails: str = ""
    at: int = 0
    error: str = ""
    num_tokens: int = 0

    @property
    def is_active(self) -> bool:
        return not self.error

    @property
    def forced(self) -> int | None:
        if self.is_over or self.error or len(self.allowed[self.num_tokens]) != 1:
            return None
        return self.allowed[self.num_tokens][0]

    @property
    def is_complete(self) -> bool:
        return not self.error and self.num_tokens == len(self.allowed)

    @property
    def is_over(self) -> bool:
        return self.is_complete

    def release(self) -> None:
        """See ``Constraint``."""

    def push(self, token_id: int) -> None:
        """See ``Constraint``."""
        if self.error:
            return
        if token_id not in self.allowed[self.num_tokens]:
            self.error = f"token {token_id} at place {self.num_tokens}"
        elif self.fails == "push" and self.at == self.num_tokens:
            self.error = "no more"
        self.num_tokens += 1


class Lists:
    """``Constraints`` of lists; ``num_masks`` counts the masks that were asked for."""

    def __init__(self) -> None:
        self.num_masks = 0

    def begin(self, text: str, prompt_token_ids: Sequence[int]) -> Steps:
        """See ``Constraints``; the text is that of ``listed``."""
        found = Steps(**json.loads(text))
        if found.fails == "begin":
            found.error = "no beginning"
        return found

    def fill(self, constraints: Sequence[Steps], bits: np.ndarray) -> None:
        """See ``Constraints``."""
        allowed = np.zeros((len(bits), 32 * bits.shape[1]), dtype=np.uint8)
        for row, steps in enumerate(constraints):
            self.num_masks += 1
            if steps.fails == "fill" and steps.at == steps.num_tokens:
                steps.error = "no mask"
                allowed[row] = 1
            elif not steps.is_over:
                allowed[row, steps.allowed[steps.num_tokens]] = 1
        bits[:] = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


def listed(allowed: Sequence[Sequence[int]], fails: str = "", at: int = 0) -> str:
    """``structured_outputs`` for ``Lists``."""
    return json.dumps({"allowed": [list(tokens) for tokens in allowed], "fails": fails, "at": at})

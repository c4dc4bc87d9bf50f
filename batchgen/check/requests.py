"""What a check runs: prompts made up or read from a file, greedy and sampled by turns. Knows no engine."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import BadRow, Request, SamplingParams
from batchgen.input.columns import check_columns
from batchgen.input.source import open_source, stdin_as_file
from batchgen.run.loader import ModelInfo

_MAX_TOKENS = 16  # generated for each request
_FIRST_TOKEN = 8  # below lie the special tokens
_LENGTHS = (1, 5, 40, 100, 520)  # below a KV block, beyond one, beyond the token budget of a step on the CPU
_STEM, _TAILS = 80, (0, 10, 25)  # prompts with a common beginning
_GREEDY = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
_SAMPLED = replace(
    _GREEDY, temperature=1.0, top_k=50, top_p=0.95, repetition_penalty=1.05, presence_penalty=0.2, seed=1
)

Prompt = tuple[int, ...]


def made_up_prompts(vocab_size: int, max_model_len: int) -> list[Prompt]:
    """Prompts of random tokens in mixed lengths, some with a common beginning; always the same ones."""
    rng = random.Random(0)
    first = min(_FIRST_TOKEN, vocab_size - 1)

    def tokens(count: int) -> Prompt:
        return tuple(rng.randrange(first, vocab_size) for _ in range(count))

    stem = tokens(_STEM)
    prompts = [tokens(length) for length in _LENGTHS] + [stem + tokens(length) for length in _TAILS]
    room = max(max_model_len - _MAX_TOKENS, max_model_len // 2)
    return [prompt[:room] for prompt in prompts]


def read_prompts(spec: JobSpec, info: ModelInfo) -> list[Prompt]:
    """The prompts of a job's input, tokenized as a run would.

    Raises:
        UsageError: it cannot be read, lacks a column that is named, holds no rows, or one that could not be run.
    """
    with stdin_as_file(spec.input) as readable:
        builder = info.builder(readable, _GREEDY)
        source = open_source(readable)
        check_columns(source.read(), spec, builder.finder)
        prompts = []
        for row in source.read():
            found = row if isinstance(row, BadRow) else builder.build([row])[0]
            if isinstance(found, BadRow):
                raise UsageError(f"{found.source}:{found.line}: {found.error.code}: {found.error.message}")
            prompts.append(found.prompt_token_ids)
    if not prompts:
        raise UsageError(f"--prompts {spec.input.path[0]}: holds no rows")
    return prompts


def requests_for(prompts: Iterable[Prompt]) -> list[Request]:
    """A request for each prompt in turn, greedy and sampled by turns."""
    return [Request(key, prompt, (_GREEDY, _SAMPLED)[key % 2]) for key, prompt in enumerate(prompts)]

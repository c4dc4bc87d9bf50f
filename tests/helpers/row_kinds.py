"""Kinds of rows that are held against each of them run alone, with the models and engines that run them.

Results are compared whole but for their timings, so a single bit of difference in any logit of a token whose
log-probability is asked for would show.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import structured
import torch
from families import RAW
from tiny_model import CPU, DTYPES, checked_run, engine_for, random_requests, tiny_model

from batchgen.core.records import Request, Result, SamplingParams, Timings
from batchgen.engine import Engine
from batchgen.kernels.select import select
from batchgen.model.decoder import Decoder
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint

TRAINED = Path(__file__).resolve().parents[2] / "sample_data" / "tiny-lfm2"
# Types of what is computed and of the keys and values that are kept ("auto": the same).
TYPES = [
    *(("float32", "auto"), ("bfloat16", "auto")),
    *(("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")),
]
INTEGERS: dict[str, dict[str, Any]] = {
    "": {},
    "int8": {"weights": "int8"},
    "int8 by int8": {"weights": "int8", "activations": "int8"},
}
SHAPES: dict[str, dict[str, Any]] = {family: {"model_type": family} for family in RAW} | {
    "odd": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "conv_L_cache": 4,
        "conv_bias": True,
        "full_attn_idxs": [1],  # two convolutions follow it
    },
}
# Names of models: a shape or "trained", and whether its weights, and what they are multiplied by, are integers.
MODELS = [*SHAPES, "trained", "odd int8", "trained int8 by int8"]

ALLOWED = tuple(range(20, 28))
BIASES = ((30, 4.0), (31, 3.9), (2, -100.0))
_WORDS = ((22,), (20, 21), (21, 23, 25), (25, 25))  # tokens that rows of few allowed ones come to at once
_RULES = (
    SamplingParams(),
    SamplingParams(allowed_token_ids=ALLOWED),
    SamplingParams(allowed_token_ids=ALLOWED, bad_words=("some",), temperature=1.0, seed=4),
    SamplingParams(allowed_token_ids=ALLOWED, bad_words=("some",), logprobs=2),
    SamplingParams(logit_bias=BIASES, temperature=0.8, n=2),
    SamplingParams(logit_bias=BIASES, allowed_token_ids=(2, *ALLOWED), frequency_penalty=0.5, min_tokens=4),
)
_DRAWN = (
    SamplingParams(temperature=1.0, seed=17),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=5),
)


@dataclass(frozen=True)
class Kind:
    """Rows of one kind, and the sizes that suit them."""

    requests: tuple[Request, ...]
    tight: int  # a block size with which a pool hardly larger than the longest row preempts
    vocab_size: int = 128

    @property
    def longest(self) -> int:
        """Tokens of the longest row, which any pool must hold."""
        ends = [[len(label) for label in r.labels] or [r.params.max_tokens] for r in self.requests]
        return max(len(r.prompt_token_ids) + max(end) for r, end in zip(self.requests, ends, strict=True))


def _with_params(count: int, kinds: tuple[SamplingParams, ...], **sizes: Any) -> list[Request]:
    """Random rows of mixed lengths whose parameters take turns."""
    made = random_requests(count, **sizes)
    return [replace(r, params=replace(kinds[r.key % len(kinds)], max_tokens=max(r.params.max_tokens, 4))) for r in made]


def _rules() -> tuple[Request, ...]:
    """Rows with biases, allowed tokens and bad words; some of them twice."""
    requests = _with_params(3 * len(_RULES), _RULES, seed=5, prompt=(1, 24), output=(1, 20))
    made = [replace(r, bad_words=_WORDS if r.params.bad_words else ()) for r in requests]
    return *made, *(replace(request, key=1000 + request.key) for request in made[:8])


def _any_params(rng: random.Random) -> SamplingParams:
    """Parameters of every kind, alone and together."""
    greedy = rng.random() < 0.5
    return SamplingParams(
        max_tokens=rng.randint(1, 14),
        min_tokens=rng.choice([0, 0, 1]),
        temperature=0.0 if greedy else 0.9,
        top_k=rng.choice([0, 30]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        seed=rng.randint(0, 3),
        ignore_eos=rng.random() < 0.3,
        n=rng.choice([1, 1, 1, 3]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        max_repeats=rng.choice([0, 0, 2]),
    )


def _sharing() -> tuple[Request, ...]:
    """Rows of every kind of parameter with common beginnings, some asked twice, some scored."""
    rng = random.Random(5)
    stems = [tuple(rng.randrange(8, 128) for _ in range(length)) for length in (37, 20, 8)]
    made: list[Request] = []
    for key in range(24):
        if key % 6 == 5:
            twin = made[rng.randrange(len(made))]
            made.append(replace(twin, key=key))
            continue
        prompt = rng.choice(stems) + tuple(rng.randrange(8, 128) for _ in range(rng.randint(0, 12)))
        if key % 6 == 4:
            labels = tuple(tuple(rng.randrange(8, 128) for _ in range(rng.randint(1, 5))) for _ in range(3))
            made.append(Request(key, prompt, SamplingParams(labels=("a", "b", "c")), labels=labels))
        elif key % 6 == 3:
            made.append(Request(key, prompt, SamplingParams(max_tokens=14, ignore_eos=True, max_repeats=2)))
        else:
            made.append(Request(key, prompt, _any_params(rng)))
    return tuple(made)


KINDS = {
    "greedy": Kind(tuple(random_requests(12, seed=28, prompt=(1, 50), output=(1, 24))), 3),
    "drawn": Kind(tuple(_with_params(12, _DRAWN, seed=28, prompt=(1, 50), output=(1, 24))), 1),
    # Contexts of 240 to 560 tokens cross the CPU kernel's tile of 256 once or twice, some while decoding.
    "long": Kind(
        tuple(random_requests(6, seed=4, prompt=(240, 440), output=(40, 70), params=SamplingParams(ignore_eos=True))), 2
    ),
    "rules": Kind(_rules(), 6),
    "sharing": Kind(_sharing(), 4),
    "structured": Kind(structured.asked(), 5, structured.VOCAB_SIZE),
}


@cache
def model_of(name: str, dtype: str, vocab_size: int = 128) -> Decoder:
    """One of ``MODELS``."""
    shape, _, integers = name.partition(" ")
    kernels = select(CPU, DTYPES[dtype], **INTEGERS[integers])
    if shape != "trained":
        return tiny_model(DTYPES[dtype], kernels, vocab_size=vocab_size, **SHAPES[shape])
    with torch.inference_mode():
        return Decoder(read_config(TRAINED), Checkpoint(TRAINED, DTYPES[dtype], CPU), kernels)


@cache
def _structured_parts() -> dict[str, Any]:
    return structured.parts()


def engine_of(
    rows: str,
    model: str | Decoder = "lfm2",
    dtype: str = "float32",
    *,
    block_size: int = 16,
    room: float = 10,
    parts: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Engine:
    """An engine for one of ``KINDS`` whose pool holds ``room`` of the longest rows."""
    kind = KINDS[rows]
    return engine_for(
        model_of(model, dtype, kind.vocab_size) if isinstance(model, str) else model,
        num_blocks=-(-int(kind.longest * room) // block_size),
        block_size=block_size,
        parts={**(_structured_parts() if rows == "structured" else {}), **(parts or {})},
        **sizes,
    )


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, Result]:
    """Results by key, without what depends on the schedule; every key once, no error, and nothing left behind."""
    results: dict[int, Result] = {}
    for result in checked_run(engine, requests):
        assert result.key not in results, f"request {result.key} was answered twice"
        assert result.error is None, result.error
        results[result.key] = replace(result, timings=Timings())
    assert not engine.scheduler.has_work
    assert engine.scheduler.pool.num_free == engine.config.num_blocks
    return results


@cache
def alone(rows: str, model: str = "lfm2", dtype: str = "float32", kv_cache_dtype: str = "auto") -> dict[int, Result]:
    """Each row in an engine of its own on one thread, its prompt in one piece, nothing shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    off: dict[str, Any] = {
        "prefix_caching": False,
        "share_duplicates": False,
        "max_num_seqs": 1,
        "kv_cache_dtype": kv_cache_dtype,
    }
    found: dict[int, Result] = {}
    for request in KINDS[rows].requests:
        found |= run(
            engine_of(rows, model, dtype, block_size=32, room=4, max_num_batched_tokens=1000, **off), [request]
        )
    torch.set_num_threads(threads)
    return found

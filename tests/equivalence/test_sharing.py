"""What is shared between requests changes nothing about any of them: cached = cold, together = alone, to the bit.

Prefixes taken over from the cache, identical requests, samples of one prompt and scores of choices, held against each
request run by itself in an engine that has seen nothing. Log-probabilities are compared exactly, so a single bit of
difference in any logit of a chosen token would show.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from families import RAW
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import DTYPES, checked_run, engine_for, tiny_model

from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.engine import Engine
from batchgen.model.decoder import Decoder

NUM_REQUESTS = 24
VOCAB = 128


@cache
def model(dtype: str, family: str = "lfm2") -> Decoder:
    changes = {"conv_L_cache": 4, "conv_bias": True} if family == "lfm2" else {}
    return tiny_model(DTYPES[dtype], model_type=family, **changes)


def params_of(rng: random.Random) -> SamplingParams:
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


@cache
def requests() -> tuple[Request, ...]:
    """Families with common beginnings, some asked twice, some scored."""
    rng = random.Random(5)
    stems = [tuple(rng.randrange(8, VOCAB) for _ in range(length)) for length in (37, 20, 8)]
    made: list[Request] = []
    for key in range(NUM_REQUESTS):
        if key % 6 == 5:
            twin = made[rng.randrange(len(made))]
            made.append(replace(twin, key=key))
            continue
        prompt = rng.choice(stems) + tuple(rng.randrange(8, VOCAB) for _ in range(rng.randint(0, 12)))
        if key % 6 == 4:
            choices = tuple(tuple(rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 5))) for _ in range(3))
            made.append(Request(key, prompt, SamplingParams(choices=("a", "b", "c")), choices=choices))
        elif key % 6 == 3:
            made.append(Request(key, prompt, SamplingParams(max_tokens=14, ignore_eos=True, max_repeats=2)))
        else:
            made.append(Request(key, prompt, params_of(rng)))
    return tuple(made)


def run(engine: Engine, asked: Iterable[Request]) -> dict[int, Result]:
    """Results by key, without what depends on the schedule; every key once."""
    results: dict[int, Result] = {}
    for result in checked_run(engine, asked):
        assert result.key not in results
        assert result.error is None, result.error
        results[result.key] = replace(result, timings=Timings())
    return results


@cache
def alone(dtype: str, family: str = "lfm2") -> dict[int, Result]:
    """Every request in an engine of its own, nothing shared and nothing cut."""
    off = {"prefix_caching": False, "share_duplicates": False}
    sizes: dict[str, Any] = {"num_blocks": 40, "block_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 100}
    found: dict[int, Result] = {}
    for request in requests():
        found |= run(engine_for(model(dtype, family), **sizes, **off), [request])
    return found


@pytest.mark.parametrize("family", list(RAW), ids=str)
@pytest.mark.parametrize(("block_size", "dtype"), list(product([1, 4, 16], DTYPES)), ids=str)
def test_cached_equals_cold(family: str, block_size: int, dtype: str) -> None:
    sizes = {"num_blocks": 1200 // block_size, "block_size": block_size, "max_num_seqs": 6}
    engine = engine_for(model(dtype, family), **sizes)
    assert run(engine, requests()) == alone(dtype, family)
    assert engine.stats.num_cached_tokens > 300
    assert engine.stats.num_shared_requests > 0
    assert engine.stats.num_preemptions == 0


@pytest.mark.parametrize("family", list(RAW), ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_a_preempted_sequence_finds_its_blocks_again_and_goes_on_undisturbed(dtype: str, family: str) -> None:
    engine = engine_for(model(dtype, family), num_blocks=21, block_size=4, max_num_seqs=8, max_num_batched_tokens=13)
    assert run(engine, requests()) == alone(dtype, family)
    assert engine.stats.num_preemptions > 0
    cold = engine_for(
        model(dtype, family),
        num_blocks=21,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=13,
        prefix_caching=False,
    )
    assert run(cold, requests()) == alone(dtype, family)
    assert cold.stats.num_recomputed_tokens > engine.stats.num_recomputed_tokens
    assert cold.stats.num_cached_tokens == 0


any_policies = given(
    dtype=st.sampled_from(list(DTYPES)),
    block_size=st.integers(1, 20),
    spare=st.integers(0, 30),
    sizes=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(1, 80),
            "max_num_seqs": st.integers(1, 12),
            "look_ahead": st.integers(1, NUM_REQUESTS),
            "prefix_caching": st.booleans(),
            "share_duplicates": st.booleans(),
            "longest_first": st.booleans(),
            "forecast_memory": st.booleans(),
        }
    ),
    order=st.permutations(range(NUM_REQUESTS)),
)


@settings(max_examples=10)
@any_policies
def test_no_policy_changes_a_result(
    dtype: str, block_size: int, spare: int, sizes: dict[str, Any], order: list[int]
) -> None:
    check_policies(dtype, block_size, spare, sizes, order)


@pytest.mark.slow
@settings(max_examples=150)
@any_policies
def test_no_policy_changes_a_result_at_length(
    dtype: str, block_size: int, spare: int, sizes: dict[str, Any], order: list[int]
) -> None:
    check_policies(dtype, block_size, spare, sizes, order)


def check_policies(dtype: str, block_size: int, spare: int, sizes: dict[str, Any], order: list[int]) -> None:
    engine = engine_for(model(dtype), num_blocks=-(-63 // block_size) + spare, block_size=block_size, **sizes)
    asked = [requests()[i] for i in order]
    assert run(engine, asked) == alone(dtype)


def test_these_requests_end_in_every_way() -> None:
    """Otherwise the tests above would show less than they claim."""
    reasons = {s.finish_reason for result in alone("float32").values() for s in result.samples}
    assert reasons == set(FinishReason)


def test_the_first_of_several_samples_is_the_only_one_of_a_single_request() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, n=4, ignore_eos=True)
    several = run(engine_for(model("float32"), num_blocks=40, block_size=8), [Request(3, (9, 10, 11), params)])[3]
    single = run(
        engine_for(model("float32"), num_blocks=40, block_size=8), [Request(3, (9, 10, 11), replace(params, n=1))]
    )[3]
    assert several.samples[0] == single.samples[0]
    assert len({sample.token_ids for sample in several.samples}) == 4


def test_greedy_samples_are_computed_once() -> None:
    engine = engine_for(model("float32"), num_blocks=40, block_size=8)
    result = run(engine, [Request(0, (9, 10, 11), SamplingParams(max_tokens=5, n=3, ignore_eos=True))])[0]
    assert len(result.samples) == 3
    assert len({sample.token_ids for sample in result.samples}) == 1
    assert engine.stats.num_output_tokens == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_generated_token_has_the_log_probability_that_scoring_gives_it(dtype: str) -> None:
    prompt = tuple(range(20, 60))
    asked = SamplingParams(max_tokens=12, temperature=1.0, logprobs=4, ignore_eos=True)
    generated = run(engine_for(model(dtype), num_blocks=40, block_size=8), [Request(0, prompt, asked)])[0]
    text = prompt + generated.token_ids
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=4)
    engine = engine_for(model(dtype), num_blocks=40, block_size=8, max_num_batched_tokens=7)
    scored = run(engine, [Request(0, text, scoring)])[0]
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(text) - 1
    assert scored.prompt_logprobs[len(prompt) - 1 :] == generated.logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_is_worth_what_its_tokens_are_worth_after_the_prompt(dtype: str) -> None:
    prompt, choices = tuple(range(20, 60)), ((7, 9), (100,), (8, 8, 8))
    engine = engine_for(model(dtype), num_blocks=40, block_size=8, max_num_batched_tokens=16)
    request = Request(0, prompt, SamplingParams(choices=("a", "b", "c")), choices=choices)
    result = run(engine, [request])[0]
    for choice, logprob in zip(choices, result.choice_logprobs, strict=True):
        whole = Request(0, prompt + choice, SamplingParams(max_tokens=0, prompt_logprobs=0))
        scores = run(engine_for(model(dtype), num_blocks=40, block_size=8), [whole])[0].prompt_logprobs
        assert scores is not None
        assert logprob == sum(score.logprob for score in scores[len(prompt) - 1 :])
    best = max(range(3), key=lambda i: result.choice_logprobs[i])
    assert result.token_ids == choices[best]
    assert engine.stats.num_cached_tokens >= 2 * 32  # the prompt was computed once, up to its last whole block
    assert engine.stats.num_output_tokens == 0

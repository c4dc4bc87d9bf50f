"""Rows with biases, allowed tokens and bad words get the same tokens and scores in any batch and after any stop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import DTYPES, checked_run, engine_for, random_requests, tiny_model

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.engine import Engine
from batchgen.model.decoder import Decoder

ALLOWED = tuple(range(20, 28))
BIASES = ((30, 4.0), (31, 3.9), (2, -100.0))
WORDS = ((22,), (20, 21), (21, 23, 25), (25, 25))  # tokens that rows of few allowed ones come to at once
KINDS = (
    SamplingParams(),
    SamplingParams(allowed_token_ids=ALLOWED),
    SamplingParams(allowed_token_ids=ALLOWED, bad_words=("some",), temperature=1.0, seed=4),
    SamplingParams(allowed_token_ids=ALLOWED, bad_words=("some",), logprobs=2),
    SamplingParams(logit_bias=BIASES, temperature=0.8, n=2),
    SamplingParams(logit_bias=BIASES, allowed_token_ids=(2, *ALLOWED), frequency_penalty=0.5, min_tokens=4),
)
LONGEST = 46
ROOMY: dict[str, Any] = {"num_blocks": 200, "block_size": 8}


@cache
def model(dtype: str = "float32") -> Decoder:
    return tiny_model(DTYPES[dtype])


@cache
def asked() -> tuple[Request, ...]:
    requests = random_requests(5 * len(KINDS), seed=5, prompt=(1, 24), output=(1, 20))
    made = []
    for i, request in enumerate(requests):
        params = replace(KINDS[i % len(KINDS)], max_tokens=max(4, request.params.max_tokens))
        made.append(replace(request, params=params, bad_words=WORDS if params.bad_words else ()))
    return *made, *(replace(request, key=1000 + request.key) for request in made[:8])


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, Result]:
    found = {result.key: replace(result, timings=Timings()) for result in checked_run(engine, requests)}
    assert all(result.error is None for result in found.values())
    return found


@cache
def alone(dtype: str = "float32") -> dict[int, Result]:
    off = {"prefix_caching": False, "share_duplicates": False, "max_num_seqs": 1}
    found: dict[int, Result] = {}
    for request in asked():
        found |= run(engine_for(model(dtype), num_blocks=8, block_size=8, **off), [request])
    return found


def test_only_allowed_tokens_come_and_no_bad_word_does() -> None:
    for request in asked():
        allowed, result = request.params.allowed_token_ids, alone()[request.key]
        for sample in result.samples:
            assert not allowed or set(sample.token_ids) <= {*allowed}
            assert not any(
                sample.token_ids[i : i + len(word)] == word for word in request.bad_words for i in range(LONGEST)
            )
            if allowed == ALLOWED:
                assert sample.finish_reason is FinishReason.LENGTH, "no end token is allowed"
    plain = {r.key: r for r in run(engine_for(model(), **ROOMY), [replace(r, bad_words=()) for r in asked()]).values()}
    changed = [r.key for r in asked() if r.bad_words and plain[r.key].token_ids != alone()[r.key].token_ids]
    assert len(changed) > 5, "otherwise bad words have not been met"
    assert any({30, 31} & {*alone()[r.key].token_ids} for r in asked() if r.params.logit_bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_equals_solo(dtype: str) -> None:
    engine = engine_for(model(dtype), **ROOMY)
    assert run(engine, asked()) == alone(dtype)
    assert engine.stats.num_shared_requests > 0


@settings(max_examples=12)
@given(
    num_blocks=st.integers(12, 30),
    block_size=st.integers(4, 9),
    max_num_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 12),
    overlaps=st.booleans(),
)
def test_any_size_of_the_engine_gives_the_same(overlaps: bool, **sizes: Any) -> None:
    assert run(engine_for(model(), parts={"overlaps": overlaps}, **sizes), asked()) == alone()


def test_preempted_equals_undisturbed() -> None:
    engine = engine_for(model(), num_blocks=9, block_size=6, max_num_seqs=6)
    assert run(engine, asked()) == alone()
    assert engine.stats.num_preemptions > 5


def test_resumed_after_any_token_equals_uninterrupted() -> None:
    resumed = []
    for request in asked()[: len(KINDS)]:
        if request.params.n == 1:
            tokens = alone()[request.key].token_ids
            resumed += [(request.key, replace(request, output_token_ids=tokens[:size])) for size in range(len(tokens))]
    requests = [replace(request, key=place) for place, (_, request) in enumerate(resumed)]
    greedy = [request for request in requests if request.params.is_greedy]
    found = run(engine_for(model(), share_duplicates=False, **ROOMY), greedy)
    for request in greedy:
        expected = alone()[resumed[request.key][0]]
        assert found[request.key] == replace(expected, key=request.key)
    drawn = [request for place, request in resumed if not request.params.is_greedy]
    assert drawn, "a draw is keyed by its row, so these resume one by one"
    for request in drawn:
        assert run(engine_for(model(), **ROOMY), [request]) == {request.key: alone()[request.key]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_no_token_is_left_is_an_error_row_and_the_others_go_on(temperature: float) -> None:
    params = SamplingParams(max_tokens=5, allowed_token_ids=(20, 21), temperature=temperature)
    stuck = Request(0, (9, 8), params, bad_words=((20,), (21, 21)))
    other = Request(1, (9, 8), params, bad_words=((20,),))
    engine = engine_for(model(), **ROOMY)
    results = {result.key: result for result in checked_run(engine, [stuck, other])}
    error = results[0].error
    assert error is not None and error.code is RowErrorCode.BAD_PARAM
    told = "allowed_token_ids, bad_words, min_tokens or structured_outputs leave no token to follow token 3"
    assert error.message == f"{told}, or the logits are not finite"
    assert results[1].token_ids == (21,) * 5
    assert engine.scheduler.pool.num_free == engine.config.num_blocks


@pytest.mark.parametrize(
    "request_",
    [
        Request(0, (9,), SamplingParams(allowed_token_ids=(9, 128))),
        Request(0, (9,), SamplingParams(logit_bias=((9, 1.0), (128, 1.0)))),
        Request(0, (9,), bad_words=((9, 128),)),
    ],
    ids=["allowed", "bias", "word"],
)
def test_a_token_that_the_model_does_not_have_is_an_error_row(request_: Request) -> None:
    (result,) = engine_for(model(), **ROOMY).run([request_])
    assert result.error is not None and result.error.code is RowErrorCode.BAD_PARAM
    assert result.error.message == "token id 128 is not among the model's 128"


def test_steps_overlap_unless_a_bad_word_depends_on_the_text() -> None:
    """What ``needs_host`` says is held against tokens in ``tests.engine.test_overlap``."""
    engine = engine_for(model(), **ROOMY)
    params = SamplingParams(allowed_token_ids=ALLOWED, logit_bias=BIASES)
    for bad_words, needs_host in (((), False), (((22,),), False), (((22,), (20, 21)), True)):
        assert engine.submit(Request(0, (9,), params, bad_words=bad_words)) is None
        assert engine.scheduler.waiting.pop().generation.needs_host is needs_host


def test_rows_with_the_same_lists_share_one_set_of_bits() -> None:
    engine = engine_for(model(), max_num_seqs=3, **ROOMY)
    params = SamplingParams(allowed_token_ids=ALLOWED)
    for key in range(3):
        engine.submit(Request(key, (9, key + 8), replace(params, max_tokens=key + 3)))
    assert len({id(s.generation.rules) for s in engine.scheduler.unfinished()}) == 1


def test_the_best_choice_is_that_with_the_best_sum_or_mean_and_the_first_of_equals() -> None:
    choices = ((40, 41, 42, 43), (50,), (60, 61), (50,))
    prompts = [(9, 8 + i) for i in range(20)]
    plain = [Request(i, prompt, SamplingParams(max_tokens=0), choices=choices) for i, prompt in enumerate(prompts)]
    by_mean = [replace(r, params=replace(r.params, normalize="tokens")) for r in plain]
    sums, means = (run(engine_for(model(), **ROOMY), requests) for requests in (plain, by_mean))
    for key, found in sums.items():
        scores = found.choice_logprobs
        assert means[key].choice_logprobs == scores
        assert found.choice_means == means[key].choice_means
        assert found.choice_means == tuple(s / len(c) for s, c in zip(scores, choices, strict=True))
        for result, by in ((found, scores), (means[key], means[key].choice_means)):
            assert result.token_ids == choices[by.index(max(by))]
            assert by[1] == by[3]
    assert {r.token_ids for r in means.values()} != {r.token_ids for r in sums.values()}

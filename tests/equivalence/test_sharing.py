"""Samples of one prompt and scores of labels are what single requests of these tokens get, to the bit.

That a prefix from the cache or an identical request changes nothing is shown by the rows of ``test_equivalence`` that
share them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from row_kinds import engine_of, run
from tiny_model import DTYPES

from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine

PROMPT = tuple(range(20, 60))


def roomy(dtype: str = "float32", **sizes: Any) -> Engine:
    return engine_of("sharing", "lfm2", dtype, block_size=8, room=5, **sizes)


def result_of(engine: Engine, prompt: tuple[int, ...], **params: Any) -> Result:
    return run(engine, [Request(3, prompt, SamplingParams(**params))])[3]


def test_the_first_of_several_samples_is_the_only_one_of_a_single_request() -> None:
    params: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    several, single = (result_of(roomy(), (9, 10, 11), **params, n=n) for n in (4, 1))
    assert several.first == single.first
    assert len({sample.token_ids for sample in several.samples}) == 4


def test_greedy_samples_are_computed_once() -> None:
    engine = roomy()
    result = result_of(engine, (9, 10, 11), max_tokens=5, n=3, ignore_eos=True)
    assert len(result.samples) == 3
    assert len({sample.token_ids for sample in result.samples}) == 1
    assert engine.stats.num_output_tokens == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_generated_token_has_the_log_probability_that_scoring_gives_it(dtype: str) -> None:
    generated = result_of(roomy(dtype), PROMPT, max_tokens=12, temperature=1.0, logprobs=4, ignore_eos=True)
    text = PROMPT + generated.first.token_ids
    scored = result_of(roomy(dtype, max_num_batched_tokens=7), text, max_tokens=1, prompt_logprobs=4)
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(text) - 1
    assert generated.first.logprobs is not None
    assert [*scored.prompt_logprobs][len(PROMPT) - 1 :] == [*generated.first.logprobs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_label_is_worth_what_its_tokens_are_worth_after_the_prompt(dtype: str) -> None:
    labels = ((7, 9), (100,), (8, 8, 8))
    engine = roomy(dtype, max_num_batched_tokens=16)
    request = Request(0, PROMPT, SamplingParams(labels=("a", "b", "c")), labels=labels)
    result = run(engine, [request])[0]
    for label, logprob in zip(labels, result.label_logprobs, strict=True):
        scores = result_of(roomy(dtype), PROMPT + label, max_tokens=0, prompt_logprobs=0).prompt_logprobs
        assert scores is not None
        assert logprob == sum(score.logprob for score in [*scores][len(PROMPT) - 1 :])
    best = max(range(3), key=lambda i: result.label_logprobs[i])
    assert result.first.token_ids == labels[best]
    assert engine.stats.num_cached_tokens >= 2 * 32  # the prompt was computed once, up to its last whole block
    assert engine.stats.num_output_tokens == 0


def test_the_best_label_is_that_with_the_best_sum_or_mean_and_the_first_of_equals() -> None:
    labels = ((40, 41, 42, 43), (50,), (60, 61), (50,))
    prompts = [(9, 8 + i) for i in range(20)]
    plain = [Request(i, prompt, SamplingParams(max_tokens=0), labels=labels) for i, prompt in enumerate(prompts)]
    by_mean = [replace(r, params=replace(r.params, by="mean")) for r in plain]
    sums, means = (run(engine_of("sharing", room=40), requests) for requests in (plain, by_mean))
    for key, found in sums.items():
        scores = found.label_logprobs
        assert means[key].label_logprobs == scores
        assert found.label_means == means[key].label_means
        assert found.label_means == tuple(s / len(c) for s, c in zip(scores, labels, strict=True))
        for result, by in ((found, scores), (means[key], means[key].label_means)):
            assert result.first.token_ids == labels[by.index(max(by))]
            assert by[1] == by[3]
    assert {r.first.token_ids for r in means.values()} != {r.first.token_ids for r in sums.values()}

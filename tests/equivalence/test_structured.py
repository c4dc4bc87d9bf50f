"""Constrained rows among free ones get the same results in any batch, to the bit: tokens, scores, ends, completeness.

Held against every row run by itself in an engine that has seen nothing. The rows have grammars of every form, and all
else that a row may ask for; some are cut off inside forced tokens, some consist of forced tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from families import RAW
from hypothesis import given, settings
from hypothesis import strategies as st
from structured import GRAMMARS, VOCAB_SIZE, asked, grammar, parts
from tiny_model import DTYPES, checked_run, engine_for, tiny_model

from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.engine import Engine
from batchgen.kernels.reference import ReferenceKernels
from batchgen.model.decoder import Decoder

LONGEST = 96  # tokens of a prompt, what is forced and what is sampled
ROOMY: dict[str, Any] = {"num_blocks": 150, "block_size": 16}
PARTS = parts()


@cache
def model(dtype: str = "float32", family: str = "lfm2") -> Decoder:
    return tiny_model(DTYPES[dtype], model_type=family, vocab_size=VOCAB_SIZE)


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, Result]:
    """Results by key, without what depends on the schedule; every key once."""
    results: dict[int, Result] = {}
    for result in checked_run(engine, requests):
        assert result.key not in results
        assert result.error is None, result.error
        results[result.key] = replace(result, timings=Timings())
    assert not engine.scheduler.has_work
    assert engine.scheduler.pool.num_free == engine.config.num_blocks
    return results


@cache
def alone(dtype: str = "float32", family: str = "lfm2", kv_dtype: str = "auto") -> dict[int, Result]:
    """Every row in an engine of its own, nothing shared and nothing cut."""
    off = {"prefix_caching": False, "share_duplicates": False, "max_num_seqs": 1, "kv_dtype": kv_dtype}
    found: dict[int, Result] = {}
    for request in asked():
        found |= run(engine_for(model(dtype, family), num_blocks=30, block_size=8, parts=PARTS, **off), [request])
    return found


def test_these_rows_end_in_every_way() -> None:
    """Otherwise the tests below would show less than they claim."""
    samples = [s for result in alone().values() for s in result.samples]
    assert {(s.finish_reason, s.is_complete) for s in samples} >= {
        (FinishReason.STOP, True),
        (FinishReason.STOP, False),
        (FinishReason.LENGTH, True),
        (FinishReason.LENGTH, False),
        (FinishReason.LENGTH, None),
    }
    assert any(len({s.token_ids for s in result.samples}) > 1 for result in alone().values())


@pytest.mark.parametrize(
    ("family", "dtype"), [(family, "float32") for family in RAW] + [("lfm2", "bfloat16"), ("qwen3", "bfloat16")]
)
def test_batched_equals_solo(family: str, dtype: str) -> None:
    engine = engine_for(model(dtype, family), parts=PARTS, **ROOMY)
    assert run(engine, asked()) == alone(dtype, family)
    assert engine.stats.num_forced_tokens > 50
    assert engine.stats.num_shared_requests > 0
    assert engine.stats.num_cached_tokens > 0


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_chunked_equals_whole(budget: int) -> None:
    """Also where a row owes more forced tokens than a step computes."""
    engine = engine_for(model(), parts=PARTS, max_num_batched_tokens=budget, max_num_seqs=7, **ROOMY)
    assert run(engine, asked()) == alone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, LONGEST), (5, 20)])
def test_preempted_equals_undisturbed(dtype: str, block_size: int, num_blocks: int) -> None:
    sizes = {"max_num_seqs": 9, "max_num_batched_tokens": 20, "block_size": block_size, "num_blocks": num_blocks}
    engine = engine_for(model(dtype), parts=PARTS, **sizes)
    assert run(engine, asked()) == alone(dtype)
    assert engine.stats.num_preemptions > 0


def test_preempted_before_every_step_equals_undisturbed() -> None:
    """All that runs loses its state whenever a token is known, so every token comes from a prompt computed anew."""
    engine = engine_for(model(), parts=PARTS, max_num_seqs=12, prefix_caching=False, **ROOMY)
    schedule, owing = engine.scheduler.schedule, 0

    def preempting() -> Any:
        nonlocal owing
        owing += sum(s.generation.constraint is not None and s.num_owed > 1 for s in engine.scheduler.running)
        for sequence in engine.scheduler.running[::-1]:
            engine.scheduler._preempt(sequence)
        return schedule()

    engine.scheduler.schedule = preempting  # type: ignore[method-assign]
    assert run(engine, asked()) == alone()
    assert owing > 5, "some owed forced tokens"


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "int8"), ("bfloat16", "int8"), ("float32", "bfloat16")])
def test_keys_and_values_of_fewer_bits_change_nothing_of_that(dtype: str, kv_dtype: str) -> None:
    sizes = {"max_num_batched_tokens": 20, "max_num_seqs": 9, "block_size": 5, "num_blocks": 22}
    engine = engine_for(model(dtype), parts=PARTS, kv_dtype=kv_dtype, **sizes)
    assert run(engine, asked()) == alone(dtype, kv_dtype=kv_dtype)
    assert engine.stats.num_preemptions > 0


def test_the_reference_kernels_give_the_same_tokens() -> None:
    engine = engine_for(tiny_model(kernels=ReferenceKernels(), vocab_size=VOCAB_SIZE), parts=PARTS, **ROOMY)
    found, expected = run(engine, asked()), alone()
    for key, result in found.items():
        assert [(s.token_ids, s.finish_reason, s.is_complete) for s in result.samples] == [
            (s.token_ids, s.finish_reason, s.is_complete) for s in expected[key].samples
        ]


@pytest.mark.parametrize("overlaps", [False, True], ids=["single", "overlapping"])
@pytest.mark.parametrize("records", [False, True], ids=["launched", "recorded"])
def test_overlapping_steps_and_recordings_change_nothing(overlaps: bool, records: bool) -> None:
    engine = engine_for(model(), parts=PARTS | {"overlaps": overlaps}, max_num_seqs=6, **ROOMY)
    if not records:
        engine.runner.replays = None
    free = [replace(r, params=SamplingParams(max_tokens=30, temperature=1.0)) for r in asked()]
    mixed = [*asked(), *(replace(r, key=2000 + r.key) for r in free)]
    found = run(engine, mixed)
    assert {key: found[key] for key in alone()} == alone()
    assert engine.runner.replays is None or engine.runner.replays.recorded


def test_two_threads_give_the_same_as_one() -> None:
    expected = alone()
    torch.set_num_threads(2)
    assert run(engine_for(model(), parts=PARTS, max_num_batched_tokens=30, **ROOMY), asked()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRAMMARS)
def test_log_probabilities_are_those_of_scoring_the_text_and_change_no_token(name: str, dtype: str) -> None:
    for seed in range(4):
        params = SamplingParams(max_tokens=12 + 9 * seed, temperature=1.0, seed=seed, structured_outputs=grammar(name))
        request = Request(0, (9, 30, 77, 12), params)
        found = run(engine_for(model(dtype), parts=PARTS, **ROOMY), [request])[0]
        scored = replace(request, params=replace(params, logprobs=2))
        told = run(engine_for(model(dtype), parts=PARTS, **ROOMY), [scored])[0]
        assert replace(told, logprobs=None) == found
        text = Request(0, request.prompt_token_ids + found.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=2))
        scores = run(engine_for(model(dtype), **ROOMY), [text])[0].prompt_logprobs
        assert scores is not None
        assert told.logprobs == scores[len(request.prompt_token_ids) - 1 :]


any_policies = given(
    dtype=st.sampled_from(list(DTYPES)),
    block_size=st.integers(1, 20),
    spare=st.integers(0, 30),
    overlaps=st.booleans(),
    sizes=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(1, 80),
            "max_num_seqs": st.integers(1, 12),
            "look_ahead": st.integers(1, 24),
            "prefix_caching": st.booleans(),
            "share_duplicates": st.booleans(),
            "longest_first": st.booleans(),
            "forecast_memory": st.booleans(),
        }
    ),
    order=st.permutations(range(len(asked()))),
)


def check_policies(
    dtype: str, block_size: int, spare: int, overlaps: bool, sizes: dict[str, Any], order: list[int]
) -> None:
    num_blocks = -(-LONGEST // block_size) + spare
    made = PARTS | {"overlaps": overlaps}
    engine = engine_for(model(dtype), num_blocks=num_blocks, block_size=block_size, parts=made, **sizes)
    assert run(engine, [asked()[i] for i in order]) == alone(dtype)


@settings(max_examples=5)
@any_policies
def test_no_policy_changes_a_result(
    dtype: str, block_size: int, spare: int, overlaps: bool, sizes: dict[str, Any], order: list[int]
) -> None:
    check_policies(dtype, block_size, spare, overlaps, sizes, order)


@pytest.mark.slow
@settings(max_examples=200)
@any_policies
def test_no_policy_changes_a_result_at_length(
    dtype: str, block_size: int, spare: int, overlaps: bool, sizes: dict[str, Any], order: list[int]
) -> None:
    check_policies(dtype, block_size, spare, overlaps, sizes, order)


# ---------------------------------------------------------------- resumed


def prefixes(request: Request, result: Result) -> list[Request]:
    """The request with each beginning of its answer, but the whole, from an earlier run."""
    return [replace(request, output_token_ids=result.token_ids[:end]) for end in range(len(result.token_ids))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_goes_on_from_any_token_as_if_undisturbed(dtype: str) -> None:
    """From inside a forced run and from inside free text before a marker too."""
    engine = engine_for(model(dtype), parts=PARTS, share_duplicates=False, **ROOMY)
    resumed = [r for request in asked() for r in prefixes(request, alone(dtype)[request.key])]
    results = list(checked_run(engine, resumed))
    assert len(results) == len(resumed) > 150
    for result in results:
        assert replace(result, timings=Timings()) == alone(dtype)[result.key]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_resumed_row_forces_what_is_left_of_a_run_and_counts_it_once(name: str) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=grammar(name))
    request = Request(0, (9, 30, 77, 12), params)
    whole = engine_for(model(), parts=PARTS, **ROOMY)
    expected = run(whole, [request])[0]
    for resumed in prefixes(request, expected):
        engine = engine_for(model(), parts=PARTS, **ROOMY)
        assert run(engine, [resumed]) == {0: expected}
        num_given = len(resumed.output_token_ids)
        assert engine.stats.num_output_tokens == len(expected.token_ids) - num_given
        assert engine.stats.num_forced_tokens <= whole.stats.num_forced_tokens
        sampled = engine.stats.num_output_tokens - engine.stats.num_forced_tokens
        assert engine.stats.num_logits == sampled <= whole.stats.num_logits

"""What the engine makes of constraints: masks, forced tokens, ends, errors and counts; with constraints of plain lists.

That none of it depends on the batch is shown in ``tests/equivalence``, with real grammars.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from late_device import Device, SomeTokens
from structured import Lists, listed
from tiny_model import checked_run, engine_for, random_requests, tiny_model
from torch import Tensor

from batchgen.core.errors import RowErrorCode
from batchgen.core.records import FinishReason, Request, Result, SamplingParams, Timings
from batchgen.engine import Engine
from batchgen.engine.generation import TextTools

MODEL = tiny_model()
PROMPT = (9, 30, 77, 12, 5)
FREE = list(range(8, 128))
RUN = [[token] for token in (40, 41, 42, 44, 46, 48)]  # nothing but forced tokens


def engine(lists: Lists | None = None, **sizes: Any) -> Engine:
    parts = {"text": TextTools(lambda _: SomeTokens(), lists or Lists())}
    parts |= {name: sizes.pop(name) for name in ("overlaps", "fetch") if name in sizes}
    return engine_for(MODEL, **{"num_blocks": 100, "block_size": 4, "parts": parts} | sizes)


def request(allowed: list[list[int]], key: int = 0, fails: str = "", at: int = 0, **params: Any) -> Request:
    params = {"max_tokens": 30} | params
    return Request(key, PROMPT, SamplingParams(structured_outputs=listed(allowed, fails, at), **params))


def run(made: Engine, asked: Iterable[Request]) -> dict[int, Result]:
    """Results by key; all memory is free afterwards."""
    results = {r.key: r for r in checked_run(made, asked)}
    assert not made.scheduler.has_work
    assert made.scheduler.pool.num_free == made.config.num_blocks
    return results


def untimed(results: dict[int, Result]) -> dict[int, Result]:
    return {key: replace(result, timings=Timings()) for key, result in results.items()}


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 1}, {"repetition_penalty": 1.5}])
def test_each_row_has_the_tokens_that_its_own_constraint_allows(params: dict[str, Any]) -> None:
    """Rows of two tokens per place, no token in two rows, among free ones."""
    asked = []
    for key in range(0, 24, 2):
        own = [8 + 5 * key, 9 + 5 * key]
        asked += [
            request([own] * (3 + key // 2), key, **params),
            Request(key + 1, PROMPT, SamplingParams(max_tokens=9)),
        ]
    results = run(engine(), asked)
    for key in range(0, 24, 2):
        assert set(results[key].first.token_ids) <= {8 + 5 * key, 9 + 5 * key}
        assert len(results[key].first.token_ids) == 3 + key // 2
        assert (results[key].first.finish_reason, results[key].first.is_complete) == (FinishReason.STOP, True)
        assert results[key + 1].first.is_complete is None
        assert results[key + 1].first.token_ids == results[1].first.token_ids


def test_the_likeliest_of_the_allowed_tokens_is_taken() -> None:
    seen: list[Tensor] = []
    made = engine()
    sample = made.sampler.sample

    def recorded(logits: Tensor, sequences: Any, *args: Any) -> Tensor:
        seen.append(logits.clone())
        return sample(logits, sequences, *args)

    made.sampler.sample = recorded  # type: ignore[method-assign]
    allowed = [[20, 31, 57, 99, 127], [8, 64, 65], [12, 13, 14, 15]]
    result = run(made, [request(allowed)])[0]
    for token, row, tokens in zip(result.first.token_ids, seen, allowed, strict=True):
        assert token == max(tokens, key=lambda t: row[0, t].item())


def test_a_mask_is_made_while_the_forward_pass_runs() -> None:
    """On a GPU the device works on what was launched before."""
    order: list[str] = []
    lists = Lists()
    made = engine(lists, overlaps=True, fetch=Device())
    fill, forward = lists.fill, made.runner.run

    def filled(*args: Any) -> None:
        order.append("mask")
        fill(*args)

    def launched(*args: Any) -> Tensor:
        order.append("forward")
        return forward(*args)

    lists.fill, made.runner.run = filled, launched  # type: ignore[method-assign]
    run(made, [request([[50, 51]] * 4)])
    assert order == ["forward", "mask"] * 4


def test_a_mask_without_any_token_is_an_error_row() -> None:
    for params in ({}, {"temperature": 1.0}):
        results = run(engine(), [request([[50, 51], []], **params), request([[50, 51]] * 2, 1)])
        assert results[0].error is not None
        assert results[1].first.is_complete


def test_end_tokens_do_not_reach_the_constraint_and_end_the_row() -> None:
    """Which would take them for text here."""
    made = engine_for(
        MODEL, num_blocks=100, block_size=4, parts={"text": TextTools(None, Lists()), "eos_token_ids": [50, 51]}
    )
    result = run(made, [request([[8, 9], [50, 51]])])[0]
    assert result.error is None
    assert result.first.token_ids[-1] in (50, 51)
    assert (result.first.finish_reason, result.first.is_complete, len(result.first.token_ids)) == (
        FinishReason.STOP,
        False,
        2,
    )


# ---------------------------------------------------------------- forced tokens


def test_forced_tokens_cost_no_step_of_their_own() -> None:
    made = engine()
    result = run(made, [request([[60, 61], *RUN, [70, 71], [80]])])[0]
    assert result.first.token_ids[1:7] == (40, 41, 42, 44, 46, 48)
    assert result.first.token_ids[8] == 80
    stats = made.stats
    assert (stats.num_steps, stats.num_logits, stats.num_output_tokens, stats.num_forced_tokens) == (2, 2, 9, 7)
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (len(PROMPT), 7)


def test_they_follow_whatever_runs_beside() -> None:
    """A full batch leaves none out."""
    asked = [request([[60 + key, 61 + key], *RUN, [70, 71]], key) for key in range(8)]
    made = engine(max_num_seqs=8, max_num_batched_tokens=40, prefix_caching=False)
    results = run(made, asked)
    assert made.stats.max_running == 8
    assert all(r.first.token_ids[1:7] == (40, 41, 42, 44, 46, 48) for r in results.values())
    assert made.stats.num_forced_tokens == 48
    assert made.stats.num_logits == 16


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_is_all_forced_needs_no_step(n: int, temperature: float) -> None:
    made = engine()
    result = run(made, [request(RUN, n=n, temperature=temperature)])[0]
    assert len(result.samples) == n
    for sample in result.samples:
        assert sample.token_ids == (40, 41, 42, 44, 46, 48)
        assert (sample.finish_reason, sample.is_complete) == (FinishReason.STOP, True)
    assert result.timings == Timings()
    assert made.stats.num_steps == 0


def test_a_run_of_such_rows_stops_when_it_is_told_to() -> None:
    made = engine(share_duplicates=False)
    results = []
    for result in made.run(request(RUN, key) for key in range(1000)):
        results.append(result)
        if len(results) == 3:
            made.stop()
    assert len(results) == 3


@pytest.mark.parametrize("given", [0, 1, 5])
def test_a_prompt_is_scored_though_the_text_is_all_forced(given: int) -> None:
    scores = {"prompt_logprobs": 1, "temperature": 1.0}
    asked = replace(request(RUN, **scores), output_token_ids=(40, 41, 42, 44, 46, 48)[:given])
    free = Request(0, PROMPT, SamplingParams(max_tokens=1, **scores))
    result = run(engine(), [asked])[0]
    assert result.first.token_ids == (40, 41, 42, 44, 46, 48)
    assert result.prompt_logprobs == run(engine(), [free])[0].prompt_logprobs


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("room", range(1, 10))
@pytest.mark.parametrize("what", ["max_tokens", "context"])
def test_a_limit_ends_a_row_inside_a_forced_run(what: str, room: int, begins: int) -> None:
    allowed = [*[[60, 61]] * begins, *RUN, [70, 71]]
    whole = run(engine(), [request(allowed)])[0].first.token_ids
    params, sizes = ({"max_tokens": room}, {}) if what == "max_tokens" else ({}, {"max_model_len": len(PROMPT) + room})
    result = run(engine(**sizes), [request(allowed, **params)])[0]
    assert result.first.token_ids == whole[:room]
    assert result.first.is_complete == (room >= len(allowed))
    assert result.first.finish_reason == (FinishReason.STOP if room >= len(allowed) else FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("forced", "stops", "ends", "is_complete"),
    [
        ([40, 41, 45, 46], {"stop": ("any",)}, (40, 41, 45), False),  # ``SomeTokens`` stops at tokens of 5 modulo 8
        ([40, 45], {"stop": ("any",)}, (40, 45), False),  # the stop string is not part of a text
        ([40, 41, 42, 44], {"stop_token_ids": (42,)}, (40, 41, 42), False),
        ([40, 41, 42], {"stop_token_ids": (42,)}, (40, 41, 42), True),
    ],
)
def test_a_stop_ends_a_row_inside_a_forced_run_and_at_its_end(
    forced: list[int], stops: dict[str, Any], ends: tuple[int, ...], is_complete: bool
) -> None:
    found = run(engine(), [request([[60, 62], *([token] for token in forced)], **stops)])[0].first
    assert (found.token_ids[1:], found.finish_reason, found.is_complete) == (ends, FinishReason.STOP, is_complete)
    assert found.stop == stops.get("stop", (None,))[0]


def test_forced_tokens_count_where_others_do() -> None:
    """In penalties, and in loops that a chosen token goes on with; the constraint's own repetition is no loop."""
    seen = [[60, 61], [50], [50], [50], [50, 51]]
    plain = run(engine(), [request(seen, temperature=0.0)])[0].first.token_ids[-1]
    other = {50: 51, 51: 50}[plain]
    pushed = [[60, 61], [plain], [plain], [plain], [50, 51]]
    assert run(engine(), [request(pushed, frequency_penalty=2.0, presence_penalty=2.0)])[0].first.token_ids[-1] == other
    for logprobs in (None, 0):
        params = {"max_repeats": 3, "logprobs": logprobs}
        again = run(engine(), [request([*seen[:4], [plain], [plain, other]], **params)])[0]
        assert (again.first.finish_reason, len(again.first.token_ids)) == (FinishReason.STOP, 6)
        params["logit_bias"] = ((50, 100.0),)
        chosen = run(engine(), [request([*seen[:3], [50, 51], [70]], **params)])[0]
        assert (chosen.first.finish_reason, len(chosen.first.token_ids)) == (FinishReason.REPETITION, 4)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"logprobs": 1}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize(
    ("fails", "at"), [("begin", 0), ("push", 0), ("push", 3), ("push", 7), ("fill", 0), ("fill", 7)]
)
def test_a_failing_constraint_is_an_error_row_and_harms_no_other(fails: str, at: int, params: dict[str, Any]) -> None:
    allowed = [[60, 61], *RUN, [70, 71], [72, 73]]
    others = random_requests(8, seed=3, prompt=(1, 20), params=SamplingParams(temperature=1.0))
    asked = [request(allowed, 100, fails, at, **params), *others, request(allowed, 101, fails, at, **params)]
    expected = untimed(run(engine(), others))
    for sizes in ({}, {"num_blocks": 44, "block_size": 1, "max_num_seqs": 5, "overlaps": True, "fetch": Device()}):
        results = untimed(run(engine(**sizes), asked))
        for key in (100, 101):
            error = results.pop(key).error
            assert error is not None
            assert error.code == RowErrorCode.BAD_PARAM
            assert error.message.startswith("structured_outputs: no ")
        assert results == expected


def test_one_that_fails_before_its_first_token_needs_no_step() -> None:
    made = engine()
    results = run(made, [request([[60, 61]], fails="begin", n=3, temperature=1.0), request(RUN, 1, "push", 2)])
    assert [results[key].error is not None for key in (0, 1)] == [True, True]
    assert made.stats.num_steps == 0


def test_tokens_of_an_earlier_run_that_the_constraint_does_not_allow_are_an_error_row() -> None:
    results = run(engine(), [replace(request([[60, 61], *RUN]), output_token_ids=(60, 99)), request(RUN, 1)])
    assert results[0].error is not None
    assert results[0].error.code == RowErrorCode.BAD_PARAM
    assert results[1].first.is_complete


# ---------------------------------------------------------------- times and counts


def test_times_of_rows_with_forced_tokens_add_up() -> None:
    """The first token counts from submission, forced or not; what is forced behind it counts as generated."""
    asked = [request([*RUN, [60, 61], *RUN, [70, 71]], key) for key in range(3)]
    for result in run(engine(share_duplicates=False, max_num_batched_tokens=4), asked).values():
        times = result.timings
        assert times.total_s >= times.ttft_s >= times.queue_s >= 0
        assert times.prefill_s > 0
        assert times.tpot_s == pytest.approx(times.decode_s / 13)
        assert times.total_s == pytest.approx(times.queue_s + times.prefill_s + times.decode_s)


def test_every_computed_token_is_counted_once() -> None:
    rows = [request([FREE, *RUN, FREE, FREE, *RUN[:key]], key, temperature=1.0) for key in range(6)]
    asked = [*rows, *random_requests(6, seed=3)]
    asked = [replace(r, key=key) for key, r in enumerate(asked)]
    made = engine(max_num_batched_tokens=7, prefix_caching=False)
    results = run(made, asked)
    stats = made.stats
    assert stats.num_preemptions == 0
    assert stats.num_output_tokens == sum(len(r.first.token_ids) for r in results.values())
    assert stats.num_logits == stats.num_output_tokens - stats.num_forced_tokens
    assert stats.num_prefill_tokens == sum(len(r.prompt_token_ids) for r in asked)
    unneeded = [1 + key if key < 6 else 1 for key in results]  # the last token that was sampled and all behind it
    assert stats.num_decode_tokens == stats.num_output_tokens - sum(unneeded)


def test_tokens_of_earlier_runs_and_those_computed_again_count_as_prefill() -> None:
    asked = [request([FREE, *RUN, FREE, *RUN, FREE], key, temperature=1.0) for key in range(6)]
    whole = run(engine(), asked)
    resumed = [replace(r, output_token_ids=whole[r.key].first.token_ids[: 2 * r.key + 1]) for r in asked]
    made = engine(num_blocks=40, block_size=1, prefix_caching=False)
    assert untimed(run(made, resumed)) == untimed(whole)
    stats = made.stats
    assert stats.num_recomputed_tokens > 0
    given = sum(len(r.prompt_token_ids) + len(r.output_token_ids) for r in resumed)
    assert stats.num_prefill_tokens == given + stats.num_recomputed_tokens
    assert stats.num_decode_tokens == stats.num_output_tokens - len(asked)

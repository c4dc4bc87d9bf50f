"""A sequence by itself: what it owes, when it ends, its times, and what its observers see."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_model import token_counts

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import FinishReason, Request, SamplingParams, Timings
from batchgen.engine.generation import TextTools
from batchgen.engine.observers import MAX_PERIOD, LoopDetector, Stop
from batchgen.engine.sequence import RequestState, Sequence

EOS = frozenset({7, 2})


def sequence(output: tuple[int, ...] = (), prompt: int = 4, **params: object) -> Sequence:
    return RequestState(Request(3, tuple(range(10, 10 + prompt)), SamplingParams(**params), output)).sequences[0]  # type: ignore[arg-type]


def reason(output: tuple[int, ...], max_model_len: int = 1000, **params: object) -> FinishReason | None:
    """Why the last token of an output ends its sequence."""
    generation = sequence(output, **params).generation
    generation.begin(TextTools(), 1000, EOS, max_model_len, counts=False)
    return generation.finish_reason


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ((50,), {}, None),
        ((50, 7), {}, FinishReason.STOP),
        ((50, 2), {}, FinishReason.STOP),
        ((7, 50), {}, FinishReason.STOP),  # what follows is of a chat's next turn
        ((50, 7), {"ignore_eos": True}, None),
        ((50,), {"stop_token_ids": (50,)}, FinishReason.STOP),
        ((50,), {"stop_token_ids": (50,), "ignore_eos": True}, FinishReason.STOP),
        ((50, 7), {"min_tokens": 2}, FinishReason.STOP),
        ((50, 7), {"min_tokens": 3}, None),
        ((50,), {"min_tokens": 2, "stop_token_ids": (50,)}, None),
        ((50, 51), {"max_tokens": 2}, FinishReason.LENGTH),
        ((50, 7), {"max_tokens": 2}, FinishReason.STOP),
        ((50, 7), {"max_tokens": 2, "ignore_eos": True}, FinishReason.LENGTH),
        ((50, 51, 52), {"max_tokens": 2}, FinishReason.LENGTH),
    ],
    ids=str,
)
def test_why_a_sequence_ends(output: tuple[int, ...], params: dict[str, object], expected: FinishReason | None) -> None:
    assert reason(output, **params) == expected


def test_a_full_context_ends_a_sequence() -> None:
    assert reason((50,), max_model_len=6) is None
    assert reason((50, 51), max_model_len=6) == FinishReason.LENGTH
    assert reason((50, 7), max_model_len=6) == FinishReason.STOP


def test_what_a_sequence_owes_is_derived_from_what_is_computed() -> None:
    fresh = sequence()
    assert (fresh.num_owed, fresh.num_output_tokens, fresh.max_new_tokens) == (4, 0, 256)
    fresh.num_computed_tokens = 4
    fresh.generation.append(60, 101.0)
    assert (fresh.num_owed, fresh.num_output_tokens, fresh.max_new_tokens) == (1, 1, 255)
    fresh.num_computed_tokens = 0  # preempted
    assert fresh.num_owed == 5
    resumed = sequence((50, 51), max_tokens=3)
    assert (resumed.num_owed, resumed.num_output_tokens, resumed.max_new_tokens) == (6, 2, 1)


@pytest.mark.parametrize(
    ("given", "ended_at", "times"),
    [
        (0, (102.0, 103.0, 104.0), {"prefill_s": 0.5, "decode_s": 2.0, "ttft_s": 2.0, "tpot_s": 1.0, "total_s": 4.0}),
        (100, (102.0, 103.0, 104.0), {"prefill_s": 0.5, "decode_s": 2.0, "ttft_s": 2.0, "tpot_s": 1.0, "total_s": 4.0}),
        (0, (102.0,), {"prefill_s": 0.5, "ttft_s": 2.0, "total_s": 2.0}),
    ],
    ids=["three tokens", "three after those of another run", "one token, without time per further token"],
)
def test_times_add_up(given: int, ended_at: tuple[float, ...], times: dict[str, float]) -> None:
    done = sequence((50,) * given, max_tokens=given + 3)
    done.first_scheduled_at = 101.5
    for at in ended_at:
        done.generation.append(60, at)
    done.num_preemptions = 2
    done.generation.end(ended_at[-1])
    done.state.submitted_at = 100.0
    result = done.state.result()
    assert (result.key, result.num_prompt_tokens, result.first.token_ids[given:]) == (3, 4, (60,) * len(ended_at))
    assert result.timings == Timings(queue_s=1.5, preemptions=2, **times)


def test_a_refused_request_has_no_times() -> None:
    error = RowError(RowErrorCode.TOO_LONG, "too long")
    group = sequence().state
    group.refusal = error
    result = group.result()
    assert result.error is error
    assert result.timings == Timings()
    assert result.samples == ()


# ---------------------------------------------------------------- observers


LOOP = Stop(FinishReason.REPETITION)
TOKENS = st.lists(st.integers(0, 30), max_size=40)


def ends_in_a_loop(tokens: list[int], max_repeats: int) -> bool:
    """Whether the newest tokens are one run, ``max_repeats`` times over."""
    for period in range(1, min(MAX_PERIOD, len(tokens) // max_repeats) + 1):
        if tokens[-period * max_repeats :] == tokens[-period:] * max_repeats:
            return True
    return False


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 5)), max_size=8),
    max_repeats=st.integers(2, 5),
)
def test_a_loop_is_noticed_exactly_where_it_is_defined(parts: list[tuple[list[int], int]], max_repeats: int) -> None:
    watch, tokens = LoopDetector(max_repeats), []
    for run, times in parts:
        for token in run * times:
            tokens.append(token)
            assert (watch.push(token) == LOOP) == ends_in_a_loop(tokens, max_repeats), tokens


@pytest.mark.parametrize(("period", "is_loop"), [(MAX_PERIOD - 1, True), (MAX_PERIOD, True), (MAX_PERIOD + 1, False)])
def test_the_longest_run_that_counts(period: int, is_loop: bool) -> None:
    watch = LoopDetector(3)
    seen = [watch.push(token) == LOOP for token in [*range(period)] * 3]
    assert seen == [False] * (3 * period - 1) + [is_loop]


@example([], list(range(65)))
@given(prompt=TOKENS, output=st.lists(st.integers(0, 300), max_size=200))
def test_counts_are_those_of_the_output_and_0_for_the_rest_of_the_prompt(prompt: list[int], output: list[int]) -> None:
    counts = token_counts(prompt, output)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: Counter(output)[token] for token in {*prompt, *output}
    }

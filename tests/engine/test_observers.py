"""Observers of single sequences: loops against a definition that looks at everything, token counts against a count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import token_counts

from batchgen.core.records import FinishReason
from batchgen.engine.observers import MAX_PERIOD, LoopDetector, Stop

LOOP = Stop(FinishReason.REPETITION)
TOKENS = st.lists(st.integers(0, 30), max_size=40)


def ends_in_a_loop(tokens: list[int], max_repeats: int) -> bool:
    """Whether the newest tokens are one run, ``max_repeats`` times over."""
    for period in range(1, min(MAX_PERIOD, len(tokens) // max_repeats) + 1):
        if tokens[-period * max_repeats :] == tokens[-period:] * max_repeats:
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 5)), max_size=8),
    max_repeats=st.integers(2, 5),
)
def test_a_loop_is_noticed_exactly_where_the_definition_sees_one(
    parts: list[tuple[list[int], int]], max_repeats: int
) -> None:
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


@given(prompt=TOKENS, output=st.lists(st.integers(0, 300), max_size=200))
def test_counts_are_those_of_the_output_and_0_for_the_rest_of_the_prompt(prompt: list[int], output: list[int]) -> None:
    counts = token_counts(prompt, output)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: Counter(output)[token] for token in {*prompt, *output}
    }


@pytest.mark.parametrize("num_distinct", [31, 32, 33, 64, 65])
def test_counts_grow_beyond_the_room_they_start_with(num_distinct: int) -> None:
    counts = token_counts([], range(num_distinct))
    assert counts.ids.tolist() == list(range(num_distinct))
    assert counts.counts.tolist() == [1.0] * num_distinct

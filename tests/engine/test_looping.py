"""Loops are noticed with the very token that completes them, against a definition that looks at everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.looping import MAX_PERIOD, LoopWatch


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
    watch, tokens = LoopWatch(max_repeats), []
    for run, times in parts:
        for token in run * times:
            tokens.append(token)
            assert watch.push(token) == ends_in_a_loop(tokens, max_repeats), tokens


@pytest.mark.parametrize(("period", "is_loop"), [(MAX_PERIOD - 1, True), (MAX_PERIOD, True), (MAX_PERIOD + 1, False)])
def test_the_longest_run_that_counts(period: int, is_loop: bool) -> None:
    watch = LoopWatch(3)
    seen = [watch.push(token) for token in [*range(period)] * 3]
    assert seen == [False] * (3 * period - 1) + [is_loop]

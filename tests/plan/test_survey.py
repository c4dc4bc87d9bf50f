"""Streams summarized in bounded memory: repeats counted by hash, and random samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.survey import RepeatCounter, Reservoir


@given(st.lists(st.integers(0, 100), max_size=300))
def test_repeats_are_exact_below_the_bound(items: list[int]) -> None:
    counter = RepeatCounter()
    for item in items:
        counter.add(hash(("item", item)), weight=item + 1)
    weight = sum(item + 1 for item in items) - sum(item + 1 for item in set(items))
    assert (counter.num_repeated, counter.repeated_weight) == (len(items) - len(set(items)), weight)
    assert counter.is_exact


def test_beyond_the_bound_repeats_are_at_least_those_of_the_remembered_items() -> None:
    counter = RepeatCounter(max_hashes=1000)
    for item in range(4000):
        counter.add(hash((item % 2000, "spread")), weight=3)
    assert not counter.is_exact
    assert (counter.num_repeated, counter.repeated_weight) == (1000, 3000)  # of 2000


def test_a_sample_is_the_whole_stream_while_that_is_small_and_uniform_after() -> None:
    def sample(count: int) -> list[int]:
        reservoir: Reservoir[int] = Reservoir(100)
        for item in range(count):
            reservoir.add(item)
        return reservoir.items

    assert sample(100) == list(range(100))
    many = sample(10_000)
    assert len(many) == 100
    assert sum(many) / 100 == pytest.approx(5_000, rel=0.2)

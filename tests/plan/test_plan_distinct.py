"""Counting repeats by hashes: exact while they are few, close when they are many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.distinct import Distinct


@given(st.lists(st.integers(0, 100), max_size=300))
def test_repeats_are_exact_below_the_bound(items: list[int]) -> None:
    distinct = Distinct()
    for item in items:
        distinct.add(hash(("item", item)), weight=item + 1)
    weight = sum(item + 1 for item in items) - sum(item + 1 for item in set(items))
    assert distinct.repeated() == (len(items) - len(set(items)), weight)
    assert distinct.is_exact


def test_beyond_the_bound_memory_stays_and_the_estimate_is_close() -> None:
    distinct = Distinct(max_kept=1000)
    for item in range(40_000):
        distinct.add(hash((item % 20_000, "spread")), weight=3)
    repeated, weight = distinct.repeated()
    assert not distinct.is_exact
    assert abs(repeated - 20_000) < 3_000
    assert abs(weight - 60_000) < 9_000


def test_asking_twice_gives_the_same_answer() -> None:
    distinct = Distinct()
    for item in (1, 2, 1):
        distinct.add(item)
    assert distinct.repeated() == distinct.repeated() == (1, 1)

"""Percentiles, histograms and the largest items of a stream, against the whole stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.distribution import Distribution, Largest, percentile


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], percent: int) -> None:
    counts = [(value, values.count(value)) for value in sorted(set(values))]
    found = percentile(counts, len(values), percent)
    assert found == next(v for v, _ in counts if 100 * sum(w <= v for w in values) >= percent * len(values))


def test_no_values_have_no_percentile() -> None:
    assert Distribution().percentiles() == {"p50": None, "p90": None, "p99": None}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1))
def test_percentiles_of_a_distribution_are_right_within_one_percent(values: list[float]) -> None:
    distribution = Distribution()
    for value in [0.0, *values]:
        distribution.add(value)
    exact = sorted([0.0, *values])
    for percent in (50, 90, 99):
        right = exact[-(-len(exact) * percent // 100) - 1]
        assert abs(distribution.percentiles()[f"p{percent}"] - right) <= 0.0051 * right + 1e-6


def test_a_histogram_counts_every_value_once() -> None:
    distribution = Distribution()
    for value in range(1, 2000):
        distribution.add(value)
    histogram = distribution.histogram()
    assert sum(histogram["counts"]) == 1999
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1 <= 31
    assert histogram["edges"][0] <= 1
    assert histogram["edges"][-1] >= 1999


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_the_largest_are_kept_and_of_equal_ones_the_first(keys: list[int], limit: int) -> None:
    largest: Largest[int] = Largest(limit)
    for place, key in enumerate(keys):
        largest.add(key, place)
    assert largest.items() == sorted(range(len(keys)), key=lambda place: -keys[place])[:limit]

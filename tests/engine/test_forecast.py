"""What running sequences will still need: the peak against a simulation, the expectation against its definition."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.records import Request, SamplingParams
from batchgen.engine.forecast import OutputLengths, PromptTrend, peak_tokens
from batchgen.engine.sequence import Group, Sequence


def simulated_peak(held: list[int], more: list[int], block_size: int) -> int:
    """Step by step: all that are not done yet have grown by one a step; those that are done hold nothing."""
    return max(
        sum(now + step + block_size // 2 for now, coming in zip(held, more, strict=True) if coming >= step)
        for step in range(max(more, default=0) + 1)
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12), st.integers(1, 32))
def test_the_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]], block_size: int) -> None:
    held, more = [now for now, _ in sequences], [coming for _, coming in sequences]
    assert peak_tokens(held, more, block_size) == simulated_peak(held, more, block_size)


def sequence(output: int = 0, max_tokens: int = 1000, *, ignore_eos: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Group(Request(0, (1, 2), params, (9,) * output)).sequences[0]


def seen(lengths: list[int]) -> OutputLengths:
    found = OutputLengths()
    for length in lengths:
        found.add(length)
    return found


def test_the_most_is_expected_until_enough_have_ended() -> None:
    lengths = seen([5] * 31)
    assert lengths.expected_more(sequence()) == 1000
    lengths.add(5)
    assert lengths.expected_more(sequence()) == 5


def test_a_sequence_that_ignores_end_tokens_comes_to_its_end() -> None:
    assert seen([5] * 100).expected_more(sequence(output=3, ignore_eos=True)) == 997


@pytest.mark.parametrize("ends", [{"stop": (".",)}, {"stop_token_ids": (3,)}, {"max_repeats": 4}], ids=str)
def test_a_sequence_that_ignores_end_tokens_but_may_end_otherwise_is_expected_to(ends: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1000, ignore_eos=True, **ends)
    assert seen([5] * 100).expected_more(Group(Request(0, (1, 2), params)).sequences[0]) == 5


def test_what_is_expected_is_never_more_than_what_may_come() -> None:
    assert seen([500] * 100).expected_more(sequence(output=3, max_tokens=10)) == 7
    assert seen([5] * 100).expected_more(sequence(output=10, max_tokens=10)) == 0


def test_a_sequence_longer_than_all_that_ended_may_go_on_to_the_last() -> None:
    assert seen([5] * 100).expected_more(sequence(output=5)) == 995


@given(st.lists(st.integers(0, 60), min_size=32, max_size=80), st.integers(0, 70))
def test_the_expectation_is_the_mean_of_those_that_went_further(lengths: list[int], output: int) -> None:
    longer = [length for length in lengths if length > output]
    expected = round(sum(longer) / len(longer)) - output if longer else 1000 - output
    assert seen(lengths).expected_more(sequence(output)) == expected


def test_only_the_last_512_count() -> None:
    lengths = seen([900, 3] * 300 + [10] * 510)
    assert lengths.expected_more(sequence(output=5)) == round((900 + 510 * 10) / 511) - 5
    lengths.add(10)
    assert lengths.expected_more(sequence(output=5)) == 5


def trend_of(ended: list[tuple[int, int]]) -> PromptTrend:
    trend = PromptTrend()
    for prompt, length in ended:
        trend.add(prompt, length)
    return trend


def test_a_trend_is_seen_once_enough_have_ended() -> None:
    ended = [(n, 3 * n) for n in range(32)]
    assert not trend_of(ended[:31]).is_rising
    assert trend_of(ended).is_rising


def test_a_trend_is_judged_anew_each_time_the_ended_have_doubled() -> None:
    ended = [(n, n) for n in range(32)] + [(n, 500 - n) for n in range(32)]
    assert trend_of(ended[:63]).is_rising
    assert not trend_of(ended).is_rising


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=32, max_size=32))
def test_a_trend_is_a_correlation_above_two_standard_errors(ended: list[tuple[int, int]]) -> None:
    prompts, lengths = zip(*ended, strict=True)
    varies = len(set(prompts)) > 1 and len(set(lengths)) > 1
    correlation = statistics.correlation(prompts, lengths) if varies else 0.0
    if abs(correlation - 2 / math.sqrt(32)) > 1e-9:
        assert trend_of(ended).is_rising == (correlation > 2 / math.sqrt(32))

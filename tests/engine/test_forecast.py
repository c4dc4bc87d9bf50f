"""The forecast of KV memory: what is expected of running sequences, and the peak that follows from it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate import one_step

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import forecast
from batchgen.engine.forecast import MemoryForecast, OutputLengths, peak_tokens
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState, Sequence
from batchgen.engine.sizes import SchedulerConfig


def simulated_peak(held: list[int], more: list[int], block_size: int) -> int:
    """Step by step: all that are not done yet have grown by one a step; those that are done hold nothing."""
    return max(
        sum(now + step + block_size // 2 for now, coming in zip(held, more, strict=True) if coming >= step)
        for step in range(max(more, default=0) + 1)
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12), st.integers(1, 32))
def test_the_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]], block_size: int) -> None:
    held, more = [now for now, _ in sequences], [coming for _, coming in sequences]
    rows = sorted((-coming, now + block_size // 2) for now, coming in sequences)
    assert peak_tokens(np.array(rows, dtype=np.int64).reshape(-1, 2).T) == simulated_peak(held, more, block_size)


def running(output: int = 0, max_tokens: int = 1000, *, ignore_eos: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return RequestState(Request(0, (1, 2), params, (9,) * output)).sequences[0]


def seen(lengths: list[int]) -> OutputLengths:
    found = OutputLengths()
    for length in lengths:
        found.add(length)
    return found


def test_a_sequence_that_may_fill_the_context_is_expected_to_double() -> None:
    for lengths, output, more in (([], 0, 1024), ([], 900, 900), ([5] * 100, 600, 600), ([5] * 100, 6, 1018)):
        assert seen(lengths).expected_more(running(output, max_tokens=100_000)) == more
    assert seen([]).expected_more(running(max_tokens=100_000, ignore_eos=True)) == 100_000


def test_sequences_that_may_fill_the_context_run_side_by_side() -> None:
    scheduler = Scheduler(SchedulerConfig(512, 64, 16, 20_000 // 16, 20_000))
    for key in range(40):
        params = SamplingParams(max_tokens=20_000)
        scheduler.add(RequestState(Request(key, (key, *range(100, 120)), params)).sequences[0])
    for _ in range(3):
        one_step(scheduler)
    assert len(scheduler.running) > 10
    while scheduler.has_work:  # and those that grow and grow are preempted, not stuck
        one_step(scheduler, lambda s: s.num_output_tokens >= 20 * (s.request.key + 1))
    assert len(scheduler.lengths._recent) == 40


def test_the_most_is_expected_until_enough_have_ended() -> None:
    lengths = seen([5] * 31)
    assert lengths.expected_more(running()) == 1000
    lengths.add(5)
    assert lengths.expected_more(running()) == 5


def test_a_sequence_that_ignores_end_tokens_comes_to_its_end() -> None:
    assert seen([5] * 100).expected_more(running(output=3, ignore_eos=True)) == 997


@pytest.mark.parametrize("ends", [{"stop": (".",)}, {"stop_token_ids": (3,)}, {"max_repeats": 4}], ids=str)
def test_a_sequence_that_ignores_end_tokens_but_may_end_otherwise_is_expected_to(ends: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1000, ignore_eos=True, **ends)
    assert seen([5] * 100).expected_more(RequestState(Request(0, (1, 2), params)).sequences[0]) == 5


def test_what_is_expected_is_never_more_than_what_may_come() -> None:
    assert seen([500] * 100).expected_more(running(output=3, max_tokens=10)) == 7
    assert seen([5] * 100).expected_more(running(output=10, max_tokens=10)) == 0


@given(st.lists(st.integers(0, 60), min_size=32, max_size=80), st.integers(0, 70))
def test_the_expectation_is_the_mean_of_those_that_went_further(lengths: list[int], output: int) -> None:
    longer = [length for length in lengths if length > output]
    expected = round(sum(longer) / len(longer)) - output if longer else 1000 - output
    assert seen(lengths).expected_more(running(output)) == expected


def test_only_the_last_512_count() -> None:
    lengths = seen([900, 3] * 300 + [10] * 510)
    assert lengths.expected_more(running(output=5)) == round((900 + 510 * 10) / 511) - 5
    lengths.add(10)
    assert lengths.expected_more(running(output=5)) == 5


def plain_peak_blocks(scheduler: Scheduler, newcomer: Sequence, prefix: list[int]) -> int:
    """The forecast in its plain form: everything is looked up anew, and the peak is played out."""
    pool, size, lengths = scheduler.pool, scheduler.config.block_size, scheduler.lengths
    own = [sum(pool.num_holders[block] == 1 for block in s.block_table) for s in scheduler.running]
    shared = pool.num_blocks - pool.num_free + pool.num_unused(prefix) - sum(own)
    rows = [(s.num_tokens - (len(s.block_table) - n) * size, s) for s, n in zip(scheduler.running, own, strict=True)]
    rows.append((newcomer.num_tokens - len(prefix) * size, newcomer))
    more = [lengths.expected_more(s) for _, s in rows]
    return shared - -simulated_peak([now for now, _ in rows], more, size) // size


STEMS = [tuple(range(start, start + 20)) for start in (100, 200, 300)]


@pytest.mark.parametrize("seed", range(12))
def test_the_forecast_of_an_admission_is_the_plain_formula(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, num_asked, known = random.Random(seed), [0], MemoryForecast.peak_blocks
    monkeypatch.setattr(forecast, "_UNKNOWN", 6 if seed % 2 else 1024)
    config = SchedulerConfig(24, 8, 4, rng.choice([16, 20, 24]), 1000, prefix_caching=bool(seed % 3))
    scheduler = Scheduler(config)
    for key in range(80):
        params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.3)
        prompt = (*rng.choice([(), *STEMS]), *(400 + 20 * key + i for i in range(rng.randint(1, 12))))
        sequence = RequestState(Request(key, prompt, params)).sequences[0]
        assert scheduler.refusal(sequence) is None
        scheduler.add(sequence)

    def checked(known_of: MemoryForecast, newcomer: Sequence, prefix: list[int]) -> int:
        found = known(known_of, newcomer, prefix)
        assert found == plain_peak_blocks(scheduler, newcomer, prefix)
        num_asked[0] += 1
        return found

    monkeypatch.setattr(MemoryForecast, "peak_blocks", checked)
    while scheduler.has_work:
        one_step(scheduler, lambda s: rng.random() < 0.1)
    assert num_asked[0] > 50
    assert not seed % 3 or scheduler.num_cached_tokens, "blocks are shared"


@pytest.mark.parametrize("num_stems", [0, 3], ids=["alone", "behind blocks of one holder"])
def test_an_admission_looks_at_the_running_sequences_once(num_stems: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, num_looks, num_asked = Scheduler(SchedulerConfig(64, 64, 4, 60, 1000)), [0], [0]
    all_known, peak = OutputLengths.expected_ends, MemoryForecast.peak_blocks

    def counted(self: OutputLengths, *given: Any) -> np.ndarray:
        num_looks[0] += 1
        return all_known(self, *given)

    def asked(self: MemoryForecast, *given: Any) -> int:
        num_asked[0] += 1
        return peak(self, *given)

    monkeypatch.setattr(OutputLengths, "expected_ends", counted)
    monkeypatch.setattr(MemoryForecast, "peak_blocks", asked)
    for length in [2] * 40:
        scheduler.lengths.add(length)
    for key in range(40):
        stem = (key % num_stems,) * 4 if num_stems else ()
        scheduler.add(RequestState(Request(key, (*stem, key, 1, 2), SamplingParams(max_tokens=60))).sequences[0])
        if key + 1 == num_stems:
            one_step(scheduler)
            num_looks[0] = num_asked[0] = 0
    one_step(scheduler)
    assert num_asked[0] > 10
    assert num_looks == [1]

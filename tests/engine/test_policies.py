"""What the scheduler's policies are for: few recomputed tokens when memory is short, and short tails. No model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate import DISTRIBUTIONS, GPU, Played, config_of, play, related_rows, rows_of

KINDS = list(DISTRIBUTIONS)


@pytest.mark.parametrize("longest_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_end_and_every_token_is_computed_once(kind: str, longest_first: bool) -> None:
    rows = rows_of(kind, 60)
    played = play(config_of(64, 8, num_blocks=400, longest_first=longest_first), rows, check=True)
    assert played.num_ended == 60
    assert played.num_tokens == sum(row.prompt + row.output - 1 for row in rows)
    assert played.num_preemptions == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_longest_first_takes_no_more_steps_than_order_of_arrival(kind: str, seed: int) -> None:
    rows = rows_of(kind, 80, seed=seed)
    by_length, by_arrival = (play(config_of(64, 16, longest_first=on), rows) for on in (True, False))
    assert by_length.steps <= by_arrival.steps
    assert by_length.tail_s <= by_arrival.tail_s + 1e-9


@pytest.mark.parametrize("max_tokens", [0, 400], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("kind", ["uniform", "exponential", "GSM8K-like"])
def test_a_job_of_five_times_the_memory_recomputes_less_than_one_token_in_twenty(kind: str, max_tokens: int) -> None:
    """64 slots would hold five times as many tokens, on the mean at half of their length, as the pool."""
    rows = [row for row in rows_of(kind, 600, seed=1, max_tokens=max_tokens) if row.output <= 400][:500]
    wanted = 64 * sum(row.prompt + row.output / 2 for row in rows) / len(rows)
    num_blocks = int(wanted / 5 / 32)
    played = play(config_of(256, 64, num_blocks=num_blocks), rows)
    assert played.num_ended == 500
    assert played.num_recomputed < 0.05 * played.num_tokens


def both_ways(correlation: float, seed: int) -> tuple[Played, Played]:
    """150 rows of unknown lengths on 8 slots: with what is learnt of them, and in order of arrival."""
    rows = related_rows(150, correlation, seed=seed)
    learnt, arrival = (play(config_of(64, 8, longest_first=on), rows) for on in (True, False))
    return learnt, arrival


@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_where_longer_prompts_have_longer_answers_learning_it_saves_time(correlation: float) -> None:
    played = [both_ways(correlation, seed) for seed in range(8)]
    assert sum(learnt.steps for learnt, _ in played) < 0.98 * sum(arrival.steps for _, arrival in played)
    assert sum(learnt.seconds for learnt, _ in played) < 0.99 * sum(arrival.seconds for _, arrival in played)


def test_where_prompts_say_nothing_of_answers_the_order_is_nearly_always_that_of_arrival() -> None:
    played = [both_ways(0.0, seed) for seed in range(8)]
    assert sum(learnt == arrival for learnt, arrival in played) >= 7
    assert sum(learnt.seconds for learnt, _ in played) < 1.005 * sum(arrival.seconds for _, arrival in played)


def test_where_longer_prompts_have_shorter_answers_the_order_is_that_of_arrival() -> None:
    assert all(learnt == arrival for learnt, arrival in (both_ways(-0.5, seed) for seed in range(3)))


def test_learning_the_lengths_preempts_little_where_memory_is_short() -> None:
    rows = related_rows(500, 0.5, seed=1)
    wanted = 64 * sum(row.prompt + row.output / 2 for row in rows) / len(rows)
    played = play(config_of(256, 64, num_blocks=int(wanted / 3 / 32)), rows)
    assert played.num_ended == 500
    assert played.num_recomputed < 0.05 * played.num_tokens


@pytest.mark.parametrize("max_tokens", [0, 1001], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("kind", ["uniform", "exponential", "GSM8K-like"])
def test_on_a_gpu_batches_of_short_rows_take_far_less_time_and_lose_none(kind: str, max_tokens: int) -> None:
    rows = rows_of(kind, 600, max_tokens=max_tokens)
    one_by_one = config_of(8192, 64, num_blocks=40_000)
    played, before = (play(replace(one_by_one, admits_in_batches=on), rows, GPU) for on in (True, False))
    assert (played.num_ended, played.num_tokens) == (before.num_ended, before.num_tokens)
    assert played.seconds < (0.7 if max_tokens else 0.9) * before.seconds
    assert played.steps < 1.1 * before.steps

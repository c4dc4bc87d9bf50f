"""What the scheduler's policies are for: few recomputed tokens when memory is short, and short tails. No model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate import DISTRIBUTIONS, GPU, config_of, play, rows_of

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


@pytest.mark.parametrize("max_tokens", [0, 1001], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("kind", ["uniform", "exponential", "GSM8K-like"])
def test_on_a_gpu_batches_of_short_rows_take_far_less_time_and_lose_none(kind: str, max_tokens: int) -> None:
    rows = rows_of(kind, 600, max_tokens=max_tokens)
    one_by_one = config_of(8192, 64, num_blocks=40_000)
    played, before = (play(replace(one_by_one, admits_in_batches=on), rows, GPU) for on in (True, False))
    assert (played.num_ended, played.num_tokens) == (before.num_ended, before.num_tokens)
    assert played.seconds < (0.7 if max_tokens else 0.9) * before.seconds
    assert played.steps < 1.1 * before.steps

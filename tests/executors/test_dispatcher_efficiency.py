"""A job on many workers in simulated time: they are kept busy to its end, through losses and behind a slow driver."""

from __future__ import annotations

import pytest
from simulate_workers import CPU, GPU, Kind, Scene, gsm8k_like, heavy_tailed, simulate


def kept_busy(kind: Kind, num_workers: int, rows_each: int) -> float:
    return simulate(Scene(kind, num_workers, num_workers * rows_each)).efficiency


@pytest.mark.parametrize(
    ("kind", "num_workers", "rows_each", "least"),
    [
        (CPU, 1, 2048, 0.985),
        (CPU, 8, 2048, 0.98),
        (CPU, 16, 512, 0.945),
        (CPU, 32, 98, 0.70),  # fewer rows than slots: it is start and end alone
        (GPU, 1, 8192, 0.92),
        (GPU, 8, 4096, 0.80),
    ],
)
def test_workers_are_kept_busy(kind: Kind, num_workers: int, rows_each: int, least: float) -> None:
    assert kept_busy(kind, num_workers, rows_each) > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers", "rows_each", "least"),
    [
        (CPU, 64, 2048, 0.98),
        (CPU, 1024, 512, 0.92),
        (CPU, 1024, 98, 0.68),
        (GPU, 64, 16384, 0.93),
        (GPU, 1024, 2048, 0.64),
    ],
)
def test_a_thousand_workers_are_kept_busy(kind: Kind, num_workers: int, rows_each: int, least: float) -> None:
    assert kept_busy(kind, num_workers, rows_each) > least


def test_two_workers_take_hardly_more_steps_than_one() -> None:
    rows = gsm8k_like(3000)
    alone, both = (simulate(Scene(CPU, number, 0, spread=0), rows).num_steps for number in (1, 2))
    assert alone < both < 1.3 * alone


def test_beside_a_slow_worker_none_is_idle_for_longer_than_that_ones_last_rows() -> None:
    rows = gsm8k_like(2048)
    played = simulate(Scene(CPU, 4, 0, speeds=(0.2, 1, 1, 1)), rows)
    longest = max(row.output for row in rows) * (CPU.fixed_s + CPU.token_s * CPU.max_num_seqs / 2) / 0.2
    assert max(played.idle_s.values()) < longest
    assert max(played.idle_s.values()) < 10, "the others help it to the end"


def test_rows_of_a_slow_worker_go_to_idle_ones() -> None:
    """Ten times slower, and so many rows for each that all are given out before the first is done."""
    assert simulate(Scene(CPU, 2, 512, speeds=(0.1, 1))).efficiency > 0.83
    assert simulate(Scene(CPU, 4, 2048, speeds=(0.2, 1, 1, 1))).efficiency > 0.88


def test_a_heavy_tail_costs_no_more_than_its_longest_rows() -> None:
    assert simulate(Scene(CPU, 8, 0), heavy_tailed(8 * 1024)).efficiency > 0.9


@pytest.mark.parametrize(
    ("num_workers", "mtbf_h", "least"),
    [
        (8, 0.15, 0.7),
        pytest.param(64, 8.0, 0.975, marks=pytest.mark.slow),  # as of spot machines
        pytest.param(64, 0.8, 0.95, marks=pytest.mark.slow),
    ],
)
def test_losses_cost_little_and_no_row(num_workers: int, mtbf_h: float, least: float) -> None:
    scene = Scene(CPU, num_workers, num_workers * 2048, mtbf_s=3600 * mtbf_h)
    played = simulate(scene)
    assert played.num_losses > 0
    assert played.num_answers == scene.num_rows
    assert played.efficiency > least


def test_when_workers_go_all_the_time_the_job_ends_all_the_same() -> None:
    scene = Scene(CPU, 8, 8 * 256, mtbf_s=60, replaced_s=5)
    played = simulate(scene)
    assert played.num_losses > 8
    assert played.num_answers == scene.num_rows
    assert simulate(Scene(CPU, 8, 8 * 256, mtbf_s=60, replaced_s=5, partials_s=1e9)).num_steps > played.num_steps


def test_a_slow_driver_is_the_only_thing_that_is_waited_for() -> None:
    scene = Scene(GPU, 16, 16 * 2048, driver_row_s=350e-6)
    played = simulate(scene)
    assert played.seconds < 1.15 * scene.num_rows * scene.driver_row_s
    assert played.most_in_flight < 16 * 2 * GPU.max_num_seqs

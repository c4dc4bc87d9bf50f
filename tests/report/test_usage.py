"""Usage of invocations adds up, and a series of steps is thinned without losing a token."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.stats import MAX_POINTS, EngineStats, Point, StepSeries
from batchgen.report.usage import add_up, follow, since, split, tail_s, thin, usage_of


def series_of(steps: list[int]) -> dict[str, Any]:
    count = len(steps)
    ones = [1.0] * count
    tokens = [3 * n for n in steps]
    return {"at_s": list(range(count)), "span_s": ones, "steps": steps, "tokens": tokens, "kv_use": ones}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_all_sums_and_stays_within_bounds(steps: list[int], most: int) -> None:
    thinned = thin(series_of(steps), most)
    assert all(len(column) <= most for column in thinned.values())
    assert sum(thinned["tokens"]) == 3 * sum(steps)
    assert sum(thinned["span_s"]) == len(steps)
    assert set(thinned["kv_use"]) == {1.0}


@given(st.integers(1, 5 * MAX_POINTS))
def test_the_recorder_holds_few_points_and_counts_every_step(num_steps: int) -> None:
    series = StepSeries()
    for number in range(num_steps):
        series.add(Point(float(number), 1.0, 1, 10, 4, 2, 0.5))
    columns = series.to_columns()
    assert len(columns["at"]) <= MAX_POINTS
    assert sum(columns["steps"]) == num_steps
    assert sum(columns["tokens"]) == 10 * num_steps
    assert set(columns["kv_use"]) == {0.5}
    assert columns["at"] == sorted(columns["at"])


def test_later_invocations_follow_earlier_ones_in_time() -> None:
    first = {"wall_s": 100.0, "engine": {"series": series_of([1, 1])}}
    both = follow(first, {"wall_s": 10.0, "engine": {"series": series_of([1])}})
    assert both["wall_s"] == 110
    assert both["engine"]["series"]["at_s"] == [0, 1, 100]


def test_limits_are_not_summed() -> None:
    assert add_up({"max_num_seqs": 8, "steps": 1}, {"max_num_seqs": 4, "steps": 1}) == {"max_num_seqs": 8, "steps": 2}


def test_instants_become_seconds_of_the_run() -> None:
    stats = EngineStats(8, 64)
    stats.phase_s["forward"] = 2.0
    stats.add_step(30, 10, sequences=4, kv_use=0.25)
    counts = since(stats.to_dict(), stats.series.to_columns()["at"][0] - 5)
    assert counts["series"]["at_s"] == [5]
    assert counts["forward_prefill_s"] == 1.5


def test_the_usage_of_a_report_is_the_usage_it_was_built_from() -> None:
    report = {
        "sessions": 2,
        "wall_s": 9.0,
        "seconds": {"load": 1.0, "prefill": 2.0, "decode": 3.0, "mask": 0.5, "sample": 1.0, "host": 1.5},
        "generate_s": 8.0,
        "engine": {"num_forced_tokens": 5, "phase_s": {"mask": 0.5}},
        "series": {"at_s": [0.0]},
        "max_rss_bytes": 7,
        "tail_s": 0.5,
    }
    usage = usage_of(report)
    assert usage["seconds"] == {"load": 1.0, "generate": 8.0}
    assert usage["engine"] == {**report["engine"], "series": {"at_s": [0.0]}}
    twice = follow(usage, usage)
    assert (twice["tail_s"], twice["engine"]["num_forced_tokens"]) == (1.0, 10)
    assert split(twice["seconds"], twice["engine"])["mask"] == 1.0


def running(sequences: list[float]) -> dict[str, Any]:
    return {"span_s": [2.0] * len(sequences), "sequences": sequences}


def test_the_tail_begins_where_half_of_the_most_sequences_ran_for_the_last_time() -> None:
    assert tail_s(running([1, 8, 8, 4, 3, 1])) == 4.0
    assert tail_s(running([1, 8, 2, 8, 5])) == 0.0  # a dip that is filled again is no tail
    assert tail_s({}) is None


def test_a_session_that_only_runs_the_last_rows_is_all_tail() -> None:
    first = {"wall_s": 10.0, "engine": {"series": {**series_of([1, 1]), "sequences": [8.0, 8.0]}}}
    last = {"wall_s": 3.0, "engine": {"series": {**series_of([1, 1, 1]), "sequences": [2.0, 2.0, 1.0]}}}
    assert tail_s(follow(first, last)["engine"]["series"]) == 3.0

"""What is told of workers: their counts as one engine's, their series as one, and few lines when many come and go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import engine, made

from batchgen.core.records import Request
from batchgen.engine.stats import MAX_POINTS
from batchgen.executors.messages import Answers
from batchgen.executors.notes import WorkerNotes
from batchgen.executors.pool import Pool
from batchgen.executors.series import merged
from batchgen.executors.stats import PoolStats
from batchgen.report.facts import joined, outcome, workers
from batchgen.report.usage import add_up, tail_s, usage_of


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def series(at: float, spans: list[float], sequences: float = 8.0) -> dict[str, list[Any]]:
    starts = [at + sum(spans[:number]) for number in range(len(spans))]
    count = len(spans)
    return {
        "at": starts,
        "span_s": spans,
        "steps": [2] * count,
        "tokens": [16] * count,
        "prefill_tokens": [5] * count,
        "sequences": [sequences] * count,
        "kv_use": [0.5] * count,
    }


@pytest.fixture
def pair() -> tuple[Time, Pool, PoolStats]:
    """Two workers: one from the beginning, the other for the second half of 20 s."""
    time = Time()
    pool = Pool(clock=time)
    stats = PoolStats(pool.workers, time)
    for name in ("a", "b"):
        pool.join(name, max_num_seqs=8)
        stats.greet(name, "here")
        time.now += 10
    return time, pool, stats


def test_counts_are_sums_and_times_are_those_of_one_large_device(pair: tuple[Time, Pool, PoolStats]) -> None:
    _, _, stats = pair
    for name, idle_s in (("a", 5.0), ("b", 1.0)):
        stats.tell(name, engine(num_output_tokens=60, phase_s={"forward": 9.0}, forward_prefill_s=3.0, idle_s=idle_s))
    total = stats.to_dict()
    assert (total["num_steps"], total["max_num_seqs"], total["mean_workers"]) == (20, 8, 1.5)
    assert (total["phase_s"], total["forward_prefill_s"]) == ({"forward": 12.0}, 4.0)
    first, second = total["workers"].values()
    assert (first["present_s"], first["busy_s"], second["present_s"], second["busy_s"]) == (20, 15, 10, 9)
    assert stats.num_output_tokens == 120


def test_counts_replace_those_told_before(pair: tuple[Time, Pool, PoolStats]) -> None:
    time, _, stats = pair
    for tokens in (10, 40, 70):
        stats.tell("a", {"num_output_tokens": tokens, "num_prefill_tokens": 2 * tokens})
        time.now += 1
    assert (stats.num_output_tokens, stats.num_prefill_tokens) == (70, 140)
    assert stats.live()[0]["tokens_per_s"] == 90


def test_a_lost_worker_keeps_its_part_and_is_not_live(pair: tuple[Time, Pool, PoolStats]) -> None:
    time, pool, stats = pair
    pool.put([Request(number, (1,)) for number in range(4)])
    pool.grants()
    pool.heard("a", Answers(partials={0: (1, 2, 3)}))
    in_flight = len(pool.workers["a"].tasks)
    assert in_flight > 0
    pool.lose("a")
    time.now += 100
    lost = stats.to_dict()["workers"]["a@here"]
    assert [worker["name"] for worker in stats.live()] == ["b"]
    assert (lost["losses"], lost["rows_given_again"], lost["tokens_taken_over"]) == (1, in_flight, 3)
    assert lost["present_s"] == 20


@pytest.mark.parametrize(("leaves", "given"), [(True, 4), (False, 0)])
def test_rows_are_given_again_where_a_worker_leaves_and_not_where_the_run_stops(
    pair: tuple[Time, Pool, PoolStats], leaves: bool, given: int
) -> None:
    _, pool, stats = pair
    pool.leave("b")
    pool.put([Request(number, (1,)) for number in range(4)])
    pool.grants()
    if leaves:
        pool.leave("a")
    pool.heard("a", Answers(partials={0: (1, 2, 3)}, stopped=True))
    found = stats.to_dict()["workers"]["a@here"]
    assert (found["rows_given_again"], found["tokens_taken_over"]) == (given, 3 if leaves else 0)


spans = st.lists(st.floats(0.01, 50), min_size=1, max_size=40)


@given(st.lists(st.tuples(st.floats(0, 100), spans), min_size=1, max_size=5))
def test_a_merged_series_holds_every_step_and_token(parts: list[tuple[float, list[float]]]) -> None:
    found = merged([series(at, spans) for at, spans in parts], len(parts))
    num_points = sum(len(spans) for _, spans in parts)
    assert sum(found["steps"]) == 2 * num_points
    assert sum(found["tokens"]) == 16 * num_points
    assert len(found["at"]) <= MAX_POINTS
    assert found["at"] == sorted(found["at"])
    assert max(found["sequences"]) <= 8.0001
    end = max(at + sum(spans) for at, spans in parts)
    assert found["at"][-1] + found["span_s"][-1] == pytest.approx(end, abs=1e-3)


def test_a_worker_that_runs_alone_at_the_end_is_a_tail() -> None:
    found = merged([series(0, [1.0] * 100), series(0, [1.0] * 60, sequences=8), series(0, [1.0] * 60)], 3)
    assert found["sequences"][0] == pytest.approx(8)
    assert found["sequences"][-1] == pytest.approx(8 / 3, abs=0.001)
    assert tail_s(found) == pytest.approx(40, abs=1)


def test_a_run_without_steps_has_no_series() -> None:
    assert merged([{"at": []}], 1) == {}
    assert PoolStats({}).to_dict() == {"workers": {}, "mean_workers": 1.0}


WORKER = {"name": "a", "place": "here", "rows": 7, "tokens": 60, "present_s": 7200.0, "busy_s": 3600.0}
WORKER |= {"losses": 1, "rows_given_again": 3, "tokens_taken_over": 40}


def test_the_report_shows_workers_and_gives_back_their_usage() -> None:
    lone = {**WORKER, "name": "b", "losses": 0, "tokens": 99}
    report = made(engine=engine(workers={"a@here": WORKER, "b@here": lone}), device_s=20.0)
    assert report["workers"][0]["busy_share"] == 0.5
    assert report["device_s"] == 20
    said = joined(outcome(report))["workers"]
    assert said == "2 on 1 machine, 50% busy, 4.00 worker-hours, 1 lost, 6 rows given to others with 80 tokens"
    assert [row[0] for row in workers(report).rows] == ["b", "a"]
    assert "workers had nothing to do for 50% of their time" in " ".join(report["advice"])
    usage = usage_of(report)
    assert usage["engine"]["workers"]["a@here"] == pytest.approx(WORKER)
    again = add_up(usage, usage)
    assert again["engine"]["workers"]["b@here"]["rows"] == 14
    assert (again["device_s"], again["engine"]["workers"]["a@here"]["place"]) == (40, "here")


def test_two_devices_cost_and_reach_twice_as_much() -> None:
    one, two = (made(engine=engine(), device_s=seconds) for seconds in (10.0, 20.0))
    hours = "device_hours_per_million_output_tokens"
    assert two[hours]["hours"] == pytest.approx(2 * one[hours]["hours"])


def test_a_report_of_one_process_names_no_workers() -> None:
    assert "workers" not in made(engine=engine())
    assert usage_of(made(engine=engine()))["device_s"] == 10


def test_many_losses_are_few_lines() -> None:
    time, lines = Time(), list[str]()
    notes = WorkerNotes(lines.append, time)
    for number in range(200):
        notes.lost(f"w{number}", "there", "killed")
        notes.flush(200 - number)
        time.now += 0.1
    notes.flush(0, is_end=True)
    assert 2 <= len(lines) <= 4
    assert lines[0].startswith("worker w0 on there is lost: killed (and ")
    assert sum(1 + int(line.split("and ")[1].split()[0]) for line in lines) == 200


def test_a_single_event_is_told_within_a_second_or_two_and_once() -> None:
    time, lines = Time(), list[str]()
    notes = WorkerNotes(lines.append, time)
    notes.joined("w1", "there")
    notes.flush(1)
    assert lines == []
    time.now += 1
    notes.flush(1)
    notes.flush(1)
    assert lines == ["worker w1 on there has joined"]


def test_joins_together_are_one_line_and_refusals_name_a_reason() -> None:
    lines: list[str] = []
    notes = WorkerNotes(lines.append)
    for name in ("w1", "w2", "w3"):
        notes.joined(name, "there")
    notes.refused("w4", "else", "its model is another one")
    notes.flush(3, is_end=True)
    assert lines == ["3 workers have joined, 3 are here", "worker w4 on else takes no part: its model is another one"]

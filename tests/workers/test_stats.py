"""What is told of workers: their counts as one engine's, and of each by itself."""

from __future__ import annotations

import pytest
from report_samples import engine, made

from batchgen.core.records import Request
from batchgen.report.facts import joined, outcome, workers
from batchgen.report.usage import add_up, usage_of
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.messages import WorkerUpdate
from batchgen.workers.stats import WorkersStats


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pair() -> tuple[Time, RowDispatcher, WorkersStats]:
    """Two workers: one from the beginning, the other for the second half of 20 s."""
    time = Time()
    dispatcher = RowDispatcher(clock=time)
    stats = WorkersStats(time)
    for name in ("a", "b"):
        dispatcher.join(name, max_num_seqs=8)
        stats.join(dispatcher.workers[name], "here")
        time.now += 10
    return time, dispatcher, stats


def test_counts_are_sums_and_times_are_those_of_one_large_device(
    pair: tuple[Time, RowDispatcher, WorkersStats],
) -> None:
    _, _, stats = pair
    for name, idle_s in (("a", 5.0), ("b", 1.0)):
        stats.tell(name, engine(num_output_tokens=60, phase_s={"forward": 9.0}, forward_prefill_s=3.0, idle_s=idle_s))
    total = stats.to_dict()
    assert (total["num_steps"], total["max_num_seqs"], total["mean_workers"]) == (20, 8, 1.5)
    assert (total["phase_s"], total["forward_prefill_s"]) == ({"forward": 12.0}, 4.0)
    first, second = total["workers"].values()
    assert (first["present_s"], first["busy_s"], second["present_s"], second["busy_s"]) == (20, 15, 10, 9)
    assert stats.num_output_tokens == 120


def test_counts_replace_those_told_before(pair: tuple[Time, RowDispatcher, WorkersStats]) -> None:
    time, _, stats = pair
    for tokens in (10, 40, 70):
        stats.tell("a", {"num_output_tokens": tokens, "num_prefill_tokens": 2 * tokens})
        time.now += 1
    assert (stats.num_output_tokens, stats.num_prefill_tokens) == (70, 140)
    assert stats.live()[0]["tokens_per_s"] == 90


def test_a_lost_worker_keeps_its_part_and_is_not_live(pair: tuple[Time, RowDispatcher, WorkersStats]) -> None:
    time, dispatcher, stats = pair
    for number in range(4):
        dispatcher.put(Request(number, (1,)))
    dispatcher.assignments()
    dispatcher.on_update("a", WorkerUpdate(partials={0: (1, 2, 3)}))
    in_flight = len(dispatcher.workers["a"].tasks)
    assert in_flight > 0
    dispatcher.on_lost("a")
    time.now += 100
    lost = stats.to_dict()["workers"]["a@here"]
    assert [worker["name"] for worker in stats.live()] == ["b"]
    assert (lost["losses"], lost["rows_given_again"], lost["tokens_taken_over"]) == (1, in_flight, 3)
    assert lost["present_s"] == 20


@pytest.mark.parametrize(("leaves", "given"), [(True, 4), (False, 0)])
def test_rows_are_given_again_where_a_worker_leaves_and_not_where_the_run_stops(
    pair: tuple[Time, RowDispatcher, WorkersStats], leaves: bool, given: int
) -> None:
    _, dispatcher, stats = pair
    dispatcher.drain("b")
    for number in range(4):
        dispatcher.put(Request(number, (1,)))
    dispatcher.assignments()
    if leaves:
        dispatcher.drain("a")
    dispatcher.on_update("a", WorkerUpdate(partials={0: (1, 2, 3)}, stopped=True))
    found = stats.to_dict()["workers"]["a@here"]
    assert (found["rows_given_again"], found["tokens_taken_over"]) == (given, 3 if leaves else 0)


WORKER = {"name": "a", "place": "here", "rows": 7, "tokens": 60, "present_s": 7200.0, "busy_s": 3600.0}
WORKER |= {"losses": 1, "rows_given_again": 3, "tokens_taken_over": 40}


def test_the_report_shows_workers_and_gives_back_their_usage() -> None:
    lone = {**WORKER, "name": "b", "losses": 0, "tokens": 99}
    report = made(engine=engine(workers={"a@here": WORKER, "b@here": lone}), device_s=20.0)
    assert report["workers"][0]["busy_share"] == 0.5
    assert report["device_s"] == 20
    said = joined(outcome(report))["workers"]
    assert said == "2 on 1 machine, there for 4h 00m in all, 50% busy, 1 lost, 6 rows given to others with 80 tokens"
    assert [row[0] for row in workers(report).rows] == ["b", "a"]
    usage = usage_of(report)
    assert usage["engine"]["workers"]["a@here"] == pytest.approx(WORKER)
    again = add_up(usage, usage)
    assert again["engine"]["workers"]["b@here"]["rows"] == 14
    assert (again["device_s"], again["engine"]["workers"]["a@here"]["place"]) == (40, "here")


def test_two_devices_cost_and_reach_twice_as_much() -> None:
    one, two = (made(engine=engine(), device_s=seconds) for seconds in (10.0, 20.0))
    hours = "device_hours_per_million_output_tokens"
    assert two[hours]["hours"] == pytest.approx(2 * one[hours]["hours"])
    assert "workers" not in made(engine=engine()), "a report of one process names none"
    assert usage_of(made(engine=engine()))["device_s"] == 10

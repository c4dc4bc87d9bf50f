"""The crew of a Ray cluster, without Ray: actors are futures that the tests settle."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.config.cluster import ClusterSpec
from batchgen.config.load import load_job
from batchgen.core.errors import ExitCode, ModelError, UsageError
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.executors import ray_crew
from batchgen.executors.messages import Answers, Event, Grant, Hello, Identity, Lost
from batchgen.executors.ray_cluster import Cluster, Needs, Node, reason_of
from batchgen.executors.ray_crew import RayCrew, RaySeat, _Place
from batchgen.executors.worker import Start
from batchgen.model import load_config

HELLO = Hello(Identity({}, {}, ""), max_num_seqs=8, threads=1)
ROW = Request(0, (1, 2), SamplingParams())


class FakeActor:
    """``asked`` are the calls: names, arguments and futures."""

    def __init__(self, barred: Iterable[str]) -> None:
        self.barred = set(barred)
        self.asked: list[tuple[str, tuple[Any, ...], Future[Any]]] = []
        self.is_ended = False

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.asked.append((name, arguments, Future()))
            return SimpleNamespace(future=lambda: self.asked[-1][2])

        return SimpleNamespace(remote=remote)

    def tell(self, told: Any) -> None:
        """Settle the call under way."""
        future = self.asked[-1][2]
        future.set_exception(told) if isinstance(told, Exception) and not isinstance(told, Lost) else future.set_result(
            told
        )


class FakeCluster:
    """Machines "a" and "b", with two CPUs each."""

    def __init__(self, address: str = "auto") -> None:
        self.nodes = tuple(Node(name, name, {"CPU": 2.0}) for name in "ab")
        self.leaving: frozenset[str] = frozenset()
        self.actors: list[FakeActor] = []
        self.is_closed = False

    def start(self, cls: type, needs: Needs, barred: Collection[str] = ()) -> FakeActor:
        self.actors.append(FakeActor(barred))
        return self.actors[-1]

    def end(self, actor: FakeActor) -> None:
        actor.is_ended = True

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A crew on a fake cluster, with a clock that the test turns."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.now = 0.0
        spec = load_job(None, {"model": {"path": "dummy:LFM2-350M"}}, needs=("model",))
        model = load_config(spec.model.path, "main")
        self.crew = RayCrew(Start(replace(spec, cluster=cluster), None, {}), model, None, lambda: self.now)
        self.cluster: FakeCluster = self.crew._cluster  # type: ignore[assignment]

    def hire(self) -> RaySeat:
        seat = self.crew.hire()
        assert seat is not None
        return seat

    def placed(self, node: str) -> RaySeat:
        """A seat on a machine, whose model is being loaded."""
        seat = self.hire()
        seat.actor.tell(_Place(node, 7))
        assert seat.poll() == []
        return seat

    def ready(self, node: str) -> RaySeat:
        """A seat that has been given a row."""
        seat = self.placed(node)
        assert self.told(seat, HELLO) == [HELLO]
        seat.send(Grant((ROW,)))
        self.crew.wait([seat], 0.0)
        return seat

    @staticmethod
    def told(seat: RaySeat, what: Any) -> list[Event]:
        seat.actor.tell(what)
        return seat.poll()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(ray_crew, "Cluster", FakeCluster)
    return Bench(ClusterSpec(ray="auto"))


def test_by_default_there_are_as_many_workers_as_machines_of_the_smallest_size(bench: Bench) -> None:
    assert bench.crew.num_wanted == (1, 2)
    nodes = [Node("a", "a", {"CPU": 4.0}), Node("b", "b", {"CPU": 16.0}), Node("head", "head", {})]
    needs = Needs.of(ClusterSpec(), "auto", nodes)
    assert (str(needs), [needs.most_on(node) for node in nodes]) == ("4 CPU", [1, 4, 0])


def test_a_worker_has_one_gpu_where_there_are_any() -> None:
    nodes = [Node("a", "a", {"CPU": 4.0, "GPU": 8.0}), Node("b", "b", {"CPU": 16.0})]
    needs = Needs.of(ClusterSpec(), "auto", nodes)
    assert (needs.all, [needs.most_on(node) for node in nodes]) == ({"CPU": 1, "GPU": 1}, [4, 0])
    assert Needs.of(ClusterSpec(), "cpu", nodes).all == {"CPU": 4}
    assert Needs.of(ClusterSpec(worker_gpus=2, worker_cpus=1), "auto", nodes).most_on(nodes[0]) == 4
    assert Needs.of(ClusterSpec(resources={"spot": 0.01}), "cpu", nodes).most_on(nodes[0]) == 0


def test_a_worker_has_one_call_under_way_which_carries_all_grants(bench: Bench) -> None:
    seat = bench.ready("a")
    assert [name for name, _, _ in seat.actor.asked] == ["place", "begin", "exchange"]
    for recall in ((1,), (2,)):
        seat.send(Grant(recall=recall))
        bench.crew.wait([seat], 0.0)
    assert len(seat.actor.asked) == 3
    assert bench.told(seat, Answers()) == [Answers()]
    bench.crew.wait([seat], 0.0)
    assert seat.actor.asked[-1][:2] == ("exchange", ((Grant(recall=(1,)), Grant(recall=(2,))),))


def test_an_answer_wakes_the_driver(bench: Bench) -> None:
    seat = bench.ready("a")
    assert not bench.crew._woken.is_set()
    seat.actor.tell(Answers())
    assert bench.crew._woken.is_set()
    bench.crew.wait([seat], 60.0)
    assert not bench.crew._woken.is_set(), "the next wait is for the next answer"


def test_a_worker_begins_with_its_share_of_the_machine(bench: Bench) -> None:
    bench.crew._needs = Needs(1, 0)
    assert bench.placed("a").actor.asked[-1][1][-1] == 2


def test_a_call_that_fails_is_a_loss(bench: Bench) -> None:
    seat = bench.ready("a")
    (lost,) = bench.told(seat, RuntimeError("The actor died because its node has died. And so on"))
    assert lost == Lost("its machine is gone")
    assert seat.actor.is_ended and seat.poll() == []


def test_a_machine_that_loses_workers_before_they_finish_a_row_is_barred(bench: Bench) -> None:
    for _ in range(3):
        assert bench.hire().actor.barred == set()
        bench.told(bench.ready("a"), RuntimeError("gone"))
    assert bench.hire().actor.barred == {"a"}


def test_losses_between_which_rows_are_finished_bar_no_machine(bench: Bench) -> None:
    for _ in range(9):
        seat = bench.ready("a")
        bench.told(seat, Answers(finished=(Result(0, 2),)))
        bench.crew.wait([seat], 0.0)
        bench.told(seat, RuntimeError("gone"))
    assert bench.hire().actor.barred == set()


def test_a_worker_on_its_way_to_a_barred_machine_is_placed_anew(bench: Bench) -> None:
    waiting = bench.hire()
    first = waiting.actor
    assert isinstance(bench.told(bench.placed("a"), Lost("no such model", ModelError("no such model")))[0], Lost)
    assert first.is_ended and waiting.actor.barred == {"a"}


def test_a_machine_whose_worker_is_turned_away_is_barred(bench: Bench) -> None:
    seat = bench.placed("a")
    bench.told(seat, HELLO)
    seat.close()
    assert bench.hire().actor.barred == {"a"}


def test_a_worker_that_has_stopped_bars_no_machine(bench: Bench) -> None:
    for _ in range(4):
        seat = bench.ready("a")
        bench.told(seat, Answers(stopped=True))
        seat.close()
    assert bench.hire().actor.barred == set()


def test_where_all_machines_are_barred_the_reason_is_told_and_no_more_hired(bench: Bench) -> None:
    waiting, error = bench.hire(), ModelError("no such model")
    for node in "ab":
        bench.told(bench.placed(node), Lost("no such model", error))
    (lost,) = waiting.poll()
    assert isinstance(lost, Lost) and lost.error is error
    assert bench.crew.hire() is None


def test_no_room_for_ten_minutes_ends_the_run_but_not_while_a_worker_has_a_place(bench: Bench) -> None:
    seat, waiting = bench.ready("a"), bench.hire()
    bench.now = 10_000.0
    assert waiting.poll() == []
    bench.told(seat, RuntimeError("gone"))
    bench.now += 599
    assert waiting.poll() == []
    bench.now += 2
    (lost,) = waiting.poll()
    assert isinstance(lost, Lost) and "no worker within 10 minutes: the cluster has no room for 2 CPU" in lost.reason
    assert getattr(lost.error, "exit_code", None) == ExitCode.STOPPED
    assert bench.crew.hire() is None


def test_the_answers_of_a_machine_that_is_drained_say_so(bench: Bench) -> None:
    seat = bench.ready("a")
    bench.cluster.leaving = frozenset("a")
    assert bench.told(seat, Answers()) == [Answers(leaving=True)]


def test_the_end_ends_all_actors_and_leaves_the_cluster(bench: Bench) -> None:
    seats = [bench.hire(), bench.placed("a"), bench.ready("b")]
    bench.crew.close()
    assert all(seat.actor.is_ended for seat in seats) and bench.cluster.is_closed


def test_a_cluster_on_which_no_worker_starts_is_given_up(bench: Bench) -> None:
    for _ in range(12):
        bench.told(bench.hire(), RuntimeError("the environment cannot be set up"))
    assert bench.crew.hire() is None


def test_a_cluster_on_which_some_workers_start_is_not_given_up(bench: Bench) -> None:
    for turn in range(24):
        bench.told(bench.hire(), RuntimeError("the environment cannot be set up"))
        if turn % 8 == 0:
            bench.placed("a")
        assert bench.crew.hopeless() is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("failed to import. No module named 'batchgen'", "what it needs is not installed there"),
        ("The actor is dead because its worker process has died. Worker exit type", "its process died"),
        ("Something else\nat length", "Something else"),
    ],
)
def test_what_ray_says_of_a_loss_becomes_a_few_words(said: str, reason: str) -> None:
    assert reason_of(RuntimeError(said)).startswith(reason)


def test_an_address_where_nothing_answers_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:9: Connection refused"):
        Cluster("127.0.0.1:9")

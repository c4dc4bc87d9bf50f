"""The launcher of a Ray cluster, without Ray: actors are futures that the tests settle."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.config.cluster import ClusterSpec
from batchgen.config.load import load_job
from batchgen.core.errors import ExitCode, ModelError, UsageError
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.workers import ray_launcher
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.messages import (
    Assignment,
    Identity,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkerUpdate,
)
from batchgen.workers.ray_cluster import Cluster, Node, WorkerResources, reason_of
from batchgen.workers.ray_launcher import RayLauncher
from batchgen.workers.worker import Start

HELLO = WorkerReady(Identity({}, {}, ""), max_num_seqs=8, threads=1)
ROW = Request(0, (1, 2), SamplingParams())


class FakeActor:
    """``asked`` are the calls: names, arguments and futures."""

    def __init__(self, excluded: Iterable[str]) -> None:
        self.excluded = set(excluded)
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
        future.set_exception(told) if isinstance(told, Exception) and not isinstance(
            told, WorkerLost
        ) else future.set_result(told)


class FakeCluster:
    """Machines "a" and "b", with two CPUs each."""

    def __init__(self, address: str = "auto") -> None:
        self.nodes = tuple(Node(name, {"CPU": 2.0}) for name in "ab")
        self.actors: list[FakeActor] = []
        self.is_closed = False

    def start(self, cls: type, needs: WorkerResources, excluded: Collection[str] = ()) -> FakeActor:
        self.actors.append(FakeActor(excluded))
        return self.actors[-1]

    @staticmethod
    def end(actor: FakeActor) -> None:
        actor.is_ended = True

    def close(self) -> None:
        self.is_closed = True


def actor_of(handle: WorkerHandle) -> FakeActor:
    found: FakeActor = handle.remote.actor  # type: ignore[attr-defined]
    return found


class Bench:
    """A launcher on a fake cluster, with a clock that the test turns."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.now = 0.0
        spec = load_job(None, {"model": {"path": "dummy:LFM2-350M"}}, needs=("model",))
        self.launcher = RayLauncher(Start(replace(spec, cluster=cluster), None, {}), None, lambda: self.now)
        self.cluster: FakeCluster = self.launcher._cluster  # type: ignore[assignment]

    def launch(self) -> WorkerHandle:
        handle = self.launcher.launch()
        assert handle is not None
        return handle

    def placed(self, node: str) -> WorkerHandle:
        """A handle on a machine, whose model is being loaded."""
        handle = self.launch()
        actor_of(handle).tell(node)
        assert handle.poll() == [] and handle.loading_since is not None
        return handle

    def ready(self, node: str) -> WorkerHandle:
        """A handle that has been given a row."""
        handle = self.placed(node)
        assert self.told(handle, HELLO) == [HELLO]
        handle.send(Assignment((ROW,)))
        self.launcher.wait(0.0)
        return handle

    def polled(self, handle: WorkerHandle) -> list[WorkerEvent]:
        """What it tells after a wait."""
        self.launcher.wait(0.0)
        return handle.poll()

    @staticmethod
    def told(handle: WorkerHandle, what: Any) -> list[WorkerEvent]:
        actor_of(handle).tell(what)
        return handle.poll()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(ray_launcher, "Cluster", FakeCluster)
    return Bench(ClusterSpec(ray="auto"))


def test_by_default_there_are_as_many_workers_as_machines_of_the_smallest_size(bench: Bench) -> None:
    assert bench.launcher.num_wanted == (1, 2)
    nodes = [Node("a", {"CPU": 4.0}), Node("b", {"CPU": 16.0}), Node("head", {})]
    needs = WorkerResources.of(ClusterSpec(), "auto", nodes)
    assert (str(needs), [needs.capacity(node) for node in nodes]) == ("4 CPU", [1, 4, 0])


def test_a_worker_has_one_gpu_where_there_are_any() -> None:
    nodes = [Node("a", {"CPU": 4.0, "GPU": 8.0}), Node("b", {"CPU": 16.0})]
    needs = WorkerResources.of(ClusterSpec(), "auto", nodes)
    assert (needs.all, [needs.capacity(node) for node in nodes]) == ({"CPU": 1, "GPU": 1}, [4, 0])
    assert WorkerResources.of(ClusterSpec(), "cpu", nodes).all == {"CPU": 4}
    assert WorkerResources.of(ClusterSpec(gpus_per_worker=2, cpus_per_worker=1), "auto", nodes).capacity(nodes[0]) == 4
    assert WorkerResources.of(ClusterSpec(resources={"spot": 0.01}), "cpu", nodes).capacity(nodes[0]) == 0


def test_a_worker_has_one_call_under_way_which_carries_all_grants(bench: Bench) -> None:
    handle = bench.ready("a")
    assert [name for name, _, _ in actor_of(handle).asked] == ["place", "begin_in", "exchange"]
    for _ in range(2):
        handle.send(Assignment((ROW,)))
        bench.launcher.wait(0.0)
    assert len(actor_of(handle).asked) == 3
    assert bench.told(handle, WorkerUpdate()) == [WorkerUpdate()]
    bench.launcher.wait(0.0)
    assert actor_of(handle).asked[-1][:2] == ("exchange", ((Assignment((ROW,)), Assignment((ROW,))),))


def test_an_answer_wakes_the_driver(bench: Bench) -> None:
    handle = bench.ready("a")
    assert not bench.launcher.woken.is_set()
    actor_of(handle).tell(WorkerUpdate())
    assert bench.launcher.woken.is_set()
    bench.launcher.wait(60.0)
    assert not bench.launcher.woken.is_set(), "the next wait is for the next answer"


def test_a_worker_begins_with_its_share_of_the_machine(bench: Bench) -> None:
    bench.launcher._resources = WorkerResources(1, 0)
    assert actor_of(bench.placed("a")).asked[-1][1][-1] == 2


def test_a_call_that_fails_is_a_loss(bench: Bench) -> None:
    handle = bench.ready("a")
    (lost,) = bench.told(handle, RuntimeError("The actor died because its node has died. And so on"))
    assert lost == WorkerLost("its machine is gone")
    assert actor_of(handle).is_ended and handle.poll() == []


def test_a_machine_that_loses_workers_before_they_finish_a_row_is_barred(bench: Bench) -> None:
    for _ in range(3):
        assert actor_of(bench.launch()).excluded == set()
        bench.told(bench.ready("a"), RuntimeError("gone"))
    assert actor_of(bench.launch()).excluded == {"a"}


def test_losses_between_which_rows_are_finished_bar_no_machine(bench: Bench) -> None:
    for _ in range(9):
        handle = bench.ready("a")
        bench.told(handle, WorkerUpdate(finished=(Result(0, 2),)))
        bench.launcher.wait(0.0)
        bench.told(handle, RuntimeError("gone"))
    assert actor_of(bench.launch()).excluded == set()


def test_a_worker_on_its_way_to_a_barred_machine_is_placed_anew(bench: Bench) -> None:
    waiting = bench.launch()
    first = actor_of(waiting)
    assert isinstance(
        bench.told(bench.placed("a"), WorkerLost("no such model", ModelError("no such model")))[0], WorkerLost
    )
    assert first.is_ended and actor_of(waiting).excluded == {"a"}


def test_a_machine_whose_worker_is_turned_away_is_barred(bench: Bench) -> None:
    handle = bench.placed("a")
    bench.told(handle, HELLO)
    handle.give_up(WorkerLost("another model", UsageError("another model")))
    assert actor_of(bench.launch()).excluded == {"a"}


def test_a_worker_that_has_stopped_bars_no_machine(bench: Bench) -> None:
    for _ in range(4):
        handle = bench.ready("a")
        bench.told(handle, WorkerUpdate(stopped=True))
        handle.close()
    assert actor_of(bench.launch()).excluded == set()


def test_where_all_machines_are_barred_the_reason_is_told_and_no_more_hired(bench: Bench) -> None:
    waiting, error = bench.launch(), ModelError("no such model")
    for node in "ab":
        bench.told(bench.placed(node), WorkerLost("no such model", error))
    (lost,) = bench.polled(waiting)
    assert isinstance(lost, WorkerLost) and lost.error is error
    assert bench.launcher.launch() is None


def test_no_room_for_ten_minutes_ends_the_run_but_not_while_a_worker_has_a_place(bench: Bench) -> None:
    handle, waiting = bench.ready("a"), bench.launch()
    bench.now = 10_000.0
    assert bench.polled(waiting) == []
    bench.told(handle, RuntimeError("gone"))
    bench.now += 599
    assert bench.polled(waiting) == []
    bench.now += 2
    (lost,) = bench.polled(waiting)
    assert (
        isinstance(lost, WorkerLost) and "no worker within 10 minutes: the cluster has no room for 2 CPU" in lost.reason
    )
    assert getattr(lost.error, "exit_code", None) == ExitCode.STOPPED
    assert bench.launcher.launch() is None


def test_the_end_ends_all_actors_and_leaves_the_cluster(bench: Bench) -> None:
    handles = [bench.launch(), bench.placed("a"), bench.ready("b")]
    bench.launcher.close()
    assert all(actor_of(handle).is_ended for handle in handles) and bench.cluster.is_closed


def test_a_cluster_on_which_no_worker_starts_is_given_up(bench: Bench) -> None:
    for _ in range(12):
        bench.told(bench.launch(), RuntimeError("the environment cannot be set up"))
    bench.launcher.wait(0.0)
    assert bench.launcher.launch() is None


def test_a_cluster_on_which_some_workers_start_is_not_given_up(bench: Bench) -> None:
    for turn in range(24):
        bench.told(bench.launch(), RuntimeError("the environment cannot be set up"))
        if turn % 8 == 0:
            bench.placed("a")
        bench.launcher.wait(0.0)
        assert bench.launcher.no_place is None


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


def test_a_cluster_that_turns_this_process_away_is_one_line_with_the_remedies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        os.write(2, b"Failed to get cluster ID: InvalidAuthToken\n" * 20)
        raise ConnectionError("Failed to connect to Ray cluster at 10.9.9.1:6399\nand so on")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=r"^cluster.ray = auto: Failed to connect .*:6399: give auto .* RAY_AUTH_MODE"):
        Cluster("auto")
    os.write(2, b"this is seen")
    assert capfd.readouterr().err == "this is seen"


def test_a_working_folder_that_is_gone_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "Cluster", FakeCluster)
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    handle = Bench(ClusterSpec(ray="auto")).placed("a")
    assert actor_of(handle).asked[-1][1][0] == ""


def test_an_address_where_nothing_answers_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match=r"no Ray cluster at 127\.0\.0\.1:9: Connection refused"):
        Cluster("127.0.0.1:9")

"""Workers on a Ray cluster: each is an actor on one GPU or on a group of cores.

Ray places them, tells when one is lost and asks an autoscaler for machines; rows and messages are ours. Nothing here
waits for a worker: whatever one does is a future, also its start. Ray is imported by ``ray_cluster`` alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from batchgen.core.errors import BatchgenError, ExitCode, UsageError
from batchgen.core.machine import limit_memory, memory_errors, total_bytes
from batchgen.executors.messages import HEARTBEAT_S, Answers, Event, Grant, Hello, Lost
from batchgen.executors.ray_cluster import Cluster, Needs, reason_of
from batchgen.executors.shares import useful_workers
from batchgen.executors.worker import Start, Worker, lost_to
from batchgen.model import ModelConfig

_MOST_LOSSES = 3  # of workers on one machine, none of which finished a row
_MOST_UNPLACED = 12  # losses in a row before a worker had a place
_NO_ROOM_S = 600.0
_NO_ROOM = "no worker within 10 minutes: the cluster has no room for {needs}"
_NO_MACHINE = "no machine of the cluster is left that workers could run on"


class NoRoom(BatchgenError):
    """The cluster has no machine for a worker; journalled rows stay, and the run resumes."""

    exit_code = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class _Place:
    node_id: str
    pid: int


class Actor:
    """What runs on the cluster. One method at a time, each in the main thread of a process of its own."""

    def place(self) -> _Place:
        """The machine, as soon as the process has started."""
        return _Place(Cluster.own_node(), os.getpid())

    def begin(self, start: Start, folder: str, num_neighbours: int) -> Hello | Lost:
        """Load the model on a machine with room for so many workers, of which each has its share of the memory.

        Relative paths of the job are those of the driver, where its folder exists here.
        """
        with suppress(OSError):
            os.chdir(folder)
        limit_memory(total_bytes() // num_neighbours)
        try:
            with memory_errors("running this command"):
                self._worker = Worker(start)
        except Exception as error:
            return lost_to(error)
        return self._worker.hello

    def exchange(self, grants: tuple[Grant, ...]) -> Answers | Lost:
        """Take in what the driver says; returns as soon as there is something to tell, or after a heartbeat."""
        try:
            with memory_errors("running this command"):
                for grant in grants:
                    self._worker.put(grant)
                return self._worker.take(HEARTBEAT_S)
        except Exception as error:
            return lost_to(error)


class RaySeat:
    """One actor as the driver sees it, with one call under way at most.

    ``node_id`` and ``pid`` are empty until it has a place.
    """

    def __init__(self, name: str, crew: RayCrew) -> None:
        self.name = name
        self.node_id = ""
        self.pid = 0
        self.actor: Any = None
        self._crew = crew
        self._grants: list[Grant] = []
        self._is_ready = self._is_granted = self._has_stopped = self._is_over = False
        self._call: Future[Any] | None = None
        self.place()

    def place(self) -> None:
        """Ask for a place, perhaps anew."""
        if self.actor is not None:
            self._crew.kill(self.actor)
        self.actor, self._call = self._crew.place()

    def send(self, grant: Grant) -> None:
        self._is_granted = True
        self._grants.append(grant)

    def exchange(self) -> None:
        """Call a worker that waits to be called."""
        if self._is_ready and self._call is None and not (self._is_over or self._has_stopped):
            grants, self._grants = tuple(self._grants), []
            self._call = self._crew.ask(self.actor.exchange, grants)

    def poll(self) -> list[Event]:
        if self._is_over:
            return []
        if not self.node_id and (lost := self._crew.hopeless()):
            return [self._lose(lost)]
        if self._call is None or not self._call.done():
            return []
        told, self._call = self._result(self._call), None
        if isinstance(told, _Place):
            self.node_id, self.pid = told.node_id, told.pid
            self._call = self._crew.begin(self.actor, told.node_id)
            return []
        return [self._take_in(told)]

    def _take_in(self, told: Event) -> Event:
        if isinstance(told, Lost):
            return self._lose(told)
        if isinstance(told, Answers):
            self._has_stopped = told.stopped
            return self._crew.seen(self.node_id, told)
        self._is_ready = True
        return told

    def close(self) -> None:
        """End the actor. One that is ready but was given nothing was turned away, as others there would be."""
        if self._is_over:
            return
        if self._has_stopped:
            self._end()
        elif self._is_ready and not self._is_granted:
            self._end()
            self._crew.bar(self.node_id)
        else:
            self._lose(Lost("it was silent for too long"))

    @staticmethod
    def _result(call: Future[Any]) -> Any:
        try:
            return call.result()
        except Exception as error:  # of Ray: the call did not end, whatever the reason
            return Lost(reason_of(error))

    def _lose(self, lost: Lost) -> Lost:
        self._end()
        self._crew.has_lost(self.node_id, lost)
        return lost

    def _end(self) -> None:
        self._is_over = True
        self._crew.end(self)


class RayCrew:
    """Hires actors on a cluster. Raises UsageError if it cannot be reached.

    A machine is barred, so that no worker is placed there, when its files or numerics are not those of the run, and
    when workers are lost there again and again before they have finished a row.
    """

    def __init__(
        self, start: Start, model: ModelConfig, num_rows: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        spec, cluster = start.spec, start.spec.cluster
        self._begin_with = start, os.getcwd()  # noqa: PTH109 - a plain string, which any system can read
        self._clock = clock
        self._cluster = Cluster(cluster.ray or "auto")
        try:
            nodes = self._cluster.nodes
            self._needs = Needs.of(cluster, spec.model.device, nodes)
            places = sum(map(self._needs.most_on, nodes))
            auto = useful_workers(places, spec, model, num_rows, is_cuda=bool(self._needs.gpus))
            self.num_wanted = cluster.bounds or (1, auto)
            self.is_one_place = False
        except BaseException:
            self._cluster.close()
            raise
        self._woken = threading.Event()
        self.seats: list[RaySeat] = []
        self._num_hired = 0
        self._losses: Counter[str] = Counter()
        self._barred: set[str] = set()
        self._alone_since = clock()  # when the last worker that had a place was lost
        self._error: Exception | None = None

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of machines that will soon be gone."""
        return self._cluster.leaving

    def hire(self) -> RaySeat | None:
        if self.hopeless():
            return None
        self._num_hired += 1
        seat = RaySeat(f"ray-{self._num_hired}", self)
        self.seats.append(seat)
        return seat

    def wait(self, seats: Iterable[Any], timeout_s: float) -> None:
        for seat in seats:
            seat.exchange()
        self._woken.wait(timeout_s)
        self._woken.clear()

    def close(self) -> None:
        for seat in list(self.seats):
            self.end(seat)
        self._cluster.close()

    # What seats ask, and tell

    def place(self) -> tuple[Any, Future[Any]]:
        """A new actor, and where it will be."""
        actor = self._cluster.start(Actor, self._needs, self._barred)
        return actor, self.ask(actor.place)

    def begin(self, actor: Any, node_id: str) -> Future[Any]:
        """Let an actor load the model."""
        self._losses.pop("", None)
        num_neighbours = max((self._needs.most_on(n) for n in self._cluster.nodes if n.node_id == node_id), default=1)
        return self.ask(actor.begin, *self._begin_with, max(1, num_neighbours))

    def ask(self, method: Any, *arguments: Any) -> Future[Any]:
        """Call a method of an actor; ``wait`` returns when it has an answer."""
        future: Future[Any] = method.remote(*arguments).future()
        future.add_done_callback(lambda _: self._woken.set())
        return future

    def kill(self, actor: Any) -> None:
        self._cluster.end(actor)

    def end(self, seat: RaySeat) -> None:
        """A seat is over."""
        self._cluster.end(seat.actor)
        self.seats.remove(seat)

    def seen(self, node_id: str, answers: Answers) -> Answers:
        """Answers with what is known of the machine."""
        if answers.finished:
            self._losses.pop(node_id, None)
        return replace(answers, leaving=True) if node_id in self.leaving else answers

    def has_lost(self, node_id: str, lost: Lost) -> None:
        """Note where a worker was lost, and why; the id is empty if it never had a place."""
        self._error = lost.error or self._error
        self._losses[node_id] += 1
        if node_id:
            self._alone_since = self._clock()
            if isinstance(lost.error, UsageError) or self._losses[node_id] >= _MOST_LOSSES:
                self.bar(node_id)

    def bar(self, node_id: str) -> None:
        """Place no more workers on a machine; those that wait for a place may have been on their way to it."""
        self._barred.add(node_id)
        for seat in self.seats:
            if not seat.node_id:
                seat.place()

    def hopeless(self) -> Lost | None:
        """Why a worker without a place will not get one; None while it may."""
        if self._losses[""] >= _MOST_UNPLACED:
            return Lost("workers are lost before they have a place", self._error)
        fit = {node.node_id for node in self._cluster.nodes if self._needs.most_on(node)}
        if fit and fit <= self._barred:
            return Lost(_NO_MACHINE, self._error)
        if not any(seat.node_id for seat in self.seats) and self._clock() - self._alone_since > _NO_ROOM_S:
            reason = _NO_ROOM.format(needs=self._needs)
            return Lost(reason, NoRoom(f"{reason}; run again to resume"))
        return None

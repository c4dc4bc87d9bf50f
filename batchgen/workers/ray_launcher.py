"""Workers on a Ray cluster: each is an actor on one GPU or on a group of cores.

Ray places them, reports losses and asks an autoscaler for machines; only ``ray_cluster`` imports it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import BatchgenError, ExitCode, UsageError
from batchgen.core.machine import total_bytes
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.messages import WorkerLost, WorkerReady, WorkerUpdate
from batchgen.workers.ray_cluster import Cluster, Node, WorkerResources, reason_of
from batchgen.workers.slices import MachineSlice, useful_workers
from batchgen.workers.worker import Start, Worker

_MAX_LOSSES = 3  # of workers on one machine, none of which finished a row
_MAX_UNPLACED = 12  # losses in a row before a worker had a place
_NO_ROOM_S = 600.0
_NO_ROOM = "no worker within 10 minutes: the cluster has no room for {needs}"
_NO_MACHINE = "no machine is left in the cluster for workers"


class NoRoom(BatchgenError):
    """The cluster lacks a machine for a worker; journalled rows stay, and the run resumes."""

    exit_code = ExitCode.STOPPED


class RayWorker(Worker):
    """Worker on the cluster, in the main thread of a separate process."""

    def place(self) -> str:
        """The machine's id; the call returns as soon as the process has started."""
        return Cluster.own_node()

    def begin_in(self, folder: str, start: Start, num_neighbours: int) -> WorkerReady | WorkerLost:
        """Load the model on a machine with room for ``num_neighbours`` workers, each with its share of the memory.

        Relative paths of the job are relative to the driver's folder, if it exists on this machine.
        """
        with suppress(OSError):
            os.chdir(folder)
        return self.begin(start, MachineSlice(memory_bytes=total_bytes() // num_neighbours))


@dataclass(frozen=True, slots=True)
class _Actor:
    """A ``Remote`` that is an actor."""

    actor: Any

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        return future

    def kill(self) -> None:
        Cluster.end(self.actor)


def _working_folder() -> str:
    """The folder that relative paths of the job are in; empty if it is gone."""
    try:
        return os.getcwd()  # noqa: PTH109 - a plain string, which any system can read
    except OSError:
        return ""


class RayLauncher(WorkerLauncher):
    """Starts actors on a cluster. Raises UsageError if it cannot be reached.

    Workers are not placed on a machine whose files or numerics differ from the run's, or on which workers are lost
    again and again before they have finished a row.
    """

    kind = "ray"
    is_local = False

    def __init__(self, start: Start, num_rows: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        spec, cluster = start.spec, start.spec.cluster
        self._start, self._folder = start, _working_folder()
        self._clock = clock
        self._cluster = Cluster(cluster.ray or "auto")
        try:
            nodes = self._cluster.nodes
            self._resources = WorkerResources.of(cluster, spec.model.device, nodes)
            places = sum(map(self._resources.capacity, nodes))
            auto = useful_workers(places, spec, num_rows, is_cuda=bool(self._resources.gpus))
            super().__init__(cluster.bounds or (1, auto))
        except BaseException:
            self._cluster.close()
            raise
        self._losses: Counter[str] = Counter()  # by machine, "" before there was one
        self._excluded: set[str] = set()
        self._nodes, self._fit = nodes, self._fitting(nodes)
        self._unplaced_since = clock()  # when the last worker that had a place was lost
        self._error: Exception | None = None

    def has_room(self) -> bool:
        return self.no_place is None

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s)
        self.no_place = self._find_no_place()

    def close(self) -> None:
        super().close()
        self._cluster.close()

    def place(self) -> tuple[_Actor, Future[str]]:
        actor = _Actor(self._cluster.start(RayWorker, self._resources, self._excluded))
        return actor, actor.call("place")

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        self._losses.pop("", None)
        neighbours = [self._resources.capacity(node) for node in self._cluster.nodes if node.node_id == handle.place]
        return handle.remote.call("begin_in", self._folder, self._start, max([1, *neighbours]))

    def reason_of(self, error: Exception) -> str:
        return reason_of(error)

    def note(self, handle: WorkerHandle, event: WorkerUpdate | WorkerLost) -> None:
        node_id = handle.place or ""
        if isinstance(event, WorkerUpdate):
            if event.finished:
                self._losses.pop(node_id, None)
            return
        self._error = event.error or self._error
        self._losses[node_id] += 1
        if node_id:
            self._unplaced_since = self._clock()
            if isinstance(event.error, UsageError) or self._losses[node_id] >= _MAX_LOSSES:
                self._exclude(node_id)

    def _exclude(self, node_id: str) -> None:
        """Place no more workers on a machine; workers that wait for a place are placed again."""
        self._excluded.add(node_id)
        for handle in self.handles:
            if handle.place is None:
                handle.place_again()

    def _fitting(self, nodes: Iterable[Node]) -> set[str]:
        """The ids of the machines that have room for a worker."""
        return {node.node_id for node in nodes if self._resources.capacity(node)}

    def _find_no_place(self) -> WorkerLost | None:
        if self._losses[""] >= _MAX_UNPLACED:
            return WorkerLost("workers are lost before they have a place", self._error)
        if self._nodes is not (nodes := self._cluster.nodes):  # the cluster updates them once a second
            self._nodes, self._fit = nodes, self._fitting(nodes)
        if self._fit and self._fit <= self._excluded:
            return WorkerLost(_NO_MACHINE, self._error)
        if not any(handle.place for handle in self.handles) and self._clock() - self._unplaced_since > _NO_ROOM_S:
            reason = _NO_ROOM.format(needs=self._resources)
            return WorkerLost(reason, NoRoom(f"{reason}; run again to resume"))
        return None

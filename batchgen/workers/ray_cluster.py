"""A Ray cluster: joining it, the machines that it has, and actors on them. The only module that imports Ray.

Signal handlers are restored, and Ray's output does not reach the user's terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from batchgen.config.cluster import ClusterSpec
from batchgen.core.errors import UsageError

_WITHOUT_RAY = "ray is not installed: pip install 'ray>=2.52', here and on every machine of the cluster"
_REMEDIES = (
    "give auto on a machine of the cluster, or the address that ray start printed; where it was started with "
    "RAY_AUTH_MODE=token, set that here too and have its token in ~/.ray/auth_token"
)
_NODE_ID = "ray.io/node-id"  # a label that Ray gives every machine
_CONNECT_S = 10.0
_LOOK_S = 1.0  # between two looks at the machines
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray announces that this will change
}
# What Ray says about a lost actor, and what the user is told.
_REASONS = {
    "node has died": "its machine is gone",
    "node is dead": "its machine is gone",
    "preempted": "its machine was taken away",
    "running low on memory": "its machine was short of memory, and Ray ended it",
    "No module named": "what it needs is not installed there: install the same batchgen on every machine",
    "worker process has died": "its process died",
    "ray.kill": "it was ended",
}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster with all its resources, in use or not."""

    node_id: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """Resources of one worker."""

    cpus: float
    gpus: float
    resources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: ClusterSpec, device: str, nodes: Collection[Node]) -> WorkerResources:
        """The resources that a job asks for, per worker.

        By default a worker has one GPU, if the job may run on GPUs and the cluster has some; otherwise as many CPUs as
        the smallest machine.
        """
        has_gpus = device != "cpu" and any(node.resources.get("GPU") for node in nodes)
        gpus = cluster.gpus_per_worker
        if gpus is None:
            gpus = int(has_gpus or device.startswith("cuda"))
        smallest = min((cpus for node in nodes if (cpus := node.resources.get("CPU", 0)) >= 1), default=1)
        cpus = cluster.cpus_per_worker or (1 if gpus else int(smallest))
        return cls(cpus, gpus, cluster.resources or {})

    @property
    def all(self) -> dict[str, float]:
        """Amounts by Ray's names."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of an actor or a task."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources) or None}

    def capacity(self, node: Node) -> int:
        """Number of workers that a machine has room for."""
        return min(int(node.resources.get(name, 0) / amount) for name, amount in self.all.items())

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.all.items())


class Cluster:
    """This process as a driver on a cluster: ``address`` is HOST:PORT, or "auto" for this machine's cluster.

    A thread looks at the machines once a second: ``nodes`` are those alive. Raises UsageError if the cluster
    cannot be reached.
    """

    def __init__(self, address: str) -> None:
        self._is_ours = _connect(address)
        self.nodes: tuple[Node, ...] = ()
        self._is_over = threading.Event()
        self._look()
        threading.Thread(target=self._watch, name="batchgen-ray", daemon=True).start()

    def close(self) -> None:
        """Leave the cluster, which ends all actors; an earlier session of this process stays."""
        import ray

        self._is_over.set()
        if self._is_ours:
            ray.shutdown()

    def start(self, cls: type, needs: WorkerResources, excluded: Collection[str] = ()) -> Any:
        """Begin to start an actor on a machine that is not excluded; does not wait.

        Ray does not start it again when it is lost: that would hide the loss.
        """
        import ray

        label_selector = {_NODE_ID: f"!in({','.join(sorted(excluded))})"} if excluded else None
        made: Any = ray.remote(cls)
        return made.options(**needs.options, label_selector=label_selector, max_restarts=0, max_task_retries=0).remote()

    @staticmethod
    def end(actor: Any) -> None:
        """End an actor at once, whatever it does; does not wait."""
        import ray

        with suppress(Exception):  # it may be gone
            ray.kill(actor)

    @staticmethod
    def own_node() -> str:
        """The id of the machine that runs the calling actor."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            with suppress(Exception):  # the cluster is out of reach; losses are told by the actors' own calls
                self._look()

    def _look(self) -> None:
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        self.nodes = tuple(Node(node["NodeID"], node["Resources"]) for node in alive)


def reason_of(error: Exception) -> str:
    """Reason why an actor's call gave no result, in a few words."""
    text = str(error)
    return next((reason for phrase, reason in _REASONS.items() if phrase in text), text.strip().partition("\n")[0])


def _connect(address: str) -> bool:
    """Join a cluster; returns False if this process has joined one before. Raises UsageError."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError(_WITHOUT_RAY) from None
    if ray.is_initialized():
        return False
    if address != "auto":
        _require_reachable(address)
    try:
        with _same_signal_handlers():
            ray.init(address=address, job_config=_job_config(), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UsageError(f"cluster.ray = {address}: {why or type(error).__name__}: {_REMEDIES}") from None
    # Otherwise Ray would still print each loss of a process to stdout.
    with suppress(AttributeError):  # private to Ray
        ray._private.worker._worker_logs_enabled = False
    return True


def _job_config() -> Any:
    """Settings of a driver that keep actors from importing modules of its working folder, which may hold any data.

    Ray would put that folder first on their path, unless the driver is a client's or ``ray job submit`` has sent a
    folder of code along.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job="RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ)


def _require_reachable(address: str) -> None:
    """Raises UsageError if nothing answers; Ray would try for long, and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster at {address}: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Restore the handlers that Ray replaces; a signal that comes meanwhile is passed to them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in signals}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""A Ray cluster on this machine: a head without CPUs, and machines of one CPU that come and go. Not a test itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_helpers import ENVIRONMENT


class Machines:
    """Two machines of one CPU by default; ``address`` is that of the head."""

    def __init__(self, number: int = 2) -> None:
        os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]  # of what Ray starts
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address: str = self._cluster.address
        self._nodes = [self.add() for _ in range(number)]

    def add(self, environment: Mapping[str, str] | None = None, resources: Mapping[str, float] | None = None) -> Any:
        """Another machine, with some resources more, whose workers have some variables more."""
        more = {"env_vars": dict(environment or {}), "resources": dict(resources or {})}
        return self._cluster.add_node(num_cpus=1, **more)

    def remove(self, node: Any) -> None:
        """A machine is gone, from one moment to the next."""
        self._cluster.remove_node(node, allow_graceful=False)

    def settle(self) -> None:
        """Wait until the head knows which machines there are."""
        self._cluster.wait_for_nodes(timeout=60)

    def workers(self) -> list[int]:
        """The processes of actors on all machines."""
        raylets = {process.pid for node in self._cluster.list_all_nodes() for process in _raylets(node)}
        return [pid for pid, parent, name in _processes() if parent in raylets and "Actor" in name]

    def until_no_workers(self) -> float:
        """Wait until all actors are gone; how many seconds that took."""
        began_at = time.monotonic()
        while self.workers():
            assert time.monotonic() - began_at < 60
            time.sleep(0.02)
        return time.monotonic() - began_at

    def close(self) -> None:
        self._cluster.shutdown()


def _raylets(node: Any) -> list[Any]:
    return [info.process for info in node.all_processes.get("raylet", [])]


def _processes() -> list[tuple[int, int, str]]:
    """Id, parent and command line of all processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found.append((int(folder.name), parent, (folder / "cmdline").read_text()))
        except OSError:  # it has ended
            continue
    return found

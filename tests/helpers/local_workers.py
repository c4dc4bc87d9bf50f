"""Workers in processes of their own, as ``--workers`` has them, with what tests do to them. Not a test itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from batchgen.run.loader import EngineFactory
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.local import LocalLauncher, WorkerProcess
from batchgen.workers.messages import Assignment
from batchgen.workers.placement import on_workers
from batchgen.workers.slices import MachineSlice
from batchgen.workers.worker import Start


def local_workers(
    number: int,
    engine: EngineFactory,
    *,
    on_launch: Callable[[WorkerHandle], object] = lambda handle: None,
    step_timeout_s: float = 60.0,
) -> EngineFactory:
    """Workers in processes; ``on_launch`` sees each handle that is made."""

    class Launcher(LocalLauncher):
        def launch(self) -> WorkerHandle | None:
            handle = super().launch()
            if handle is not None:
                on_launch(handle)
            return handle

    def make_launcher(start: Start) -> LocalLauncher:
        return Launcher(replace(start, engine_factory=engine), [MachineSlice()] * number)

    return on_workers(make_launcher, step_timeout_s)


def process_of(handle: WorkerHandle) -> subprocess.Popen[bytes]:
    """The process of a local worker."""
    assert isinstance(handle.remote, WorkerProcess)
    return handle.remote.process


def signalled(handle: WorkerHandle, number: int) -> None:
    """Send the signal to a worker once it has been given rows."""
    send = handle.send

    def send_and_signal(assignment: Assignment) -> None:
        send(assignment)
        if assignment.tasks:
            handle.exchange()
            process_of(handle).send_signal(number)

    handle.send = send_and_signal  # type: ignore[method-assign]


class Process(NamedTuple):
    """A process of this machine."""

    pid: int
    state: str
    parent: int
    group: int
    command: str


def processes() -> Iterator[Process]:
    """All that run, or have ended and are not waited for yet (state "Z")."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_text(errors="replace")
            yield Process(int(folder.name), state, int(parent), int(group), command)


def workers_of(driver: int) -> set[int]:
    """The process ids of a driver's workers."""
    return {found.pid for found in processes() if found.parent == driver and "batchgen.workers.worker" in found.command}


def still_there(pids: Collection[int], within_s: float = 60.0) -> set[int]:
    """Those of the processes that have not ended after so long."""
    until = time.monotonic() + within_s
    while (left := {p.pid for p in processes() if p.pid in pids and p.state != "Z"}) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def kill(pids: Collection[int]) -> int:
    """SIGKILL to processes; how many were there."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count

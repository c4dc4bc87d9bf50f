"""Workers in processes of their own, as ``--workers`` has them, with what tests do to them. Not a test itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from batchgen.run.loader import EngineFactory
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.local import LocalLauncher, LocalWorker
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
    assert isinstance(handle.remote, LocalWorker)
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


def workers_of(driver: int) -> set[int]:
    """The process ids of a driver's workers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == driver and b"batchgen.workers.worker" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def still_there(pids: Collection[int], within_s: float = 60.0) -> set[int]:
    """Those of the processes that have not ended after so long."""
    until = time.monotonic() + within_s
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pids: Collection[int]) -> int:
    """SIGKILL to processes; how many were there."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count

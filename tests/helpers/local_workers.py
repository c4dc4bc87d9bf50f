"""Workers in processes of their own, as ``--workers`` has them, with what tests do to them. Not a test itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from batchgen.executors.backend import on_workers
from batchgen.executors.local import LocalCrew, LocalSeat
from batchgen.executors.messages import Grant
from batchgen.executors.shares import Share
from batchgen.executors.worker import Start
from batchgen.run.loader import EngineFactory


def local_workers(
    number: int,
    engine: EngineFactory,
    *,
    on_hire: Callable[[LocalSeat], object] = lambda seat: None,
    patience_s: float = 60.0,
) -> EngineFactory:
    """A crew of processes; ``on_hire`` sees each seat that is made."""

    class Crew(LocalCrew):
        def hire(self) -> LocalSeat | None:
            seat = super().hire()
            if seat is not None:
                on_hire(seat)
            return seat

    def make_crew(start: Start) -> LocalCrew:
        return Crew(replace(start, engine_factory=engine), [Share()] * number)

    return on_workers(make_crew, patience_s)


def signalled(seat: LocalSeat, number: int) -> None:
    """Make a seat send the signal to its worker once that has been given rows."""
    send = seat.send

    def send_and_signal(grant: Grant) -> None:
        send(grant)
        if grant.tasks:
            seat.process.send_signal(number)

    seat.send = send_and_signal  # type: ignore[method-assign]


def workers_of(driver: int) -> set[int]:
    """The process ids of a driver's workers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == driver and b"batchgen.executors.process" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def still_there(pids: Collection[int], within_s: float = 5.0) -> set[int]:
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

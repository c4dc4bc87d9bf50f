"""Workers that are processes of this machine, each with its share of processors, devices and memory.

A worker is a fresh interpreter: the driver has threads, and no copy of a process with threads can be trusted. They
speak over a socket, and the driver waits for all of them at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from batchgen.core.errors import BatchgenError
from batchgen.core.units import shortened
from batchgen.executors.messages import Event, Grant, Lost, Seat
from batchgen.executors.pipe import Pipe
from batchgen.executors.shares import Share
from batchgen.executors.worker import Start

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from batchgen.executors.process import main
main(*json.loads(sys.argv[2]))
"""
_REAPED_S = 5.0  # a process that was killed takes as long at most, unless a device holds it


class LocalSeat:
    """A process as a ``Seat``; what it writes to its standard output and error is kept, not shown."""

    def __init__(self, name: str, share: Share, start: Start) -> None:
        self.name = name
        self.share = share
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the seat
        ours, theirs = socket.socketpair()
        folders = [str(Path(folder).absolute()) for folder in (*filter(None, sys.path), str(Path(__file__).parents[2]))]
        arguments = folders, [theirs.fileno(), os.getpid()]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *map(json.dumps, arguments)],  # -P: no module from here
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )
        ours.setblocking(False)
        self.pipe = Pipe(ours)
        self._is_lost = False
        self.pipe.send(share)
        self.pipe.send(start)

    def send(self, grant: Grant) -> None:
        self.pipe.send(grant)

    def poll(self) -> list[Event]:
        if self._is_lost:
            return []
        self.pipe.flush()
        events: list[Event] = list(self.pipe.receive())
        self._is_lost = any(isinstance(event, Lost) for event in events)
        if self.pipe.is_closed and not self._is_lost:
            self._is_lost = True
            events.append(Lost(self._ending()))
        if self._is_lost:
            self.close()
        return events

    def close(self) -> None:
        self._is_lost = True
        self.process.kill()
        self.pipe.end.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAPED_S)
        self._said.close()

    def _ending(self) -> str:
        """How the process ended, with the last line that it wrote."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAPED_S)  # it has closed its socket, so it is about to end
        code = self.process.returncode
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}  # which lack most real-time signals
            found = f"it was ended by {names.get(-code, f'signal {-code}')}"
            return f"{found}, as the system does when memory is short" if code == -signal.SIGKILL else found
        self._said.seek(max(0, os.fstat(self._said.fileno()).st_size - 4096))
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"it ended with exit code {code}" + (f": {shortened(last, 300)}" if last else "")


class LocalCrew:
    """One process per share; a share whose worker is gone goes to the next one."""

    def __init__(self, start: Start, shares: Sequence[Share]) -> None:
        self.num_wanted = (1, len(shares))
        self.is_one_place = True
        self._start = start
        self._seats: list[LocalSeat | None] = [None] * len(shares)
        self._shares = shares
        self._num_hired = 0

    def hire(self) -> LocalSeat | None:
        """See ``Crew``. Raises BatchgenError where the machine has no room for a single process."""
        free = [i for i, seat in enumerate(self._seats) if seat is None or seat.process.poll() is not None]
        if not free:
            return None
        try:
            seat = LocalSeat(f"local-{self._num_hired + 1}", self._shares[free[0]], self._start)
        except OSError as error:
            if len(free) < len(self._seats):
                return None
            raise BatchgenError(
                f"cannot start a worker: {error.strerror}; raise the limit on processes or files"
            ) from error
        self._num_hired += 1
        self._seats[free[0]] = seat
        return seat

    def wait(self, seats: Iterable[Seat], timeout_s: float) -> None:
        poll = select.poll()
        for seat in seats:
            pipe = cast(LocalSeat, seat).pipe
            poll.register(pipe.end, select.POLLIN | (select.POLLOUT if pipe.has_more_to_send else 0))
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        for seat in self._seats:
            if seat is not None:
                seat.process.kill()
        for seat in self._seats:
            if seat is not None:
                seat.close()

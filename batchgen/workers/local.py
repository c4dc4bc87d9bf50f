"""Workers that are processes of this machine, each with its slice of processors, devices and memory.

Workers are fresh interpreters, called with pickles over sockets: forks of the driver could deadlock, as it has threads.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from batchgen.core.errors import BatchgenError
from batchgen.core.machine import fresh_python
from batchgen.core.units import shortened
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.slices import MachineSlice
from batchgen.workers.worker import Start

_PROGRAM = """
from batchgen.workers.worker import main
main(*json.loads(sys.argv[2]))
"""
_REAPED_S = 5.0  # a process that was killed takes as long at most, unless a device holds it
_MAX_OUTPUT_BLOCKS = 2048  # of 512 bytes


class WorkerGone(Exception):
    """A process has ended; the text says how."""


class WorkerProcess:
    """A ``Remote`` process; the end of its standard output and error is kept, not shown."""

    def __init__(self, part: MachineSlice) -> None:
        self.part = part
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                fresh_python(_PROGRAM, [theirs.fileno(), os.getpid()], options=["-P"]),  # no module from here
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._caller = ThreadPoolExecutor(1, "batchgen-worker")

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._caller.submit(self._ask, method, arguments)

    def kill(self) -> None:
        self.process.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a call under way, even of a process that a device holds
        self._caller.submit(self._bury)
        self._caller.shutdown(wait=False)

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._connection.send((method, arguments))
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerGone(self._ending()) from None
        if os.fstat(self._output.fileno()).st_blocks > _MAX_OUTPUT_BLOCKS:
            os.ftruncate(self._output.fileno(), 0)  # the worker continues at its offset, after a hole
        return answer

    def _bury(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAPED_S)
        self._connection.close()
        self._socket.close()
        self._output.close()

    def _ending(self) -> str:
        """End of the process in words, with the last line that it wrote."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAPED_S)  # it has closed its socket, so it is about to end
        code = self.process.returncode
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}  # most real-time signals are missing there
            ending = f"it was ended by {names.get(-code, f'signal {-code}')}"
            return f"{ending}, as the system does when memory is short" if code == -signal.SIGKILL else ending
        self._output.seek(max(0, os.fstat(self._output.fileno()).st_size - 4096))
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"it ended with exit code {code}" + (f": {shortened(last, 300)}" if last else "")


class LocalLauncher(WorkerLauncher):
    """One process per slice; the slice of a lost worker goes to the next one."""

    def __init__(self, start: Start, slices: Sequence[MachineSlice]) -> None:
        bounds = start.spec.cluster.bounds
        super().__init__((min(bounds[0], len(slices)) if bounds else 1, len(slices)))
        self._start = start
        self._workers: list[WorkerProcess | None] = [None] * len(slices)
        self._slices = slices

    def has_room(self) -> bool:
        if not self.handles:  # without a worker the driver only waits: killed workers end in a moment
            for worker in filter(None, self._workers):
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_REAPED_S)
        return bool(self._free())

    def launch(self) -> WorkerHandle | None:
        """See ``WorkerLauncher``. Raises BatchgenError if a single process does not fit in memory."""
        try:
            return super().launch()
        except OSError as error:
            if len(self._free()) < len(self._slices):
                return None
            raise BatchgenError(
                f"cannot start a worker: {error.strerror}; raise the limit on processes or files"
            ) from error

    def place(self) -> tuple[WorkerProcess, Future[str]]:
        number = self._free()[0]
        worker = self._workers[number] = WorkerProcess(self._slices[number])
        placed = Future[str]()
        placed.set_result("")
        return worker, placed

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        worker = cast(WorkerProcess, handle.remote)
        return worker.call("begin", self._start, worker.part)

    def _free(self) -> list[int]:
        """The slices without a process."""
        return [i for i, worker in enumerate(self._workers) if worker is None or worker.process.poll() is not None]

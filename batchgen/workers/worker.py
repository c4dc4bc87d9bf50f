"""A worker: loads the model like a single process, and runs the rows that its driver sends.

Every kind of worker starts from one picklable ``Start``. It stores nothing: the driver journals its answers.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn, cast

from batchgen.config.job import JobSpec
from batchgen.core.file_digests import Digests
from batchgen.core.machine import memory_errors
from batchgen.core.units import one_line
from batchgen.core.version import __version__
from batchgen.run.loader import EngineFactory, load_engine, read_model
from batchgen.workers.loop import EngineLoop, RowProcessor
from batchgen.workers.messages import HEARTBEAT_S, Assignment, Identity, WorkerLost, WorkerReady, WorkerUpdate
from batchgen.workers.slices import MachineSlice

if TYPE_CHECKING:
    from batchgen.engine import Engine

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Start:
    """The parameters of a worker: the job, the time that chat templates print, and ``Digests.to_plain`` of the driver.

    A worker need not read files for its fingerprint if their states are the same as in the digests.
    """

    spec: JobSpec
    rendered_at: datetime | None
    digests: Mapping[str, Any]
    engine_factory: EngineFactory = load_engine


class Worker:
    """A loaded model and the loop around its engine. Calls of its methods do not overlap."""

    def begin(self, start: Start, part: MachineSlice) -> WorkerReady | WorkerLost:
        """Load the model in this process, which takes its slice of the machine."""
        try:
            part.take()
            with memory_errors("running this command"):
                return self._load(start)
        except Exception as error:
            return lost_to(error)

    def exchange(self, assignments: tuple[Assignment, ...]) -> WorkerUpdate | WorkerLost:
        """Take in assignments; returns an update as soon as there is news, or after a heartbeat."""
        try:
            with memory_errors("running this command"):
                for assignment in assignments:
                    self._loop.assign(assignment)
                answers = self._loop.collect(HEARTBEAT_S)
                return replace(answers, facts=self._facts()) if answers.stopped else answers
        except Exception as error:
            return lost_to(error)

    def _load(self, start: Start) -> WorkerReady:
        spec, digests = start.spec, Digests(start.digests)
        model = read_model(spec, start.rendered_at)
        weights = model.files.fingerprint(digests)
        loaded = start.engine_factory(spec, model)
        model.files.check_unchanged(digests)
        loaded.prepare()
        engine = cast("Engine", loaded.engine)
        processor = RowProcessor(model.builder(spec), model.record_builder(spec))
        self._facts = loaded.facts
        self._loop = EngineLoop(engine, processor, num_launches=loaded.num_launches)
        return WorkerReady(
            Identity(weights, loaded.numerics, __version__),
            max_num_seqs=engine.max_num_seqs,
            threads=loaded.threads,
            place=platform.node(),
            notes=tuple(loaded.notes),
        )


def lost_to(error: BaseException) -> WorkerLost:
    """The message of the error that ends a worker; its traceback is left on stderr."""
    traceback.print_exception(error)
    return WorkerLost(one_line(error), _portable(error))


def _portable(error: BaseException) -> Exception:
    """A copy of the error that can be pickled, with the traceback as a note; else a RuntimeError with its message."""
    with suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and isinstance(copy, Exception) and str(copy) == str(error):
            copy.add_note("".join(traceback.format_exception(error)))
            return copy
    return RuntimeError(f"{type(error).__name__}: {error}")


def main(handle: int, driver: int) -> NoReturn:
    """Run the methods that the process ``driver`` calls through the socket ``handle``.

    When the driver ends, the socket closes and this process ends too; on Linux the system also kills it. It ignores
    signals that reach all processes of a job: its driver says when to stop.
    """
    _follow(driver)
    connection, worker = Connection(handle), Worker()
    try:
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(worker, method)(*arguments))
    except (EOFError, OSError):  # the driver is gone, or does not need the worker any more
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _follow(driver: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != driver:  # the driver had ended before
            os._exit(1)

"""A worker: loads the model as a single process would, and runs the rows that its driver sends.

Every kind of worker starts from one picklable ``Start``. It holds nothing durable: the driver journals what it answers.
"""

from __future__ import annotations

import os
import pickle
import platform
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from batchgen.config.job import JobSpec
from batchgen.core.fingerprint import Digests
from batchgen.core.units import one_line
from batchgen.core.version import __version__
from batchgen.executors.host import Host, SteppedEngine
from batchgen.executors.messages import Answers, Hello, Identity, Lost
from batchgen.executors.rows import RowMaker
from batchgen.run.loader import EngineFactory, load_engine, read_model


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker begins with: the job, when its run was begun, and ``Digests.to_plain`` of the driver.

    A worker whose files are in the states that the digests tell need not read them for its fingerprint.
    """

    spec: JobSpec
    begun_at: datetime | None
    digests: Mapping[str, Any]
    engine_factory: EngineFactory = load_engine


class Worker:
    """A loaded model and the host of its engine.

    Raises what ``read_model`` and the engine factory raise.
    """

    def __init__(self, start: Start) -> None:
        spec, digests = start.spec, Digests(start.digests)
        model = read_model(spec, start.begun_at)
        weights = model.fingerprint(digests)
        backend = start.engine_factory(spec, model)
        model.check_unchanged(digests)
        backend.prepare()
        self._facts = backend.facts
        engine = cast(SteppedEngine, backend.engine)
        maker = RowMaker(model.builder(spec.input, spec.sampling, spec.sampling_columns), model.payloads(spec))
        self.hello = Hello(
            Identity(weights, backend.numerics, __version__),
            max_num_seqs=engine.max_num_seqs,
            threads=backend.threads,
            place=platform.node(),
            pid=os.getpid(),
            notes=backend.notes,
        )
        self._host = Host(engine, maker)
        self.put = self._host.put
        self.close = self._host.close

    def take(self, timeout_s: float) -> Answers:
        """See ``Host.take``; the last answers have the facts."""
        answers = self._host.take(timeout_s)
        return answers.with_facts(self._facts()) if answers.stopped else answers


def lost_to(error: BaseException) -> Lost:
    """What is told of the error that ends a worker; its traceback is left on stderr."""
    traceback.print_exception(error)
    return Lost(one_line(error), _portable(error))


def _portable(error: BaseException) -> Exception:
    """The error as it can be raised in another process; its traceback is a note."""
    with suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and isinstance(copy, Exception) and str(copy) == str(error):
            copy.add_note("".join(traceback.format_exception(error)))
            return copy
    return RuntimeError(f"{type(error).__name__}: {error}")

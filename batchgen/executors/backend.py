"""Where the engine of a job runs: in this process, or on workers, as [cluster] says. The job itself goes on as ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.executors.engine import PoolEngine
from batchgen.executors.identity import Gate
from batchgen.executors.local import LocalCrew
from batchgen.executors.messages import Crew
from batchgen.executors.pool import Pool
from batchgen.executors.ray_crew import RayCrew
from batchgen.executors.shares import share_out
from batchgen.executors.worker import Start
from batchgen.run import job, retry
from batchgen.run.backend import Backend
from batchgen.run.invocation import Outcome, RunOptions
from batchgen.run.loader import EngineFactory, ModelInfo, load_engine, start_kernels


def run_job(
    spec: JobSpec, options: RunOptions | None = None, *, engine_factory: EngineFactory | None = None
) -> Outcome:
    """Run a job, or what is left of it, in this process or on the workers of [cluster].

    See ``batchgen.run.job.run_job``. Workers make their engines with ``engine_factory``, which must then be picklable.
    """
    return job.run_job(spec, options, engine_factory=placed(engine_factory or load_engine))


def retry_job(
    folder: Path,
    options: RunOptions,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    engine_factory: EngineFactory | None = None,
) -> Outcome:
    """See ``run_job`` and ``batchgen.run.retry.retry_job``."""
    return retry.retry_job(folder, options, flags, engine_factory=placed(engine_factory or load_engine))


def placed(engine_factory: EngineFactory) -> EngineFactory:
    """A factory of the engine that a job asks for, made by ``engine_factory`` here or in each worker."""

    def load(spec: JobSpec, model: ModelInfo) -> Backend:
        if not spec.cluster.is_used:
            return engine_factory(spec, model)

        def make_crew(start: Start) -> Crew:
            start = replace(start, engine_factory=engine_factory)
            if spec.cluster.ray:
                return RayCrew(start, model.config, model.begun.num_rows)
            if engine_factory is load_engine:
                start_kernels(spec, model.config)  # with all processors, beside the start of the workers
            return LocalCrew(start, share_out(spec, model.config, model.begun.num_rows))

        return on_workers(make_crew, spec.cluster.patience_s)(spec, model)

    return load


def on_workers(make_crew: Callable[[Start], Crew], patience_s: float = 60.0) -> EngineFactory:
    """An engine factory: ``make_crew`` makes the crew whose workers begin with a ``Start``."""

    def load(spec: JobSpec, model: ModelInfo) -> Backend:
        begun, gate = model.begun, Gate(model.begun)
        crew = make_crew(Start(spec, begun.at, begun.digests))
        engine = PoolEngine(crew, Pool(patience_s=patience_s), gate.refusal, begun.note)
        try:
            hello = engine.begin()
        except BaseException:
            engine.close()
            raise
        return Backend(
            engine,
            dict(gate.numerics),
            hello.threads,
            facts=lambda: engine.facts,
            notes=hello.notes,
            takes_rows=True,
            close=engine.close,
            workers=engine.stats.live,
        )

    return load

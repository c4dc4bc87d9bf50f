"""Chooses where the engine of a job runs: in this process or on workers, as [cluster] says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from batchgen.config.job import JobSpec
from batchgen.core.numerics import Numerics
from batchgen.core.version import __version__
from batchgen.input.rows import row_chars
from batchgen.output.manifest import differences
from batchgen.run import job
from batchgen.run.invocation import RunOptions
from batchgen.run.loaded_engine import LoadedEngine, RunContext
from batchgen.run.loader import EngineFactory, ModelInfo, load_engine, start_kernels
from batchgen.run.outcome import Outcome
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.driver import WorkersEngine
from batchgen.workers.handle import WorkerLauncher
from batchgen.workers.local import LocalLauncher
from batchgen.workers.messages import WorkerReady
from batchgen.workers.ray_launcher import RayLauncher
from batchgen.workers.slices import split_machine
from batchgen.workers.worker import Start
from batchgen.workers.worker_state import Liveness


def run_placed(
    spec: JobSpec,
    options: RunOptions | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    lines: Iterable[bytes] | None = None,
) -> Outcome:
    """Run a job, or what is left of it, in this process or on the workers of [cluster].

    See ``batchgen.run.job.run_job``. Workers make their engines with ``engine_factory``, which must then be picklable.
    """
    return job.run_job(spec, options, engine_factory=placed(engine_factory or load_engine), lines=lines)


def placed(engine_factory: EngineFactory) -> EngineFactory:
    """A factory of the engine that a job asks for, made by ``engine_factory`` here or in each worker."""

    def load_placed(spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        """See ``load_engine``; raises UsageError if a cluster cannot be reached, NoWorkers if all workers end."""
        if not spec.cluster.is_used:
            return engine_factory(spec, model)

        def make_launcher(start: Start) -> WorkerLauncher:
            start = replace(start, engine_factory=engine_factory)
            if spec.cluster.ray:
                return RayLauncher(start, model.context.num_rows)
            if engine_factory is load_engine:
                start_kernels(spec, model.config)  # with all processors, while the workers start
            context, config, forms = model.context, model.config, spec.model
            dtype = config.auto_dtype(is_cpu=True) if forms.dtype == "auto" else forms.dtype
            weight_bytes = config.model_bytes(dtype, forms.weights, forms.activations, is_cpu=True)
            return LocalLauncher(start, split_machine(spec, context.num_rows, weight_bytes, context.note))

        return on_workers(make_launcher, spec.cluster.step_timeout_s, spec.cluster.load_timeout_s)(spec, model)

    return load_placed


def on_workers(
    make_launcher: Callable[[Start], WorkerLauncher], step_timeout_s: float = 60.0, load_timeout_s: float = 1800.0
) -> EngineFactory:
    """An engine factory: ``make_launcher`` makes the launcher whose workers begin with a ``Start``."""

    def load_workers(spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        """Returns when the first worker is ready. Raises as ``WorkersEngine.begin``."""
        context, gate = model.context, IdentityGate(model.context)
        launcher = make_launcher(Start(spec, context.rendered_at, context.digests))
        liveness = Liveness(step_timeout_s, load_timeout_s)
        dispatcher = RowDispatcher(num_chars=row_chars, num_workers=launcher.num_wanted[1])
        engine = WorkersEngine(launcher, dispatcher, liveness, gate.refusal, context.note)
        try:
            first = engine.begin()
        except BaseException:
            engine.close()
            raise
        return LoadedEngine(
            engine,
            gate.numerics,
            first.threads,
            facts=lambda: engine.facts,
            notes=first.notes,
            takes_rows=True,
            close=engine.close,
            workers=engine.stats.live,
        )

    return load_workers


class IdentityGate:
    """Gate that only lets workers take part in a run if their version, weights and ``numerics`` are the run's."""

    def __init__(self, context: RunContext) -> None:
        self.numerics: dict[str, str] = dict(context.numerics or {})
        self._context = context

    def refusal(self, ready: WorkerReady) -> str:
        """The reason why a worker may not take part; "" if it may."""
        identity = ready.identity
        if identity.version != __version__:
            return f"it runs batchgen {identity.version}, this process {__version__}"
        if changes := differences(self._context.weights, identity.weights):
            return f"its model is another one: {changes[0]}"
        its, agreed = Numerics.of(identity.numerics), Numerics.of(self.numerics or identity.numerics)
        if not (why := agreed.refusal(its, may_mix_kernels=self._context.may_mix_kernels)):
            self.numerics = replace(agreed, kernels=agreed.kernels or its.kernels).plain
        return why

"""Workers whose rows would be others than the run's are turned away, by name and with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, quiet, rows_of
from stub_engine import stub_factory
from thread_workers import ThreadLauncher

from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.version import __version__
from batchgen.output.rundir import RunDir
from batchgen.run.loaded_engine import RunContext
from batchgen.run.loader import EngineFactory
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.driver import WorkersEngine
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.messages import Identity, WorkerReady
from batchgen.workers.placement import IdentityGate, on_workers
from batchgen.workers.worker import Start
from batchgen.workers.worker_state import Liveness

WEIGHTS = {"model.safetensors": "ab" * 32}
NUMERICS = {"dtype": "bfloat16", "device": "cpu", "kernels": "avx512"}


def hello(**changes: Any) -> WorkerReady:
    """A worker like the others, but for some of its identity."""
    identity = replace(Identity(WEIGHTS, NUMERICS, __version__), **changes)
    return WorkerReady(identity, max_num_seqs=4, threads=1, place="node7")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": {"model.safetensors": "cd" * 32}}, "its model is another one: model.safetensors"),
        ({"weights": {**WEIGHTS, "adapter": {"adapter.safetensors": "00"}}}, "its model is another one: adapter"),
        ({"version": "0.0.9"}, "it runs batchgen 0.0.9, this process"),
        ({"numerics": {**NUMERICS, "dtype": "float32"}}, "float32 on cpu gives other tokens than bfloat16 on cpu"),
        ({"numerics": {**NUMERICS, "device": "cuda"}}, "bfloat16 on cuda gives"),
        ({"numerics": {**NUMERICS, "llguidance": "1.8.0"}}, "llguidance"),
        (
            {"numerics": {**NUMERICS, "kernels": "avx2"}},
            "the kernels avx2 add up in another order than the kernels avx512",
        ),
    ],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stranger_is_told_by_what_differs(changes: Mapping[str, Any], said: str, has_begun: bool) -> None:
    gate = IdentityGate(RunContext(weights=WEIGHTS, numerics=NUMERICS if has_begun else None))
    if not has_begun:
        assert gate.refusal(hello()) == ""
    assert said in gate.refusal(hello(**changes))
    assert gate.refusal(hello()) == "" and gate.numerics == NUMERICS


def test_several_kernel_sets_are_taken_where_the_run_takes_them() -> None:
    gate = IdentityGate(RunContext(weights=WEIGHTS, numerics=NUMERICS, may_mix_kernels=True))
    other = hello(numerics={**NUMERICS, "kernels": "avx2"})
    assert [gate.refusal(worker) for worker in (hello(), other, hello(), other)] == [""] * 4
    assert gate.numerics == NUMERICS
    assert "other tokens" in gate.refusal(hello(numerics={**NUMERICS, "dtype": "float32"}))


def test_workers_of_a_run_of_an_earlier_build_are_held_against_each_other() -> None:
    gate = IdentityGate(RunContext(weights=WEIGHTS, numerics={"dtype": "bfloat16", "device": "cpu"}))
    assert gate.refusal(hello()) == ""
    assert gate.refusal(hello(numerics={**NUMERICS, "kernels": "avx2"}))


class MixedLauncher(ThreadLauncher):
    """Its workers have these kernels by turns."""

    kernels: tuple[str, ...] = ()

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        number = int(handle.name.removeprefix("thread-"))
        self.start = replace(self.start, engine_factory=with_kernels(self.kernels[number % 2]))
        return super().begin(handle)


def with_kernels(kernels: str) -> EngineFactory:
    return stub_factory(step_s=0.001, numerics={"dtype": "float32", "device": "stub", "kernels": kernels})


def mixed(*kernels: str) -> EngineFactory:
    def make_launcher(start: Start) -> MixedLauncher:
        launcher = MixedLauncher(start, 2)
        launcher.kernels = kernels
        return launcher

    return on_workers(make_launcher)


def kernels_of(folder: Path) -> str:
    manifest = RunDir(folder).read_manifest()
    assert manifest is not None
    return str(manifest.fingerprints["numerics"]["kernels"])


def test_rows_go_on_with_the_workers_that_fit(job: JobMaker) -> None:
    job.write(rows_of(50))
    assert job.run(engine_factory=mixed("avx512", "avx2")).exit_code == ExitCode.OK
    assert kernels_of(job.output) in ("avx512", "avx2")


def test_a_mix_that_is_allowed_runs(job: JobMaker) -> None:
    job.write(rows_of(400))
    options = quiet(allow_mixed_kernels=True)
    assert job.run(options=options, engine_factory=mixed("avx512", "avx2")).exit_code == ExitCode.OK
    assert len(job.outputs()) == 400


def test_a_resume_lets_no_stranger_in(job: JobMaker) -> None:
    job.write(rows_of(50))
    begun = job.run(options=quiet(max_total_tokens=100), engine_factory=with_kernels("avx512"))
    assert begun.exit_code == ExitCode.STOPPED
    with pytest.raises(UsageError, match=r"no worker can be used.* the kernels avx2 add up .* kernels avx512"):
        job.run(engine_factory=mixed("avx2", "avx2"))
    assert job.run(engine_factory=mixed("avx2", "avx512")).exit_code == ExitCode.OK
    assert kernels_of(job.output) == "avx512"


def test_where_all_are_turned_away_the_reason_is_told(job: JobMaker) -> None:
    launcher = ThreadLauncher(Start(job.spec(), None, {}, stub_factory()), 1)
    with pytest.raises(UsageError, match=r"^no worker can be used: on \S+ it is odd$"):
        WorkersEngine(launcher, RowDispatcher(), Liveness(), lambda hello: "it is odd").begin()


def test_where_workers_are_on_other_machines_others_take_the_place_of_those_turned_away(job: JobMaker) -> None:
    launcher, seen = ThreadLauncher(Start(job.spec(), None, {}, stub_factory()), 1), []
    launcher.is_local = False
    engine = WorkersEngine(
        launcher, RowDispatcher(), Liveness(), lambda hello: "" if len(seen) == 2 else seen.append(hello) or "it is odd"
    )
    engine.begin()
    engine.close()
    assert launcher.num_launched == 3

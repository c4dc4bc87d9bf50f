"""Jobs on a Ray cluster: the run directory is that of one process, whatever happens to a worker or a machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_workers import processes
from loopback import is_inside
from run_helpers import (
    ENVIRONMENT,
    MODEL,
    REPOSITORY,
    JobMaker,
    finish,
    read_lines,
    rows_of,
    start,
    until_rows_are_done,
)
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.config.cluster import ClusterSpec
from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import EngineFactory, ModelInfo
from batchgen.workers.placement import on_workers
from batchgen.workers.ray_launcher import RayLauncher
from batchgen.workers.worker import Start

pytestmark = [pytest.mark.ray, pytest.mark.nightly]  # the cluster alone takes 10 s to start


class Machines:
    """A cluster here: a head without CPUs, and machines of one CPU that come and go; ``address`` is of the head."""

    def __init__(self) -> None:
        os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]  # of what Ray starts
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address: str = self._cluster.address
        for _ in range(2):
            self.add()

    def add(self, environment: Mapping[str, str] | None = None, resources: Mapping[str, float] | None = None) -> Any:
        """Another machine, with some resources more, whose workers have some variables more."""
        more = {"env_vars": dict(environment or {}), "resources": dict(resources or {})}
        return self._cluster.add_node(num_cpus=1, **more)

    def remove(self, node: Any) -> None:
        """A machine is gone, from one moment to the next."""
        self._cluster.remove_node(node, allow_graceful=False)

    def settle(self) -> None:
        """Wait until the head knows which machines there are."""
        self._cluster.wait_for_nodes(timeout=60)

    def workers(self) -> list[int]:
        """The processes of actors on all machines."""
        infos = [info for node in self._cluster.list_all_nodes() for info in node.all_processes.get("raylet", [])]
        raylets = {info.process.pid for info in infos}
        return [found.pid for found in processes() if found.parent in raylets and "Actor" in found.command]

    def until_no_workers(self) -> None:
        """Wait until all actors are gone."""
        give_up_at = time.monotonic() + 60
        while self.workers():
            assert time.monotonic() < give_up_at
            time.sleep(0.02)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """The cluster of all tests; each leaves it with two machines."""
    if not is_inside():
        yield None
        return
    made = Machines()
    yield made
    made.close()


Act = Callable[[RayLauncher], object]


def workers(
    machines: Any,
    bounds: str = "2",
    *,
    at: dict[int, Act] | None = None,
    engine: EngineFactory | None = None,
    step_timeout_s: float = 60.0,
    **stub: Any,
) -> EngineFactory:
    """Workers on the cluster, with stub engines by default; ``at`` so many answers something is done to them."""
    cluster = ClusterSpec(ray=machines.address, workers=bounds)
    launchers: list[RayLauncher] = []

    def load(spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        def make_launcher(start: Start) -> RayLauncher:
            started = engine or stub_factory(**{"step_s": 0.002, **stub})
            made = replace(start, spec=replace(spec, cluster=cluster), engine_factory=started)
            launchers.append(RayLauncher(made, None))
            return launchers[-1]

        backend = on_workers(make_launcher, step_timeout_s)(spec, model)
        run = backend.engine.run

        def watched(tasks: Iterable[Any]) -> Iterator[Any]:
            for number, answer in enumerate(run(tasks), 1):
                yield answer
                if at and number in at:
                    at[number](launchers[-1])

        backend.engine.run = watched  # type: ignore[method-assign]
        return backend

    return load


def pids(launcher: RayLauncher) -> list[int]:
    """Processes of the workers that have a place."""
    return [handle.place.pid for handle in launcher.handles if handle.place]


def test_a_cluster_gives_the_rows_of_one_process(machines: Any, job: JobMaker) -> None:
    rows = [*rows_of(300), {"id": "q-3", "question": "again"}, "{", {"id": "x", "question": ""}]
    rows[7] = {"id": "c", "question": "Which?", "sampling": {"prompt_logprobs": 1}}
    job.write(rows)
    spec = {"sampling": {"temperature": 0.8, "n": 2, "logprobs": 1}}
    alone = job.elsewhere("alone", job.spec(**spec))
    assert job.elsewhere("dispatcher", job.spec(**spec), engine_factory=workers(machines)) == alone
    assert read_lines(job.folder / "dispatcher" / "errors.jsonl") == read_lines(job.folder / "alone" / "errors.jsonl")


def test_rows_of_a_worker_that_dies_go_to_others(machines: Any, job: JobMaker) -> None:
    job.write(rows_of(400))
    alone = job.elsewhere("alone", job.spec(sampling={"temperature": 0.8}))
    factory = workers(machines, at={100: lambda launcher: os.kill(pids(launcher)[0], signal.SIGKILL)})
    assert job.elsewhere("dispatcher", job.spec(sampling={"temperature": 0.8}), engine_factory=factory) == alone


def test_rows_of_a_worker_that_hangs_go_to_others(machines: Any, job: JobMaker) -> None:
    job.write(rows_of(400))
    alone = job.elsewhere("alone")
    factory = workers(
        machines, at={100: lambda launcher: os.kill(pids(launcher)[0], signal.SIGSTOP)}, step_timeout_s=2.0
    )
    assert job.elsewhere("dispatcher", engine_factory=factory) == alone


def test_rows_of_a_machine_that_is_gone_go_to_another(machines: Any, job: JobMaker) -> None:
    job.write(rows_of(400))
    alone = job.elsewhere("alone")
    node = machines.add()
    factory = workers(machines, "3", at={100: lambda launcher: machines.remove(node)})
    assert job.elsewhere("dispatcher", engine_factory=factory) == alone


def test_a_machine_that_comes_late_gets_a_worker(machines: Any, job: JobMaker) -> None:
    job.write(rows_of(1200))
    alone = job.elsewhere("alone")
    nodes: list[Any] = []
    counts: list[int] = []

    def add(launcher: RayLauncher) -> None:
        counts.append(len(pids(launcher)))
        nodes.append(machines.add())
        until = time.monotonic() + 120  # bounds a failure
        while len(machines.workers()) < 3 and time.monotonic() < until:
            time.sleep(0.05)

    factory = workers(machines, "1:3", at={100: add, 1150: lambda launcher: counts.append(len(pids(launcher)))})
    assert job.elsewhere("dispatcher", engine_factory=factory) == alone
    assert counts == [2, 3]
    machines.remove(nodes[0])


@pytest.mark.parametrize(
    ("number", "ends_on_cluster"), [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGTERM, True)]
)
def test_a_driver_that_ends_takes_its_workers_along_and_resumes(
    machines: Any, job: JobMaker, number: int, ends_on_cluster: bool
) -> None:
    job.write(rows_of(600))
    alone = job.elsewhere("alone")
    job.output = job.folder / "dispatcher"
    command = ["run", job.toml(), "--ray", machines.address, "--workers", "2"]
    driver = start(command, step_s=0.05)
    until_rows_are_done(driver, job.output, 50)
    assert machines.workers()
    driver.send_signal(number)
    code, said = finish(driver)
    is_stopped = number == signal.SIGTERM  # saves what its workers have
    assert (code, "half done and saved" in said) == (ExitCode.STOPPED if is_stopped else -number, is_stopped), said
    machines.until_no_workers()
    code, said = finish(start(command if ends_on_cluster else command[:2]))
    assert (code, "finished already" in said) == (0, True), said
    assert job.outputs() == alone


def test_actors_import_nothing_of_the_drivers(machines: Any, job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(20))
    for name in ("tokenizers", "huggingface_hub", "jinja2"):  # which an actor imports, and a data set may contain
        (job.folder / f"{name}.py").write_text(f"open({str(job.folder / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(job.folder)
    code, said = finish(start(["run", job.toml(), "--ray", machines.address, "--workers", "1"]))
    assert code == ExitCode.OK, said
    assert not (job.folder / "ran").exists()


def test_without_a_worker_the_job_waits_for_a_machine(machines: Any, job: JobMaker) -> None:
    job.write(rows_of(400))
    alone = job.elsewhere("alone")
    job.output = job.folder / "dispatcher"
    only = {"batchgen-test": 1.0}
    node = machines.add(resources=only)
    where = ["--ray", machines.address, "--workers", "1", "--ray-resources", '{"batchgen-test": 1}']
    driver = start(["run", job.toml(), *where], step_s=0.05)
    try:
        until_rows_are_done(driver, job.output, 50)
        machines.remove(node)
        machines.until_no_workers()
        node = machines.add(resources=only)
        code, said = finish(driver)
    finally:
        machines.remove(node)
    assert code == 0, said
    assert "its machine is gone" in said and job.outputs() == alone


def batchgen(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and all output of the command line, with the model's own engine."""
    command = [sys.executable, "-m", "batchgen", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_machines_of_several_kinds_are_told_apart(machines: Any, job: JobMaker) -> None:
    """The model's own engine on two machines of this processor, and on one with a weaker one."""
    machines.settle()
    job.write(rows_of(12))
    assert batchgen("run", job.toml())[0] == 0
    alone, job.output = job.outputs(), job.folder / "dispatcher"
    on_cluster = ["--ray", machines.address]
    check = ["check", "--model", MODEL, *on_cluster]
    code, said = batchgen(*check)
    assert code == 0 and "all 2 machines compute the same bits" in said, said
    code, said = batchgen("run", job.toml(), *on_cluster, "--workers", "2")
    assert code == 0 and job.outputs() == alone, said

    node = machines.add({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2"})
    code, said = batchgen(*check)
    assert code == ExitCode.GATE_FAILED and "1 of 3 machines failed" in said and "kernels: was" in said, said
    job.output = job.folder / "strangers"
    code, said = batchgen("run", job.toml(), *on_cluster, "--workers", "3")
    assert code == 0 and job.output.exists(), said
    machines.remove(node)


def test_random_kills_of_workers_and_machines_lose_no_row_and_double_none(machines: Any, job: JobMaker) -> None:
    rows = [*rows_of(500), {"id": "q-3", "question": "again"}, "{", {"id": "x", "question": ""}]
    rows[7] = {"id": "c", "question": "Which?", "sampling": {"prompt_logprobs": 1}}
    rows[9] = {"id": "n", "question": "Three?", "sampling": {"n": 3, "temperature": 0.8, "seed": 5}}
    job.write(rows)
    spec = job.spec(sampling={"temperature": 0.8, "logprobs": 1})
    alone = job.elsewhere("alone", spec)
    rng, node, num_killed = random.Random(0), machines.add(), []

    def kill(launcher: RayLauncher) -> None:
        if found := machines.workers():
            os.kill(rng.choice(found), signal.SIGKILL)
            num_killed.append(1)

    at: dict[int, Act] = {rng.randrange(1, 495): kill for _ in range(12)}
    at[250] = lambda launcher: machines.remove(node)
    factory = workers(machines, "3", at=at)
    assert job.elsewhere("dispatcher", spec, engine_factory=factory) == alone
    assert read_lines(job.folder / "dispatcher" / "errors.jsonl") == read_lines(job.folder / "alone" / "errors.jsonl")
    assert len(num_killed) > 8


def test_the_recipe_for_a_cluster_runs(machines: Any, job: JobMaker) -> None:
    flags = ["--ray", machines.address, "--output", str(job.output), "--limit", "8", "--quiet"]
    assert call(["run", str(REPOSITORY / "jobs" / "ray.toml"), *flags]) == 0
    assert len(read_lines(job.output / "outputs.jsonl")) == 8

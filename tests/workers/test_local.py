"""Jobs on workers that are processes of this machine: what becomes of a run when these, or their driver, go."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import storm_runs
from local_workers import local_workers, process_of, signalled, still_there, workers_of
from repeats import SLOW_SHARE, share_of, slow
from run_helpers import ENVIRONMENT, JobMaker, finish, quiet, rows_of, start, survived, until_phase, until_rows_are_done
from stub_engine import stub_factory

from batchgen.config.job import JobSpec
from batchgen.core.errors import BatchgenError, ExitCode, ModelError, OutOfMemory
from batchgen.run.invocation import RunOptions
from batchgen.run.loaded_engine import LoadedEngine
from batchgen.run.loader import ModelInfo
from batchgen.workers.handle import WorkerHandle
from batchgen.workers.placement import run_placed

SAMPLED = {"sampling": {"temperature": 0.8, "n": 2, "logprobs": 1}}
TWO = {"cluster": {"workers": 2}}


def test_a_run_begun_by_one_process_is_finished_by_workers(job: JobMaker) -> None:
    job.write([*rows_of(150), {"id": "q-3", "question": "again"}, "{", {"id": "x", "question": ""}])
    wanted, errors = job.elsewhere("alone", job.spec(**SAMPLED)), (job.folder / "alone" / "errors.jsonl").read_bytes()
    assert job.run(job.spec(**SAMPLED), quiet(max_total_tokens=2000)).exit_code == ExitCode.STOPPED
    spec = job.spec(**SAMPLED, **TWO)
    assert run_placed(spec, quiet(), engine_factory=stub_factory()).exit_code == ExitCode.ROWS_FAILED
    assert job.outputs() == wanted
    assert (job.output / "errors.jsonl").read_bytes() == errors


def test_rows_behind_bad_ones_at_the_beginning_go_to_workers_as_any_others(job: JobMaker) -> None:
    job.write(["{", "[]", "{", *rows_of(9)])  # read in chunks that double: the first good row has company
    assert run_placed(job.spec(**TWO), quiet(), engine_factory=stub_factory()).exit_code == ExitCode.ROWS_FAILED
    assert [error["code"] for error in job.errors()] == ["bad_json", "bad_type", "bad_json"]
    assert job.outputs() == job.elsewhere("alone")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "is lost: it was ended by SIGKILL"),
        slow(signal.SIGRTMIN + 1, f"is lost: it was ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_rows_of_a_worker_that_dies_go_to_others(
    job: JobMaker, capfd: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    job.write(rows_of(80))
    handles: list[WorkerHandle] = []

    def on_launch(handle: WorkerHandle) -> None:
        handles.append(handle)
        if len(handles) == 1:
            signalled(handle, number)

    factory = local_workers(2, stub_factory(step_s=0.05), on_launch=on_launch)
    assert job.run(options=RunOptions(), engine_factory=factory).exit_code == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone")
    assert re.search(f"worker local-1 on .* {said}", capfd.readouterr().err)
    assert len(handles) == 3, "the lost worker was replaced, once"
    assert not still_there([process_of(handle).pid for handle in handles])


def test_rows_of_a_worker_that_is_stopped_for_a_while_are_run_by_the_other(job: JobMaker) -> None:
    job.write(rows_of(300))
    handles: list[WorkerHandle] = []

    def on_launch(handle: WorkerHandle) -> None:
        handles.append(handle)
        if len(handles) == 1:
            signalled(handle, signal.SIGSTOP)
            threading.Timer(4.0, process_of(handle).send_signal, [signal.SIGCONT]).start()

    factory = local_workers(2, stub_factory(step_s=0.02), on_launch=on_launch, step_timeout_s=1.5)
    assert job.run(engine_factory=factory).exit_code == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone")
    assert not still_there([process_of(handle).pid for handle in handles])


def test_workers_end_with_their_driver_and_the_run_goes_on(job: JobMaker) -> None:
    job.write(rows_of(600))
    toml = job.toml()
    process = start(["run", toml, "--workers", "2", "-q"], step_s=0.02)
    until_rows_are_done(process, job.output)
    pids = workers_of(process.pid)
    assert len(pids) == 2
    signalled_one, *_ = pids
    subprocess.run(["kill", "-STOP", str(signalled_one)], check=True)  # not even this one stays
    process.kill()
    finish(process)
    assert not still_there(pids)
    assert finish(start(["run", toml, "--workers", "2", "-q"]))[0] == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone")


def test_workers_end_with_a_driver_that_is_killed_while_they_load(job: JobMaker) -> None:
    job.write(rows_of(3))
    process = start(["run", job.toml(), "--workers", "2", "-q"], load_s=60)
    until_phase(process, job.output, "loading the model")
    while len(pids := workers_of(process.pid)) < 2:
        time.sleep(0.02)
    process.kill()
    finish(process)
    assert not still_there(pids)


def test_sigterm_saves_the_tokens_of_all_workers(job: JobMaker) -> None:
    lengths = (80 + 3 * number for number in range(40))  # rows of one length would end all at once
    job.write([{**row, "sampling": {"min_tokens": length}} for row, length in zip(rows_of(40), lengths, strict=True)])
    toml = job.toml(sampling={"max_tokens": 200})
    process = start(["run", toml, "--workers", "2"], step_s=0.02)
    until_rows_are_done(process, job.output, 16)  # more than the first worker has before the second one is ready
    pids = workers_of(process.pid)
    for pid in pids:  # whoever sends it to a whole group or service sends it to these too
        subprocess.run(["kill", "-TERM", str(pid)], check=True)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == ExitCode.STOPPED
    saved = re.search(r"(\d+) half done and saved; run again to resume", said)
    assert saved and int(saved[1]) > 8, "more than one worker can have"
    assert not still_there(pids)
    assert finish(start(["run", toml]))[0] == ExitCode.OK, "one process finishes it"
    assert job.outputs() == job.elsewhere("alone", job.spec(sampling={"max_tokens": 200}))


def test_a_second_sigint_ends_all_at_once(job: JobMaker) -> None:
    job.write(rows_of(30))
    process = start(["run", job.toml(), "--workers", "2"], step_s=1.5)
    until_phase(process, job.output, "generating")
    pids = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == ExitCode.STOPPED
    assert "stopped at once by a second SIGINT" in said
    assert not still_there(pids)


@dataclass
class Failing:
    """An engine factory that raises in workers."""

    error: Exception

    def __call__(self, spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [slow(ModelError("there is no such model"), "no such model"), (MemoryError(), "out of memory while running this")],
)
def test_what_no_worker_can_begin_with_ends_the_job_as_in_one(job: JobMaker, error: Exception, said: str) -> None:
    job.write(rows_of(3))
    wanted = type(error) if isinstance(error, BatchgenError) else OutOfMemory
    with pytest.raises(wanted, match=said):
        run_placed(job.spec(**TWO), quiet(), engine_factory=Failing(error))
    assert not (job.output / "job.json").exists(), "nothing was written"


@dataclass
class OutOfMemoryAt:
    """Stub engines that run out of memory at a step; a worker whose number is above ``num_short`` has enough."""

    step: int
    folder: Path
    num_short: int

    def __call__(self, spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        (self.folder / f"worker-{time.monotonic_ns()}").touch()
        is_short = len([*self.folder.glob("worker-*")]) <= self.num_short
        return stub_factory(before_step=self._check if is_short else None)(spec, model)

    def _check(self, step: int) -> None:
        if step >= self.step:
            raise OutOfMemory("out of memory while computing a step")


def test_where_memory_is_short_fewer_workers_go_on_and_no_row_is_convicted(job: JobMaker) -> None:
    job.write(rows_of(60))
    short_ones = OutOfMemoryAt(step=3, folder=job.folder, num_short=2)
    outcome = job.run(engine_factory=local_workers(3, short_ones))
    assert outcome.exit_code == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone")
    assert len([*job.folder.glob("worker-*")]) == 3, "none took the place of those"


def test_lasting_lack_of_memory_ends_the_job_with_its_message(job: JobMaker) -> None:
    job.write(rows_of(60))
    short_ones = OutOfMemoryAt(step=3, folder=job.folder, num_short=9)
    with pytest.raises(OutOfMemory, match="computing a step"):
        job.run(engine_factory=local_workers(2, short_ones))
    assert not job.errors()
    assert job.run().exit_code == ExitCode.OK
    assert job.outputs() == job.elsewhere("alone")


def test_a_worker_that_says_nothing_is_lost_with_its_last_line(job: JobMaker) -> None:
    job.write(rows_of(3))
    with pytest.raises(BatchgenError, match=r"no worker is left \(it ended with exit code 3: the disk is on fire\)"):
        job.run(engine_factory=local_workers(1, Exiting("the disk is on fire")))


@dataclass
class Exiting:
    """An engine factory that ends its process."""

    last_line: str

    def __call__(self, spec: JobSpec, model: ModelInfo) -> LoadedEngine:
        os.write(2, f"one\n{self.last_line}\n\n".encode())
        os._exit(3)


def test_workers_import_nothing_of_the_folder_they_start_in(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(3))
    (job.folder / "json.py").write_text("raise SystemExit('executed')")  # as one beside a data set may be
    monkeypatch.chdir(job.folder)
    assert run_placed(job.spec(**TWO), quiet(), engine_factory=stub_factory()).exit_code == ExitCode.OK


def test_a_driver_of_workers_never_imports_torch(job: JobMaker) -> None:
    job.write(rows_of(5))
    program = (
        "import sys; from batchgen.cli.main import call; from stub_engine import stub_factory\n"
        "code = call(sys.argv[1:], engine_factory=stub_factory())\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    command = [sys.executable, "-c", program, "run", str(job.toml()), "--workers", "1", "-q"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- storms of kills


SEED = 23
NUM_KILLS = share_of(400)


@pytest.mark.slow
def test_a_storm_of_kills_of_workers_changes_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = () if SLOW_SHARE == 1 else ("run-parquet", "update-job", "run-samples")  # the night runs all
    counts = Counter(survived(storm_runs.__file__, tmp_path, NUM_KILLS, SEED, 40, "workers", *few)["counts"])
    with capsys.disabled():
        print(f"\nsignals survived: {dict(counts)}", end=" ")
    assert sum(count for name, count in counts.items() if name.startswith("kill")) >= NUM_KILLS
    assert counts["kill of a worker"] >= NUM_KILLS // 5


@pytest.mark.slow
def test_workers_take_the_steps_of_one_process_with_the_models_own_engine(job: JobMaker) -> None:
    job.write(rows_of(1500))
    steps, found = {}, {}
    for workers in ("", "1", "2"):
        job.output = job.folder / f"on-{workers}"
        spec = job.spec(cluster={"workers": workers}, engine={"max_num_seqs": 64, "threads": 1})
        report = run_placed(spec, quiet()).report
        assert report is not None
        steps[workers], found[workers] = report["engine"]["num_steps"], job.outputs()
    assert found["1"] == found["2"] == found[""]
    assert steps["1"] <= steps[""] + 13, "but for the first ones, which may come one by one"
    assert steps["2"] <= 2 * steps[""], "1.1 when nothing else runs; a worker that waits for a processor runs few rows"

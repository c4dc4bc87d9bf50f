"""Stopping early, in a process of its own: signals, limits, and the promise to be gone within 10 seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repeats import slow
from run_helpers import (
    ENVIRONMENT,
    JobMaker,
    Shell,
    finish,
    rows_of,
    start,
    until_delivered,
    until_phase,
    until_rows_are_done,
    without_timings,
)

from batchgen.core.errors import ExitCode
from batchgen.run import stop

PROMISED_S = 10
LEAVING_S = 2  # for the exit itself, on a busy machine


def test_the_limit_of_a_graceful_shutdown_leaves_time_for_the_exit() -> None:
    assert stop.DRAIN_S + LEAVING_S <= PROMISED_S


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT), slow(signal.SIGHUP)])
def test_a_signal_drains_and_a_second_run_ends_to_the_byte(
    job: JobMaker, tmp_path: Path, number: signal.Signals
) -> None:
    job.write(rows_of(200))
    job.run(job.spec(output={"path": str(tmp_path / "reference")}))
    process = start(["run", job.toml()], step_s=0.02)
    until_rows_are_done(process, job.output)
    process.send_signal(number)
    code, said = finish(process)
    assert code == ExitCode.STOPPED
    assert f"stopped ({number.name})" in said
    assert "half done and saved" in said
    assert job.run().exit_code == ExitCode.OK
    assert job.outputs() == without_timings(tmp_path / "reference" / "outputs.jsonl")


def test_a_signal_while_the_model_loads_stops_at_once_and_leaves_its_state_alone(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(5))
    process = start(["run", job.toml()], load_s=600)
    until_phase(process, job.output, "loading the model")
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == ExitCode.STOPPED
    assert "before the first row" in said
    assert {path.name for path in job.output.glob("*")} == {"progress.json"}
    for command in ("cat", "report"):
        assert "the run is not finished: see batchgen status" in shell(command, job.output, code=2).err


def test_a_second_interrupt_stops_at_once_and_the_journal_stays_sound(job: JobMaker) -> None:
    job.write(rows_of(200))
    process = start(["run", job.toml()], step_s=0.02, stops_after_s=600)
    until_rows_are_done(process, job.output)
    process.send_signal(signal.SIGINT)
    until_delivered(process, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == ExitCode.STOPPED
    assert "second SIGINT" in said
    assert job.run().exit_code == ExitCode.OK
    assert len(job.outputs()) == 200


@pytest.mark.parametrize("phase_s", [slow({"step_s": 0.02}), {"load_s": 600}])
def test_max_runtime_stops_whatever_the_run_is_doing(job: JobMaker, phase_s: dict[str, float]) -> None:
    job.write(rows_of(400))
    code, said = finish(start(["run", job.toml(), "--max-runtime", "1.5s"], **phase_s))
    assert code == ExitCode.STOPPED
    assert "max runtime of 1.5 s" in said
    assert ("it was still loading the model: give it more time" in said) == ("load_s" in phase_s)
    assert ("run again" in said) == ("step_s" in phase_s)


def test_a_stop_while_outputs_are_written_is_harmless(job: JobMaker) -> None:
    job.write(rows_of(20))
    process = start(["run", job.toml()], finalize_s=600)
    until_phase(process, job.output, "writing the outputs")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == ExitCode.STOPPED
    assert not (job.output / "outputs.jsonl").exists()
    assert job.run().exit_code == ExitCode.OK
    assert len(job.outputs()) == 20


def test_signals_that_the_parent_ignores_do_not_stop_a_run(job: JobMaker) -> None:
    job.write(rows_of(60))
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = start(["run", job.toml()], step_s=0.02)  # as ``sh -c 'batchgen run ... &'`` starts it
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    until_rows_are_done(process, job.output)
    for number in before:
        process.send_signal(number)
    code, said = finish(process)
    assert code == ExitCode.OK, said


WATCHED = """
import signal, sys, time
from batchgen.run.stop import Watchdog
watchdog = Watchdog([signal.SIGTERM, signal.SIGINT], 0.5, lambda: "SIGTERM")
signal.signal(signal.SIGTERM, lambda number, frame: None)
print("ready", flush=True)
if sys.argv[1] == "sleep":
    time.sleep(2)
    time.sleep(600)
else:
    watchdog.close()
    print("closed", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("sleep", ExitCode.STOPPED), ("close", 0)])
def test_a_call_does_not_outlive_the_limit_after_a_signal(how: str, code: int) -> None:
    command = [sys.executable, "-c", WATCHED, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if how != "close":
            process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert ("run again to resume" in said) == (how != "close")

"""Kernels are compiled in processes beside the run, which needs none of them and leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from local_workers import processes
from repeats import slow
from run_helpers import ENVIRONMENT, MODEL, rows_of

from batchgen.config.job import JobSpec
from batchgen.config.load import load_job
from batchgen.kernels.cpu import build, compiler, object_cache
from batchgen.kernels.cpu.kernel_specs import ARGMAX, needed, needed_by_some
from batchgen.kernels.cpu.parallel import Kernel
from batchgen.run.loader import load_engine, read_model

STARTED = """
import sys, time
from batchgen.kernels.cpu import build
build.start("float32", "float32")
print(*(process.pid for process, _ in build._builders.values()), flush=True)
time.sleep(100)
"""
# Builds with a compiler of no work, where no process may be started.
ALONE = """
import os
from batchgen.kernels.cpu import build, compiler, object_cache
from batchgen.kernels.cpu.kernel_specs import ARGMAX
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork, os.cpu_count = fork, lambda: 4
reading, writing = os.pipe()
os.dup2(reading, 0)  # whose end says that the run is over
build._missing = lambda *_: [(ARGMAX, kind) for kind in ARGMAX.kinds] * 3
compiler.machine_code = lambda spec, kind: kind.encode()
object_cache.write = lambda name, code: print(code.decode(), flush=True) or True
build.work_on("float32", "float32")
"""
# Runs a job, then tells whether numba was there at its end; what torch is made of is searched for garbage no more.
RUN = """
import gc, sys
from batchgen.cli.main import call
code = call(sys.argv[1:])
assert gc.isenabled() and gc.get_freeze_count() > 100_000
print(code, "numba" in sys.modules)
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_addresses", {})
    monkeypatch.setattr(build, "_builders", {})
    monkeypatch.setattr(build, "_plainly_compiled", set())
    yield tmp_path / "cache"
    build.stop()


def group_of(leader: int) -> list[int]:
    """The running processes of a process group."""
    return [found.pid for found in processes() if found.group == leader and found.state != "Z"]


def wait_for(what: Any) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it takes for ever"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not list its processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGINT), slow(signal.SIGTERM)])
@pytest.mark.parametrize("is_compiling", [False, slow(True)])
def test_no_process_outlives_a_run_that_is_killed(number: int, is_compiling: bool, empty_cache: Path) -> None:
    command = [sys.executable, "-c", STARTED]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout is not None
    leader = int(run.stdout.readline())
    wait_for(lambda: group_of(leader))
    if is_compiling:
        wait_for(lambda: any(empty_cache.rglob("*.o")))
    run.send_signal(number)
    run.communicate()
    wait_for(lambda: not group_of(leader))


def greatest() -> list[int]:
    x, out = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64)
    Kernel(ARGMAX).launch(torch.float32, 1, x.data_ptr(), out.data_ptr(), 3)
    return out.tolist()


def test_a_run_compiles_what_the_others_leave_undone_when_they_are_killed() -> None:
    build.start("float32", "float32")
    ((process, _),) = build._builders.values()
    os.killpg(process.pid, signal.SIGKILL)
    assert greatest() == [1]


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import time; time.sleep(100)"])
def test_a_process_that_fails_or_hangs_is_not_waited_for(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PROGRAM", program)
    monkeypatch.setattr(build, "_LONGEST_WAIT_S", 0.2)
    build.start("float32", "float32")
    assert greatest() == [1]


def test_a_run_that_can_start_no_process_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no new processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    build.start("float32", "float32")
    assert greatest() == [1]


def test_nothing_is_started_where_nothing_is_missing_or_can_be_handed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.start("float16", "float16")  # runs on torch's own kernels
    assert not build._builders
    for wanted in needed("float32", "float32") + needed_by_some("float32"):
        object_cache.write(object_cache.file_name(*wanted), b"code")
    build.start("float32", "float32")
    assert not build._builders
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build.start("float32", "float32")
    assert not build._builders


def job(**sections: Any) -> JobSpec:
    model, rows = {"path": str(MODEL), "device": "cpu", "dtype": "float32"}, {"path": ["rows.jsonl"], "prompt": "text"}
    return load_job(None, {"model": model, "input": rows, "output": {"path": "out"}} | sections)


def test_a_job_has_its_kernels_compiled_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(build, "start", lambda *forms: started.append(forms))
    monkeypatch.setattr(build, "_started", set())
    load_engine(job(), read_model(job()))
    forms = ("float32", "bfloat16", "auto", "auto", "auto", "dense tiles")
    assert started == [forms, forms], "by the command, and by whatever loads a model"


def test_a_user_is_told_when_kernels_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "needed", lambda *_: [(ARGMAX, "float32")])
    assert [note[:64] for note in notes_of_a_start()] == [
        "kernels cannot be kept here, so each start compiles them again: "
    ]


def notes_of_a_start() -> list[str]:
    """What a user is told once the kernels are there."""
    backend = load_engine(job(), read_model(job()))
    backend.prepare()
    return list(backend.notes)


def test_a_user_is_told_when_numba_is_one_whose_insides_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: object) -> bytes:
        raise AttributeError("'JITCPUCodegen' object has no attribute '_tm'")

    monkeypatch.setattr(build, "needed", lambda *_: [(ARGMAX, "float32")])
    monkeypatch.setattr(build, "start", lambda *_, **__: None)
    assert notes_of_a_start() == []
    monkeypatch.setattr(build, "_addresses", {})
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "-2")
    monkeypatch.setattr(compiler, "machine_code", changed)
    (note,) = notes_of_a_start()
    assert note.startswith(f"numba {version('numba')} differs inside from the versions that batchgen knows")


def test_a_process_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PROGRAM", "import time; time.sleep(100)")
    monkeypatch.setattr(build, "_LONGEST_WAIT_S", 0.2)
    compiled: list[str] = []
    monkeypatch.setattr(build, "_compiled", lambda source, kind, name: compiled.append(name) or 1)
    build.start("float32", "float32")
    ((process, _),) = build._builders.values()
    build.finish("float32", "float32")
    assert len(compiled) == len(needed("float32", "float32"))
    assert process.poll() is not None
    assert not build._builders, "the kernels behind the first were not waited for"


@pytest.mark.parametrize("cache", ["kept", slow("empty")])
def test_the_first_run_and_the_next_import_no_numba_and_agree(tmp_path: Path, cache: str) -> None:
    """With kernels that were compiled before, at the latest by the first of the two, or that are not there yet."""
    rows = "".join(json.dumps(row) + "\n" for row in rows_of(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    outputs = []
    for name in ("first", "next"):
        job = ["run", "--model", str(MODEL), "--input", str(tmp_path / "rows.jsonl"), "--prompt", "{question}"]
        command = [sys.executable, "-c", RUN, *job, "--output", str(tmp_path / name), "--max-tokens", "8"]
        environment = ENVIRONMENT | ({"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]} if cache == "empty" else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.stdout.splitlines()[-1] == "0 False", done.stderr[-1000:]
        lines = (tmp_path / name / "outputs.jsonl").read_text().splitlines()
        outputs.append([json.loads(line)["text"] for line in lines])
    assert outputs[0] == outputs[1]


def test_a_copy_of_the_process_does_not_wait_for_what_another_thread_compiled() -> None:
    """That thread is not copied, nor does it ever release the lock there."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with build._LOCK:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what forks beside threads is asked for here
        child = os.fork()
    if not child:
        signal.alarm(30)
        with build._LOCK:
            os._exit(0)
    release.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_builder_that_may_start_no_process_compiles_alone() -> None:
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [*ARGMAX.kinds] * 3), done.stderr[-1000:]

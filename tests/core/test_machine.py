"""Where memory or address space do not suffice, a command says so in one line and never calls it a bug."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from repeats import slow
from run_helpers import ENVIRONMENT, MODEL, JobMaker, quiet, rows_of, without_timings

from batchgen.cli import main
from batchgen.cli.main import call
from batchgen.core.errors import ExitCode, OutOfMemory, UsageError
from batchgen.core.machine import SMALLER_SIZES, available_bytes, is_out_of_memory, memory_errors, require_address_space
from batchgen.run.job import run_job

GB = 10**9


of_numpy = partial(np.zeros, 1 << 50, dtype=np.uint8)


def of_the_loader() -> NoReturn:
    try:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    except OSError as error:
        raise ImportError("libx.so: failed to map segment from shared object") from error


def of_a_gpu() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB")


def of_cublas() -> NoReturn:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    ("fail", "amount"),
    [
        (partial(torch.empty, 1 << 50, dtype=torch.uint8), "1125899906842624 bytes"),
        (of_numpy, "1.00 PiB"),
        (of_the_loader, ""),
        (of_a_gpu, "2.00 GiB"),
        (of_cublas, ""),
    ],
)
def test_memory_that_runs_out_is_one_line_with_what_for_and_how_much(fail: Callable[[], object], amount: str) -> None:
    with pytest.raises(OutOfMemory) as caught, memory_errors("loading the weights", SMALLER_SIZES):
        fail()
    message = str(caught.value)
    assert message.startswith("out of memory while loading the weights")
    assert "--kv-cache-memory" in message
    assert amount in message
    assert "\n" not in message
    assert caught.value.exit_code == ExitCode.CRASH


@pytest.mark.parametrize(
    "error", [ValueError("x"), RuntimeError("shapes differ"), UsageError("out of memory"), OSError()]
)
def test_other_errors_pass(error: Exception) -> None:
    assert isinstance(error, UsageError) or not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, memory_errors("anything"):
        raise error
    assert caught.value is error


def test_a_command_out_of_memory_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "cli", type("Cli", (), {"main": staticmethod(lambda *_, **__: of_numpy())}))
    assert call(["status", str(tmp_path)]) == ExitCode.CRASH
    said = capsys.readouterr().err
    assert said.startswith("batchgen: error: out of memory while running this command (asked for 1.00 PiB more): ")
    assert said.count("\n") == 1
    assert "--" not in said  # status has no flags that take less memory


AMBIGUOUS = [RuntimeError("can't start new thread"), ImportError("libx.so: failed to map segment from shared object")]
NOT_PERMITTED = ImportError("libx.so: failed to map segment from shared object: Operation not permitted")


def test_what_may_have_another_cause_is_a_lack_of_memory_only_where_the_address_space_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert not any(map(is_out_of_memory, [*AMBIGUOUS, NOT_PERMITTED]))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5 * GB, 5 * GB))
    assert all(map(is_out_of_memory, AMBIGUOUS))
    assert not is_out_of_memory(NOT_PERMITTED)


def test_weights_for_which_there_is_no_memory_are_one_line(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.model import load

    monkeypatch.setattr(load, "Decoder", lambda *_: of_numpy())
    job.write(rows_of(1))
    with pytest.raises(OutOfMemory, match=r"out of memory while loading the weights.*--kv-cache-memory"):
        run_job(job.spec(), quiet())
    monkeypatch.undo()
    assert job.run().exit_code == ExitCode.OK


def test_state_for_which_there_is_no_memory_is_one_line(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.engine import replay

    monkeypatch.setattr(replay, "allocate", lambda *_, **__: of_numpy())
    job.write(rows_of(1))
    with pytest.raises(OutOfMemory, match="out of memory while allocating KV blocks and convolution state"):
        run_job(job.spec(), quiet())


def test_a_step_without_memory_says_what_to_lower_and_resumes(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.engine import Engine
    from batchgen.engine.model_runner import ModelRunner

    forward, submit, steps = ModelRunner.run, Engine.submit, iter(range(12))
    begun: list[int] = []

    def fails_at_last(*arguments: Any) -> torch.Tensor:
        return forward(*arguments) if next(steps, None) is not None else of_a_gpu()

    job.write(rows_of(30))
    small = job.spec(engine={"max_num_seqs": 4})
    monkeypatch.setattr(ModelRunner, "run", fails_at_last)
    with pytest.raises(OutOfMemory, match=r"^out of memory while computing a step \(asked for 2.00 GiB .*-batched-tok"):
        run_job(small, quiet())
    monkeypatch.setattr(ModelRunner, "run", forward)
    monkeypatch.setattr(Engine, "submit", lambda engine, request: begun.append(request.key) or submit(engine, request))
    assert run_job(small, quiet()).exit_code == ExitCode.OK
    assert 0 < len(begun) < 30, "rows that were done are not run again"
    resumed = job.outputs()
    run_job(job.spec(output={"path": str(job.folder / "undisturbed")}), quiet())
    assert resumed == without_timings(job.folder / "undisturbed" / "outputs.jsonl")


def in_address_space(num_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    limited = ["sh", "-c", 'ulimit -v "$0" && exec "$@"', str(num_bytes // 1024)]
    command = [*limited, sys.executable, "-m", "batchgen", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "num_bytes"),
    [("run", GB), *(slow("run", size) for size in (7 * GB // 10, 2 * GB)), slow("check", GB), slow("bench", GB)],
)
def test_a_small_address_space_is_refused_before_all_is_loaded(job: JobMaker, command: str, num_bytes: int) -> None:
    job.write(rows_of(1))
    arguments = [str(job.toml())] if command == "run" else ["--model", str(MODEL)]
    done = in_address_space(num_bytes, command, *arguments)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert f"the address space is limited to {num_bytes / GB:.1f} GB" in done.stderr
    assert "ulimit -v unlimited" in done.stderr
    assert not job.output.exists()


def test_the_room_for_weights_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5 * GB, 5 * GB))
    require_address_space()
    with pytest.raises(UsageError, match=r"limited to 5.0 GB, running this model takes 6.1 GB"):
        require_address_space(4 * GB)


def test_available_memory_is_what_the_address_space_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + GB // 10,) * 2)
    assert available_bytes() <= GB // 10


def test_a_module_next_to_the_package_does_not_replace_one_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "batchgen").symlink_to(Path(main.__file__).parents[1])
    (tmp_path / "typing.py").write_text("raise ImportError('an obsolete backport')")
    code = (
        "import subprocess, sys\n"
        "sys.path.insert([name.endswith('-packages') for name in sys.path].index(True), sys.argv[1])\n"
        "from batchgen.core.machine import fresh_python\n"
        "subprocess.run(fresh_python('import typing; print(*json.loads(sys.argv[2]))', [1, 2]), check=True)\n"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "1 2\n", done.stderr

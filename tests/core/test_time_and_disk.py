"""What a machine does to a run from outside: a clock that jumps, a folder that turns read-only."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import JobMaker, Shell, quiet, rows_of
from stub_engine import stub_factory

from batchgen.cli.main import call
from batchgen.core.errors import ExitCode
from batchgen.output.rundir import RunDir
from batchgen.run import stop as stop_module
from batchgen.run.reports import read_report

DAY_S = 86_400


class JumpingClock:
    """The wall clock, which goes off by ``jump_s`` after it was read ``after`` times."""

    def __init__(self, jump_s: float, after: int) -> None:
        self.jump_s = jump_s
        self._left = after
        self._time = time.time

    def time(self) -> float:
        self._left -= 1
        return self._time() + (self.jump_s if self._left < 0 else 0)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> JumpingClock:
    """``time.time`` and ``datetime.now`` of the stopper by a clock that jumps."""
    clock = JumpingClock(request.param, after=5)

    class JumpingDatetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(clock.time(), tz)

    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(stop_module, "datetime", JumpingDatetime)
    return clock


@pytest.mark.parametrize("jumping", [-DAY_S, slow(DAY_S), slow(-365 * DAY_S), slow(365 * DAY_S)], indirect=True)
def test_a_clock_that_jumps_changes_no_byte_and_no_time(job: JobMaker, jumping: JumpingClock) -> None:
    job.write(rows_of(30))
    wanted = job.elsewhere("reference")
    jumping._left = 5
    assert job.run(options=quiet(max_runtime_s=3600)).exit_code == ExitCode.OK
    assert job.outputs() == wanted
    report = read_report(RunDir(job.output))
    assert 0 <= report["wall_s"] < 600
    assert all(0 <= seconds < 600 for seconds in report["seconds"].values())


@pytest.mark.parametrize("jumping", [-DAY_S, slow(-365 * DAY_S)], indirect=True)
def test_a_deadline_after_the_clock_went_back_is_later(job: JobMaker, jumping: JumpingClock) -> None:
    job.write(rows_of(30))
    wanted = job.elsewhere("reference")
    deadline = datetime.now().astimezone() + timedelta(hours=1)
    jumping._left = 5
    assert job.run(options=quiet(deadline=deadline)).exit_code == ExitCode.OK
    assert job.outputs() == wanted


@pytest.mark.parametrize("jumping", [DAY_S, slow(365 * DAY_S)], indirect=True)
def test_a_clock_that_jumps_over_the_deadline_stops_the_run_and_a_resume_ends_it(
    job: JobMaker, jumping: JumpingClock
) -> None:
    job.write(rows_of(60))
    wanted = job.elsewhere("reference")
    deadline = datetime.now().astimezone() + timedelta(hours=1)
    jumping._left = 5
    stopped = job.run(options=quiet(deadline=deadline))
    assert stopped.exit_code == ExitCode.STOPPED
    assert "deadline" in stopped.lines[0]
    assert job.run().exit_code == ExitCode.OK
    assert job.outputs() == wanted


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let nothing be made, changed or removed in ``folder``, as on a file system mounted read-only."""

    def patched(name: str) -> None:
        original = getattr(os, name)

        def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
            changes = name != "open" or args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if changes and not isinstance(path, int) and str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    for name in ("open", "mkdir", "unlink", "replace", "rename", "rmdir"):
        patched(name)


def said_in_one_line(said: str) -> str:
    assert said.startswith("batchgen: error: "), said
    assert said.count("\n") <= 2
    assert "this is a bug" not in said
    assert "Read-only file system" in said
    return said


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_read_only_output_folder_is_one_line_with_the_folder_in_it(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, shell: Shell, *, is_begun: bool
) -> None:
    job.write(rows_of(20))
    if is_begun:
        assert job.run(options=quiet(max_total_tokens=100)).exit_code == ExitCode.STOPPED
    with monkeypatch.context() as patch:
        refused(patch, job.output)
        said = shell("run", job.toml(), code=1 if is_begun else 2, engine=stub_factory()).err
    assert str(job.output) in said_in_one_line(said)
    assert job.run().exit_code == ExitCode.OK
    assert len(job.outputs()) == 20


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """``folder`` as a mount of its own that takes no writes; skips the test where that is not permitted."""
    for options in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            subprocess.run(["umount", str(folder)], capture_output=True, check=False)
            pytest.skip("a read-only folder needs the right to mount one")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("state", ["new", "stopped", "finished"])
def test_on_a_read_only_mount_every_command_ends_in_its_code_without_a_traceback(
    job: JobMaker, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    job.write(rows_of(20))
    job.output.mkdir()
    if state != "new":
        tokens = 100 if state == "stopped" else None
        job.run(options=quiet(max_total_tokens=tokens))
    capsys.readouterr()
    with read_only(job.output):
        code = call(["run", str(job.toml())], engine_factory=stub_factory())
        said = capsys.readouterr().err
        said_in_one_line(said)
        assert code in (ExitCode.CRASH, ExitCode.USAGE)
        if state != "new":
            assert call(["status", str(job.output)]) == ExitCode.OK
    assert job.run().exit_code == ExitCode.OK
    assert len(job.outputs()) == 20

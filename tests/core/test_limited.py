"""A program in a process with limits: what it takes costs one item, and a lost process costs none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import ENVIRONMENT

from batchgen.core import limited
from batchgen.core.errors import BatchgenError
from batchgen.core.limited import LimitedProgram, Program

WORD = Program("batchgen.core.answers", "searches words", {"rule": r"(\w+)"}, 5.0, 512 << 20)


def word(program: LimitedProgram, text: str) -> Any:
    answer, problem = program.answer(json.dumps(text).encode())
    return problem or json.loads(answer)


def popen_of(program: LimitedProgram) -> subprocess.Popen[bytes]:
    assert program._process is not None
    return program._process._popen


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, slow(signal.SIGTERM), slow(signal.SIGHUP)])
def test_a_signal_to_the_process_costs_no_answer(number: int) -> None:
    program = LimitedProgram(WORD)
    for text in ("a", "b", "c"):
        assert word(program, text) == text
        os.kill(popen_of(program).pid, number)


def test_a_process_that_is_killed_again_and_again_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    program, answer = LimitedProgram(WORD), limited._Process.answer

    def killed(self: limited._Process, item: bytes) -> Any:
        self._popen.kill()
        self._popen.wait()
        return answer(self, item)

    monkeypatch.setattr(limited._Process, "answer", killed)
    with pytest.raises(BatchgenError, match="killed repeatedly"):
        word(program, "a")


def test_an_answer_that_a_stop_interrupts_is_not_that_of_the_next_item(monkeypatch: pytest.MonkeyPatch) -> None:
    program, receive = LimitedProgram(WORD), limited._Process._receive
    with monkeypatch.context() as patched:
        patched.setattr(limited._Process, "_receive", lambda self: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            word(program, "first")
    assert limited._Process._receive is receive and word(program, "second") == "second"


def test_a_setup_that_is_refused_later_is_one_line_that_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    program = LimitedProgram(WORD)
    popen_of(program).kill()
    monkeypatch.setattr(limited._Process, "start", lambda self: "it takes more than 5 s")
    with pytest.raises(BatchgenError, match=r"does not start again: it takes .* \(it started .*; run again to resume"):
        word(program, "a")


def test_a_process_that_ends_before_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(BatchgenError, match=r"cannot start the process that searches words: .* status 1"):
        LimitedProgram(WORD)


def test_a_module_beside_the_package_does_not_replace_one_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "batchgen").symlink_to(Path(limited.__file__).parents[1])
    (tmp_path / "typing.py").write_text("raise ImportError('an obsolete backport')")
    code = (
        "import sys, typing\n"
        "sys.path.insert([name.endswith('-packages') for name in sys.path].index(True), sys.argv[1])\n"
        "from batchgen.core.answers import find_answer\n"
        "print(find_answer('(b)', 'abc'))\n"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "b\n", done.stderr


def test_the_limit_of_time_holds_where_its_signal_is_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        program = LimitedProgram(WORD)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = Path(f"/proc/{popen_of(program).pid}/status").read_text()
    [blocked] = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
    assert int(blocked, 16) == 0


def test_ctrl_c_does_not_reach_the_process_even_while_it_starts() -> None:
    assert os.getpgid(limited._Process(WORD)._popen.pid) != os.getpgrp()


def test_the_process_ends_with_a_run_that_is_killed() -> None:
    code = (
        "from test_limited import WORD, LimitedProgram\n"
        "program = LimitedProgram(WORD)\n"
        "print(program._process._popen.pid, flush=True)\n"
        "input()\n"
    )
    pipe, here = subprocess.PIPE, Path(__file__).parent
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, cwd=here, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 30
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_leaves_the_process_of_its_parent_alone() -> None:
    """It would wait for the end of a process that is not its own, once its copy of the program is collected."""
    program = LimitedProgram(WORD)
    pid = os.fork()
    if not pid:
        del program
        os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert time.monotonic() < deadline
    assert word(program, "b") == "b"

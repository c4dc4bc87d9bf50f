"""The tests pass whatever starts them: a terminal of any width, nohup, a script without a standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from run_helpers import REPOSITORY

HOSTILE = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
os.umask(0o077)
os.close(0)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]])
"""
SENSITIVE = ("a_signal_outside_interruptible_work", "list_of_commands", "second_interrupt", "umask")


def test_signals_ignored_and_blocked_a_narrow_terminal_and_no_standard_input_change_no_result(tmp_path: Path) -> None:
    files = [
        "tests/run/test_stop.py",
        "tests/cli/test_cli.py",
        "tests/run/test_signals.py",
        "tests/output/test_rundir.py",
    ]
    command = [sys.executable, "-c", HOSTILE, *files, "-k", " or ".join(SENSITIVE), "--basetemp", str(tmp_path / "t")]
    settings = {"COLUMNS": "40", "TERM": "dumb", "LC_ALL": "C", "TZ": "Asia/Kathmandu", "BATCHGEN_DEBUG": "1"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

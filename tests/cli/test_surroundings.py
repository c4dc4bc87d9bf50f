"""Whatever starts the tests, they pass: a narrow terminal, nohup, no standard input. What most repeats are: slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from run_helpers import ENVIRONMENT, REPOSITORY

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


CASES = """
import pytest
from repeats import slow

@pytest.fixture(params="xyz")
def made(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), slow(2, 2)])
def test_product(a, b, c, made): pass

@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_list(b, c): pass

@pytest.mark.interpreted
@pytest.mark.parametrize("a", [1, 2, 3])
def test_kernel(a): pass
"""


def test_of_a_product_of_cases_those_that_show_every_value_once_are_not_slow(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    hook = "from repeats import mark_repeats\ndef pytest_collection_modifyitems(items): mark_repeats(items, True)\n"
    (tmp_path / "conftest.py").write_text(hook, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--co", "-q", "-m", "not slow", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert [name for name in found if "list" in name or "kernel" in name] == [
        *("test_list[1-1]", "test_list[1-2]", "test_list[2-2]", "test_list[2-1]", "test_kernel[1]")
    ]
    product = [name[len("test_product[") : -1].split("-") for name in found if "product" in name]
    assert list(map(set, zip(*product, strict=True))) == [{"x", "y", "z"}, {"1"}, {"1", "2"}, {"1", "2", "3"}]
    assert len(product) == 3

"""Standard streams that are full or closed, text that would steer a terminal, and signals before a command listens."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import unicodedata
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import ENVIRONMENT, REPOSITORY, JobMaker, Shell, rows_of
from stub_engine import stub_factory

from batchgen.cli import main
from batchgen.cli.main import call
from batchgen.core.units import one_line, printable
from batchgen.run import stop
from batchgen.run.display import BarDisplay, LineDisplay

HOSTILE = "a\x1b[2J\nb\r\x07\x9b31m\u202egpj.\u2066\u2028\x7f\udcff"
USAGE = ["frobnicate"]


def batchgen(*arguments: str | Path, shell: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; ``shell`` redirects its streams."""
    command = ["bash", "-c", f'exec "$@" {shell}', "bash", sys.executable, "-m", "batchgen", *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, text=True, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "arguments",
    [
        *("run --help", slow("--help"), slow("--version"), slow("plan {job}"), "plan {job} --json"),
        *(slow(f"{command} {{out}}{flag}") for command in ("status", "report") for flag in ("", " --json")),
    ],
)
def test_a_full_standard_output_is_one_line_and_exit_code_1(job: JobMaker, arguments: str) -> None:
    job.write(rows_of(2))
    job.run()
    done = batchgen(*arguments.format(job=job.toml(), out=job.output).split(), shell=">/dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "cannot write to standard output: No space left on device" in done.stderr


def test_a_reader_of_standard_output_that_has_gone_asks_for_no_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "batchgen", "run", "--help"]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_broken_pipe_of_any_other_kind_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(main.cli, "main", lost)
    monkeypatch.setenv("BATCHGEN_DEBUG", "1")  # leaves no file with the traceback
    assert call(["status", "x"]) == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe (traceback above)" in capsys.readouterr().err


@pytest.mark.parametrize("shell", [slow("2>/dev/full"), slow("2>&-"), ">&- 2>&- <&-", slow("2>/dev/full >/dev/full")])
def test_a_usage_error_exits_2_whatever_its_streams(shell: str) -> None:
    assert batchgen(*USAGE, shell=shell).returncode == 2


@pytest.mark.parametrize("shell", ["2>/dev/full", slow("2>&-"), slow(">&- 2>&- <&-")])
def test_a_finished_run_exits_as_it_ended_whatever_its_streams(job: JobMaker, shell: str) -> None:
    job.write([*rows_of(2), "{"])
    script = f"""
import sys, signal
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
from stub_engine import stub_factory
import batchgen.cli.main
call = batchgen.cli.main.call
batchgen.cli.main.call = lambda argv: call(argv, engine_factory=stub_factory())
from batchgen.__main__ import main
main(["run", {str(job.toml())!r}])
"""
    command = ["bash", "-c", f'exec "$@" {shell}', "bash", sys.executable, "-c", script]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 3
    assert [row["id"] for row in job.outputs()] == ["q-0", "q-1"]


def test_a_process_without_stderr_is_still_gone_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(os, "_exit", codes.append)
    stop._leave("stopped")
    assert codes == [75]


def test_a_closed_stream_is_not_taken_by_a_file_of_the_run(tmp_path: Path) -> None:
    script = (
        "import os; from batchgen import __main__ as m; m._fill_standard_streams(); print(os.open('x', os.O_CREAT))"
    )
    command = ["bash", "-c", 'exec "$@" 0<&- 2>&-', "bash", sys.executable, "-c", script]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2


# ---------------------------------------------------------------- text


def is_plain(text: str) -> bool:
    """Whether a text steers no terminal: newlines aside, no control, format, separator or surrogate characters."""
    return not {unicodedata.category(char) for char in text if char != "\n"} & {"Cc", "Cf", "Zl", "Zp", "Cs"}


def test_what_would_steer_a_terminal_is_shown_as_an_escape() -> None:
    shown = printable(HOSTILE)
    assert shown == r"a\x1b[2J\nb\r\x07\x9b31m\u202egpj.\u2066\u2028\x7f\udcff"
    assert printable("naïve 東京 🙂 'x'") == "naïve 東京 🙂 'x'"


def test_no_error_brings_escape_sequences_or_lines_of_its_own(
    job: JobMaker, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.folder)
    job.write(rows_of(1))
    hostile = "x\x1b[31m\nbatchgen: 300 rows done\u202e"
    for arguments in (
        ["status", hostile],
        ["report", hostile],
        ["run", hostile],
        ["run", str(job.toml()), "--input", hostile],
        ["run", str(job.toml()), "--model", f"./{hostile}"],
        ["run", str(job.toml()), "--prompt", f"{{{hostile}}}"],
        [hostile],
        ["merge", hostile, "-o", "x"],
    ):
        said = shell(*arguments, code=2).err
        assert is_plain(said), said
        assert not [line for line in said.splitlines()[1:] if line.startswith("batchgen")]


def test_a_hostile_row_reaches_no_terminal_raw(job: JobMaker, shell: Shell) -> None:
    name = "col\x1b[2J\u202e\x9b"
    text = "id\x1b]0;x\x07\u202e"
    job.write([{"id": text, "question": "?", name: 1}, {"id": "b\x1b[2J"}])
    for words, code in ((("plan",), 0), (("plan", "--json"), 0), (("run", "--columns", name), 3)):
        assert all(map(is_plain, shell(words[0], job.toml(), *words[1:], code=code, engine=stub_factory())))


def test_a_folder_of_a_hostile_name_is_told_in_plain_text(job: JobMaker, shell: Shell) -> None:
    job.output = job.folder / "out\x1b[2J\u202e"
    job.write([*rows_of(2), "{"])
    outcome = job.run()
    assert "\x1b" in outcome.lines[-1]  # the lines are data: what shows them sees to it
    for command, *flags in (["status"], ["report"], ["status", "--json"]):
        assert is_plain(shell(command, job.output, *flags).out)
    assert is_plain(shell("run", job.toml(), "--overwrite", code=3, engine=stub_factory()).err)


@pytest.mark.parametrize(
    ("error", "line"),
    [(OSError("a\n b"), "a b"), (KeyError(), "KeyError"), (ValueError("abc" * 200), "abc" * 99 + "ab…")],
)
def test_an_error_is_one_line_of_bounded_length(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize("kind", [LineDisplay, BarDisplay])
def test_a_note_is_one_plain_line(kind: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    display = LineDisplay(1.0, sys.stderr) if kind is LineDisplay else BarDisplay(sys.stderr)
    display.note(HOSTILE)
    said = capsys.readouterr().err
    assert (said.count("\n"), is_plain(said)) == (1, True)


def test_the_bar_counts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"done": 11, "failed": 1, "total": 60}
    snapshot = {"phase": "generating", "rows": rows, "tokens": {"computed": 800, "estimated": 900}, "num_workers": 0}
    display = BarDisplay(sys.stderr)
    display.show(snapshot | {"tokens_per_s": 1103.2, "eta_s": 25.0})
    display.show(snapshot | {"tokens_per_s": 1103.2, "eta_s": None, "rows": rows | {"total": None}})
    display.close(snapshot)
    said = capsys.readouterr().err
    assert re.search(r"12/60 rows +20%\|.+\| \[00:00, 1 failed, 1,103 tok/s computed, about 25\.0 s left\]", said)
    assert re.search(r"12 rows \[00:00, 1 failed, 1,103 tok/s computed\]", said), "of a total that is not known"


# ---------------------------------------------------------------- signals

SLOW_MODULE = """
import time
try:
    exec("print('importing', flush=True); time.sleep(30)")  # as dataclasses do: there CPython remembers interrupts
except BaseException as error:  # as many do who try whether a part can be imported
    raise ImportError("cannot import") from error
"""


def test_a_signal_while_the_command_line_is_imported_exits_75(tmp_path: Path) -> None:
    """A module that the command line imports is replaced by one that takes its time."""
    (tmp_path / "click.py").write_text(SLOW_MODULE, encoding="utf-8")
    script = (
        "import signal, runpy; [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)];"
        "runpy.run_module('batchgen', run_name='__main__')"
    )  # nohup would have them ignored
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (75, "batchgen: error: interrupted\n")


def test_a_signal_after_the_exit_code_is_known_does_not_change_it() -> None:
    script = (
        "import atexit, os, signal; from batchgen.__main__ import main;"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM)); main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# ---------------------------------------------------------------- surroundings


LAUNCHER = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
os.umask(0o077)
os.close(0)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]])
"""
SENSITIVE = ("a_signal_outside_interruptible_work", "the_commands_are_listed", "second_interrupt", "umask")


@pytest.mark.breadth
def test_signals_ignored_and_blocked_a_narrow_terminal_and_no_standard_input_change_no_result(tmp_path: Path) -> None:
    files = [f"tests/{name}.py" for name in ("run/test_stop", "cli/test_cli", "run/test_signals", "output/test_rundir")]
    command = [sys.executable, "-c", LAUNCHER, *files, "-k", " or ".join(SENSITIVE), "--basetemp", str(tmp_path / "t")]
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


def collected(folder: Path, marks: str) -> list[str]:
    (folder / "test_cases.py").write_text(CASES, encoding="utf-8")
    hook = "from repeats import mark_repeats\ndef pytest_collection_modifyitems(items): mark_repeats(items, True)\n"
    (folder / "conftest.py").write_text(hook, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--co", "-q", "-m", marks, str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, check=False)
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.breadth
def test_of_a_product_of_cases_those_that_show_every_value_once_are_not_slow(tmp_path: Path) -> None:
    found = collected(tmp_path, "not slow and not nightly")
    assert [name for name in found if "list" in name or "kernel" in name] == [
        *("test_list[1-1]", "test_list[1-2]", "test_list[2-2]", "test_list[2-1]", "test_kernel[1]")
    ]
    product = [name[len("test_product[") : -1].split("-") for name in found if "product" in name]
    assert list(map(set, zip(*product, strict=True))) == [{"x", "y", "z"}, {"1"}, {"1", "2"}, {"1", "2", "3"}]
    assert len(product) == 3


@pytest.mark.breadth
def test_of_a_product_of_cases_those_that_show_every_pair_of_values_are_not_nightly(tmp_path: Path) -> None:
    found, every = (collected(tmp_path, marks) for marks in ("not nightly", ""))
    shown, possible = (
        {pair for name in names if "product" in name for pair in combinations(enumerate(name[13:-1].split("-")), 2)}
        for names in (found, every)
    )
    assert shown == possible
    assert len(found) < len(every)
    assert {name for name in every if "list" in name} <= {*found} and "test_kernel[2]" not in found

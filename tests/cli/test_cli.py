"""The command line: help, flags, exit codes, and that every error is a line or two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from repeats import slow
from run_helpers import ENVIRONMENT, MODEL, REPOSITORY, JobMaker, Shell, rows_of, start
from stub_engine import stub_factory

import batchgen
from batchgen import __version__
from batchgen.cli import options
from batchgen.cli.main import call, cli
from batchgen.config.job import KEYS
from batchgen.core.keys import BOOL

COMMANDS = sorted(cli.commands)


STUB = stub_factory()


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_fits_80_columns_and_has_an_example(shell: Shell, command: tuple[str, ...]) -> None:
    out = shell(*command, "--help").out
    assert max(map(len, out.splitlines())) <= 80
    _, _, examples = out.partition("Example")
    assert " ".join(["batchgen", *command]) in examples.partition("\n\n")[0]


def test_the_commands_are_listed_in_whole_sentences_in_the_order_of_use(shell: Shell) -> None:
    out = shell("--help").out
    lines = re.findall(r"^  ([a-z]+)  +(.*)", out.partition("Commands:")[2], re.MULTILINE)
    assert [name for name, _ in lines][:3] == ["run", "try", "plan"]
    assert sorted(name for name, _ in lines) == COMMANDS
    assert all(text.endswith(".") and not text.endswith("...") for _, text in lines)
    assert shell(code=2).out == out, "no command at all shows the same"


def shown_options(text: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)


def test_the_help_of_run_shows_what_people_need_and_help_all_the_rest(shell: Shell) -> None:
    brief, whole = shell("run", "--help").out, shell("run", "--help-all").out
    assert all({*names.split()} <= KEYS[section].keys() for section, names in options._EXPERT_KEYS.items())
    hidden = {*shown_options(whole)} - {*shown_options(brief)}
    assert len(shown_options(brief)) <= 53
    assert len(brief.splitlines()) <= 110
    assert f"{len(hidden)} more options, for experts: batchgen run --help-all" in brief
    assert "for experts" not in whole
    named = {option for parameter in cli.commands["run"].params for option in parameter.opts if option[:2] == "--"}
    assert {flag.replace("--no-", "--") for flag in shown_options(whole)} == {*named, "--help"} - {"--without"}
    assert max(map(len, whole.splitlines())) <= 80


def test_help_shows_of_a_switch_the_flag_that_is_not_its_default(shell: Shell) -> None:
    text = shell("run", "--help-all").words
    switches = [item for keys in KEYS.values() for item in keys.values() if item.kind is BOOL]
    assert {item.default for item in switches} == {True, False}
    for item in switches:
        assert f"--{'no-' if item.default else ''}{item.flag} {item.help}." in text


def test_plan_can_be_written_where_run_stood(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(3))
    shell(
        "plan",
        job.toml(),
        *["--overwrite", "--deadline", "05:55", "--max-runtime", "1h", "--max-error-rate", "5%", "-q"],
    )
    taken = {option for parameter in cli.commands["plan"].params for option in parameter.opts}
    assert taken >= {option for parameter in cli.commands["run"].params for option in parameter.opts}
    assert not job.output.exists()
    assert "--deadline 25:00: must be a clock time" in shell("plan", job.toml(), "--deadline", "25:00", code=2).err


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_backslash_and_an_n_in_a_prompt_are_pointed_out(job: JobMaker, shell: Shell, command: str) -> None:
    job.write(rows_of(1))
    for prompt, is_noted in ((r"Q:\n{question}", True), ("Q:\n{question}", False), ("Q:\n\\n{question}", False)):
        said = shell(command, job.toml(), "--prompt", prompt, "--overwrite", engine=STUB).err
        assert ("--prompt holds a backslash and an n" in said) == is_noted


def test_the_public_names_are_listed() -> None:
    assert {*batchgen.__all__} == {"__version__", *batchgen._MODULES} <= {*dir(batchgen)}


def test_an_outcome_is_shown_briefly(job: JobMaker) -> None:
    job.write(rows_of(5))
    assert len(repr(job.run())) < 1000


HEAVY = ["torch", "pyarrow", "datasets", "numpy", "tokenizers", "numba", "llvmlite"]


@pytest.mark.parametrize(
    ("arguments", "heavy"), [("run --help", HEAVY), ("status {}", ["torch"]), slow("report {}", ["torch"])]
)
def test_what_computes_nothing_loads_nothing_heavy(job: JobMaker, arguments: str, heavy: list[str]) -> None:
    job.write(rows_of(2))
    job.run()
    command = arguments.format(job.output).split()
    code = f"import sys; from batchgen.cli.main import call; call({command}); print({{*{heavy}}} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.splitlines()[-1] == "set()"


def test_every_key_of_the_job_file_has_a_flag() -> None:
    flags = {option for parameter in cli.commands["run"].params for option in parameter.opts + parameter.secondary_opts}
    assert {f"--{item.flag}" for keys in KEYS.values() for item in keys.values()} <= flags


def test_the_version_is_printed(shell: Shell) -> None:
    assert shell("--version") == (f"batchgen {__version__}\n", "")


# ---------------------------------------------------------------- running


def test_a_job_file_runs_with_flags_on_top(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(4))
    flags = ("--limit", 2, "--token-ids", "--columns", "answer,question")
    out, err = shell("run", job.toml(), *flags, engine=STUB)
    assert out == "" and "2 rows done" in err
    assert [set(row) >= {"token_ids", "answer", "question"} for row in job.outputs()] == [True, True]


def test_a_job_runs_from_flags_alone_that_come_to_what_a_job_file_would_say(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(3))
    flags = ["--model", MODEL, "--input", job.input, "--prompt", "{question}", "--output", job.output]
    flags += ["--max-tokens", 4, "--temperature", 0.5, "--stop-token-ids", "9,10", "--stop", "a,b", "--stop", "\n"]
    flags += ["--n", 2, "--logprobs", 3, "--repetition-penalty", 1.1, "--presence-penalty", -1.5]
    shell("run", *flags, engine=STUB)
    sampling = json.loads((job.output / "job.json").read_bytes())["job"]["sampling"]
    expected = {"stop": ["a,b", "\n"], "n": 2, "logprobs": 3, "repetition_penalty": 1.1, "presence_penalty": -1.5}
    expected |= {"max_tokens": 4, "temperature": 0.5, "stop_token_ids": [9, 10]}
    assert {name: sampling[name] for name in expected} == expected


def test_labels_are_repeated_and_may_hold_commas(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(2))
    err = shell("run", job.toml(), "--labels", "yes, please", "--n", 2, "--labels", "no", code=2).err
    assert err.splitlines()[-1].endswith("--n: n = 2 does not go with labels: they are scored, nothing is generated")


def test_rows_come_from_standard_input_and_a_resume_reads_them_again(job: JobMaker) -> None:
    job.write(rows_of(40))
    flags = ["run", job.toml(), "--input", "-", "--quiet"]
    command = [sys.executable, str(REPOSITORY / "tests" / "helpers" / "stub_cli.py"), "{}", *map(str, flags)]
    with job.input.open("rb") as rows:
        stopped = subprocess.run([*command, "--max-total-tokens", "50"], stdin=rows, env=ENVIRONMENT, check=False)
    resumed = subprocess.run(command, stdin=subprocess.DEVNULL, env=ENVIRONMENT, check=False)
    assert (stopped.returncode, resumed.returncode) == (75, 0)
    assert len(job.outputs()) == 40


def test_nothing_but_errors_and_failed_rows_is_said_when_quiet(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(2))
    assert shell("run", job.toml(), "--quiet", engine=STUB) == ("", "")
    job.write([*rows_of(2), "{"])
    said = {
        "--overwrite --max-error-rate=0": "1 of 3 rows",
        "--overwrite": "1 row failed: bad_json 1; see ",
        "": "1 row failed: see ",
    }
    for flags, text in said.items():
        err = shell("run", job.toml(), "--quiet", *flags.split(), code=3, engine=STUB).err
        assert text in err and " done, " not in err


def test_json_progress_is_one_object_a_line(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(60))
    words = ("run", job.toml(), "--json-progress", "--heartbeat", "0.1s")
    lines = [json.loads(line) for line in shell(*words, engine=stub_factory(step_s=0.02)).err.splitlines()]
    assert {line["event"] for line in lines} == {"progress", "note", "end"}
    assert (lines[-1]["phase"], lines[-1]["advice"]) == ("done", None)
    assert lines[-1]["rows"] == {"total": 60, "done": 60, "failed": 0, "left": 0}
    assert any(line["phase"] == "generating" and line["tokens_per_s"] > 0 for line in lines if "phase" in line)


def test_heartbeat_lines_come_by_time_when_not_on_a_terminal(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(60))
    err = shell("run", job.toml(), "--heartbeat", "0.1s", engine=stub_factory(step_s=0.02)).err
    assert re.search(r"batchgen: \d\d:\d\d:\d\d \d+/60 rows, [\d,]+ tok/s computed, about .* left", err)
    assert "\r" not in err


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "give a job file, or data with --model and --prompt"),
        (["run", "nowhere.toml"], "cannot read the job file nowhere.toml"),
        (["run", "{job}", "--max-tokns", "3"], "No such option '--max-tokns'"),
        (["run", "{job}", "--max-tokens", "many"], "--max-tokens"),
        (["run", "{job}", "--deadline", "25:00"], "--deadline 25:00: must be a clock time"),
        (["run", "{job}", "--max-runtime", "soon"], "--max-runtime soon: must be a duration"),
        (["run", "{job}", "--max-error-rate", "5"], "--max-error-rate 5: must be a share"),
        (["run", "{job}", "--max-total-tokens", "0"], "--max-total-tokens 0: must be a whole number"),
        (["run", "{job}", "--shard", "3/2"], "--shard 3/2: must be"),
        (["run", "{job}", "--heartbeat", "x"], "--heartbeat x: must be a duration"),
        (["run", "{job}", "--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["run", "{job}", "--model", "./nowhere"], "nowhere"),
        (["run", "{job}", "--prompt", "{unclosed"], "prompt"),
        (["status", "nowhere"], "nowhere is not a run directory"),
        (["report", "nowhere"], "no report.json in nowhere"),
        (["merge", "nowhere", "-o", "x"], "nowhere is not a run directory"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    job: JobMaker, shell: Shell, arguments: list[str], words: str
) -> None:
    job.write(rows_of(2))
    path = str(job.toml())
    out, err = shell(*(argument.replace("{job}", path) for argument in arguments), code=2)
    assert out == ""
    assert err.startswith("batchgen: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not job.output.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *("status {}", "report {}", "merge {} -o x", "merge x -o {}"),
        *("report x --html {}", "report x --compare {}"),
        *("bench --model m --workload {}", "check --model {}"),
    ],
)
@pytest.mark.parametrize(
    ("path", "words"), [("x" * 300, "is too long for a path"), ("s3://a/b", "s3:// is not a local path")]
)
def test_what_can_be_no_path_here_exits_2_in_every_command(shell: Shell, arguments: str, path: str, words: str) -> None:
    err = shell(*arguments.replace("{}", path).split(), code=2).err
    assert err.count("\n") == 1 and words in err


def test_a_directory_in_use_exits_5(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(400))
    process = start(["run", job.toml()], step_s=0.05)
    try:
        while not (job.output / "run.lock").exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert str(process.pid) in shell("run", job.toml(), code=5).err
    finally:
        process.kill()
        process.communicate()


def test_a_bug_is_a_line_with_the_place_of_its_traceback_or_shows_it(
    job: JobMaker, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(2))
    broken = stub_factory(on_load=lambda: 1 / 0)
    err = shell("run", job.toml(), "--quiet", code=1, engine=broken).err
    assert err.count("\n") == 1
    match = re.search(r"traceback in (\S+),", err)
    assert match is not None
    path = Path(match[1])
    assert "ZeroDivisionError: division by zero" in path.read_text(encoding="utf-8")
    path.unlink()
    monkeypatch.setenv("BATCHGEN_DEBUG", "1")
    assert "Traceback" in shell("run", job.toml(), "--quiet", code=1, engine=broken).err


def test_an_interrupt_before_the_run_listens_exits_75(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "main", interrupted)
    assert call(["run", "x.toml"]) == 75


# ---------------------------------------------------------------- looking


def test_a_report_is_text_or_json(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(3))
    job.run(job.spec(eval={"expected": "answer"}))
    out, err = shell("report", job.output)
    assert err == f"batchgen: next: batchgen cat {job.output}\n"
    assert max(map(len, out.splitlines())) <= 80
    for words in ("3 done, 0 failed", "exact match", "tokens/s", "p99"):
        assert words in out
    assert shell("report", job.output, "--json").json == json.loads((job.output / "report.json").read_bytes())


# ---------------------------------------------------------------- env


def test_env_shows_versions_and_machine_and_no_secret(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = shell("env").out
    assert max(map(len, text.splitlines())) <= 80
    out = shell("env", "--json").out
    found = json.loads(out)
    assert found["cpus"] >= 1 and 0 < found["available_bytes"] <= found["memory_bytes"]
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["versions"].keys() >= {"batchgen", "torch"}
    assert all(value in text for value in (found["processor"].split()[0], found["kernels"], found["versions"]["torch"]))
    assert "hf_secret" not in text + out

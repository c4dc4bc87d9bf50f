"""The recipes in ``jobs/`` run: job files on the sample data, and the scripts around them."""

from __future__ import annotations

import configparser
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import THINKING
from repeats import slow
from run_helpers import (
    ENVIRONMENT,
    MODEL,
    REPOSITORY,
    JobMaker,
    Shell,
    read_lines,
    rows_of,
    smollm2,
    timeless,
    without_timings,
)

from batchgen.cli.main import call
from batchgen.config.load import load_job

if TYPE_CHECKING:
    from object_store import ObjectStore

RECIPES = REPOSITORY / "jobs"
BUCKET = "bucket"  # of the store of a test
JOBS = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with jobs and sample data, which runs may write into."""
    shutil.copytree(RECIPES, tmp_path / "jobs")
    shutil.copytree(REPOSITORY / "sample_data", tmp_path / "sample_data", ignore=shutil.ignore_patterns("tiny-lfm2"))
    (tmp_path / "sample_data" / MODEL.name).symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``batchgen`` has a stub engine and ``scontrol`` notes what it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stub = Path(__file__).parents[1] / "helpers" / "stub_cli.py"
    for name, text in (
        ("batchgen", f"""exec {sys.executable} {stub} "{{\\"step_s\\": ${{STEP_S:-0}}}}" "$@\""""),
        ("scontrol", f'echo "$@" >> {tmp_path}/scontrol'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    """An S3 with the bucket ``BUCKET``."""
    from object_store import bucket_of, object_store

    with object_store() as found, bucket_of(found, BUCKET):
        yield found


@pytest.fixture
def bucket(store: ObjectStore) -> Iterator[str]:
    for number, text in enumerate((REPOSITORY / "sample_data" / "questions.jsonl").read_bytes().splitlines()[:4]):
        store.put(BUCKET, f"questions/{number}.jsonl", text + b"\n")
    yield BUCKET
    assert set(store.content(BUCKET)) >= {"answers/outputs.jsonl", "answers/report.json"}


def run(recipe: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and records of a run of a job file."""
    code = call(["run", f"jobs/{recipe}.toml", "--quiet", *flags])
    folder = Path(load_job(Path(f"jobs/{recipe}.toml")).output.path)
    [path] = folder.glob("outputs.*")
    if path.suffix == ".csv":
        return code, [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    return code, pq.read_table(path).to_pylist() if path.suffix == ".parquet" else read_lines(path)


def is_right(row: dict[str, Any]) -> bool:
    return bool(row["text"] == row["answer"])


# The job, flags, exit code, number of records, and what holds for each record.
CASES: list[Any] = [
    ("quickstart", ["--limit", "8"], 0, 8, is_right),
    ("classify", [], 0, 12, lambda row: {*row["scores"]} == {"bug", "question", "request"} and "input_label" in row),
    ("rerank", [], 0, 12, lambda row: row["scores"].keys() == {"yes", "no"}),
    ("csv", [], 3, 4, lambda row: row["text"] == row["capitals"]),
    ("thinking", [], 0, 12, lambda row: "reasoning" in row),
    ("samples", ["--limit", "3"], 0, 3, lambda row: len(row["samples"]) == 4),
    ("openai_batch", [], 3, 3, lambda row: row["response"]["status_code"] == 200),
    ("nightly", [], 0, 12, lambda row: bool(row["text"])),
    slow("workers", ["--limit", "8"], 0, 8, lambda row: "answer" in row),
]


@pytest.mark.parametrize(("recipe", "flags", "code", "count", "holds"), CASES)
@pytest.mark.usefixtures("here")
def test_the_job_runs_on_the_sample_data(
    recipe: str, flags: list[str], code: int, count: int, holds: Callable[[dict[str, Any]], bool]
) -> None:
    found, records = run(recipe, *flags)
    assert (found, len(records)) == (code, count)
    assert all(map(holds, records))


@pytest.mark.usefixtures("here")
def test_the_input_of_the_night_may_change() -> None:
    _, before = run("nightly")
    with Path("sample_data/tickets.jsonl").open("a") as file:
        file.write('{"id": "t-13", "message": "It is slow."}\n')
    code, after = run("nightly")
    assert (code, [*map(timeless, after[:-1])], after[-1]["id"]) == (0, [*map(timeless, before)], "t-13")


@pytest.mark.slow
def test_a_chain_hands_on_its_rows_and_new_ones_too(here: Path, commands: dict[str, str]) -> None:
    chain = ["jobs/chain.sh", "jobs/summarize.toml", "jobs/judge.toml"]
    for count in (12, 13):
        assert subprocess.run(chain, env=commands, timeout=60, check=False).returncode == 0
        judged = read_lines(here / "runs/judgements/outputs.jsonl")
        assert len(judged) == count
        with Path("sample_data/tickets.jsonl").open("a") as file:
            file.write('{"id": "t-13", "message": "It is slow."}\n')
    assert judged[0]["text"] == read_lines(here / "runs/summaries/outputs.jsonl")[0]["text"]


def test_a_chain_says_which_job_failed_and_ends_with_its_code(here: Path, commands: dict[str, str]) -> None:
    chain = ["sh", "jobs/chain.sh", "jobs/summarize.toml", "jobs/judge.toml"]
    with Path("sample_data/tickets.jsonl").open("a") as file:
        file.write('{"id": "t-13"}\n')
    done = subprocess.run(chain, env=commands, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 3 and "rows of jobs/summarize.toml failed" in done.stderr
    assert len(read_lines(here / "runs/judgements/outputs.jsonl")) == 12
    chain.insert(2, "jobs/none.toml")
    done = subprocess.run(chain, env=commands, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "jobs/none.toml ended with exit code 2" in done.stderr


@pytest.mark.parametrize("script", ["nightly_table.sh jobs/summarize.toml runs/nights", "chain.sh jobs/summarize.toml"])
@pytest.mark.usefixtures("here")
def test_a_script_under_the_short_path_of_cron_says_so_and_takes_the_whole_path(
    script: str, commands: dict[str, str]
) -> None:
    cron = {**commands, "PATH": "/usr/bin:/bin"}
    command = ["sh", *f"jobs/{script}".split()]
    done = subprocess.run(command, env=cron, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 127 and "BATCHGEN=/" in done.stderr
    whole = shutil.which("batchgen", path=commands["PATH"])
    assert whole is not None
    assert subprocess.run(command, env={**cron, "BATCHGEN": whole}, timeout=60, check=False).returncode == 0


def test_thinking_can_be_switched_off_where_the_template_has_a_switch(here: Path) -> None:
    shutil.copytree(MODEL, here / "model")
    (here / "model" / "chat_template.jinja").write_text(THINKING)
    thinks = run("thinking", "--model", "model", "--limit", "1")[1]
    text = (here / "jobs" / "thinking.toml").read_text()
    flags = shlex.split(next(line for line in text.splitlines() if "enable_thinking" in line))[1:]
    silent = run("thinking", "--model", "model", "--limit", "1", "--overwrite", *flags)[1]
    assert silent[0]["usage"]["prompt_tokens"] > thinks[0]["usage"]["prompt_tokens"]  # of "<think></think>"


def test_answers_to_chats_with_tools_have_a_field_for_calls(here: Path) -> None:
    shutil.copytree(MODEL, here / "model")
    (here / "model" / "chat_template.jinja").write_text(THINKING)
    code, rows = run("tools", "--model", "model", "--max-tokens", "40")
    assert code == 0 and [row["tool_calls"] for row in rows] == [[], [], []]


def test_a_folder_of_parquet_files_keeps_its_columns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "reviews").mkdir()
    for part in range(2):
        table = pa.table({"review_id": [2 * part, 2 * part + 1], "body": ["Good.", "Bad."], "stars": [5, 1]})
        pq.write_table(table, here / "reviews" / f"{part}.parquet")
    monkeypatch.setenv("DATA", str(here))
    code, records = run("parquet", "--model", str(MODEL))
    assert (code, [row["stars"] for row in records]) == (0, [5, 1, 5, 1])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_bucket_is_read_and_written(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", bucket)
    code, records = run("s3")
    assert (code, len(records)) == (0, 4)


@pytest.mark.parametrize("recipe", JOBS)
def test_the_job_file_is_valid_and_says_how_to_run_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("BUCKET", "bucket")
    path = RECIPES / f"{recipe}.toml"
    assert Path(load_job(path).output.path).is_absolute()
    assert f"jobs/{recipe}.toml" in path.read_text() or f"/{recipe}.toml" in path.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_gguf_file_writes_sentences() -> None:
    code, records = run("gguf", "--model", str(smollm2()))
    assert (code, len(records)) == (0, 12)
    assert sum(f" {row['input_text']} is " in row["text"] for row in records) > 8


@pytest.mark.usefixtures("here")
def test_the_samples_of_a_run_are_a_table() -> None:
    run("samples", "--limit", "3")
    command = [sys.executable, "jobs/samples.py", "runs/samples/outputs.jsonl"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.count("stop") == 12 and "the vote is right:" in said


@pytest.mark.usefixtures("here")
def test_answers_that_a_rule_found_vote_in_place_of_whole_texts() -> None:
    run("samples", "--limit", "6", "--temperature", "1", "--extract", r"(\w)")
    command = [sys.executable, "jobs/samples.py", "runs/samples/outputs.jsonl"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shares = json.loads(Path("runs/samples/report.json").read_text())["accuracy"]["samples"]
    assert f"the vote is right:   {shares['majority']:.1%}" in said
    votes = re.findall(r"^q-\d+ +(\S+)$", said, re.MULTILINE)
    assert len(votes) == 6 and {len(vote) for vote in votes} == {1}


@pytest.mark.slow
def test_the_script_of_a_hub_job_runs_and_names_what_it_needs(here: Path) -> None:
    text = (RECIPES / "hf_job.py").read_text()
    header = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
    assert header is not None
    needs = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE))
    assert [name.split()[0] for name in needs["dependencies"]] == ["batchgen"]
    command = [sys.executable, "jobs/hf_job.py", "sample_data/questions.jsonl", "", "sample_data/tiny-lfm2"]
    done = subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True)
    assert (done.returncode, len(read_lines(here / "run" / "outputs.jsonl"))) == (0, 300), done.stderr


def test_the_crontab_line_prints_failed_rows_and_nothing_else(here: Path, commands: dict[str, str]) -> None:
    job = JobMaker(here)
    (line,) = re.findall(r"^#   0 1 \* \* \*  (.*)", (RECIPES / "nightly.toml").read_text(), re.MULTILINE)
    line = line.replace("/opt/batchgen/bin/", "").replace("/srv/jobs/nightly.toml", str(job.toml()))
    for rows, said in ((rows_of(40), ""), ([*rows_of(40), "{"], "1 row failed")):
        job.write(rows)
        done = subprocess.run(["sh", "-c", line], env=commands, check=False, capture_output=True, text=True)
        assert bool(done.stderr) == bool(said)
        assert said in done.stderr
    assert "%" not in line, "cron takes it for a new line"


def test_a_deadline_is_no_failure_of_the_service_and_failed_rows_are() -> None:
    service, timer = configparser.ConfigParser(), configparser.ConfigParser()
    service.read_string((RECIPES / "batchgen.service").read_text())
    timer.read_string((RECIPES / "batchgen.timer").read_text())
    assert service["Service"]["SuccessExitStatus"].split() == ["75"]
    assert timer["Install"]["WantedBy"] == "timers.target"


@pytest.mark.slow
def test_the_steps_of_the_gate_pass_and_refuse_worse_answers(here: Path) -> None:
    yaml = pytest.importorskip("yaml")
    text = (RECIPES / "ci.yaml").read_text()
    steps = yaml.safe_load(text)["jobs"]["answers"]["steps"]
    said = [step["run"].partition(" || ")[0] for step in steps if step.get("run", "").startswith("batchgen")]
    _, run_it, compare = (words.split()[1:] for words in said)
    assert [call(run_it), call(["run", "jobs/quickstart.toml", "--quiet"])] == [0, 0]
    baseline = Path(shutil.copy(here / "runs/quickstart/report.json", here / "baseline.json"))
    assert call(compare) == 0
    baseline.write_text(re.sub(r'"exact_match": [\d.]+', '"exact_match": 0.99', baseline.read_text()))
    assert call(compare) == 4


# ---------------------------------------------------------------- machines that are taken away


def machine(job: JobMaker, environment: dict[str, str], name: str, *flags: str) -> subprocess.Popen[bytes]:
    """The script with a run directory of this machine alone, in a session of its own."""
    words = [RECIPES / "sync_to_s3.sh", f"s3://{BUCKET}/{job.folder.name}", job.folder / name, job.toml(), *flags]
    return subprocess.Popen([*map(str, words)], env=environment, start_new_session=True)


def rows_in(store: ObjectStore) -> int:
    """How many lines the journals in the bucket hold."""
    return sum(text.count(b"\n") for name, text in store.content(BUCKET).items() if name.endswith(".seg"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aws") is None, reason="the command aws is not installed")
def test_a_run_whose_machines_are_taken_away_goes_on_from_its_copy(
    job: JobMaker, commands: dict[str, str], store: ObjectStore
) -> None:
    job.write(rows_of(240))  # more than a machine finishes before a copy of 30, however slow the command aws is
    undisturbed = job.elsewhere("undisturbed", load_job(job.toml()))
    environment = {**commands, **store.environment, "SYNC_EVERY_S": "0.1", "STEP_S": "0.4"}
    for number, cut in enumerate((12, 30)):
        lost = machine(job, environment, f"machine{number}")
        while rows_in(store) < cut:
            assert lost.poll() is None
            time.sleep(0.05)
        copied = len(store.requests)
        while not any(request.startswith("PUT") for request in store.requests[copied:]):
            time.sleep(0.01)
        os.killpg(lost.pid, signal.SIGKILL)  # amid the copies
        lost.wait()
    kept = rows_in(store)
    last = machine(job, environment | {"STEP_S": "0"}, "last")
    assert last.wait(120) == 0
    content = store.content(BUCKET)
    assert without_timings(job.folder / "last" / "outputs.jsonl") == undisturbed and kept >= 30
    assert content[f"{job.folder.name}/outputs.jsonl"] == (job.folder / "last" / "outputs.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aws") is None, reason="the command aws is not installed")
def test_an_old_copy_of_another_job_does_no_harm(job: JobMaker, commands: dict[str, str], store: ObjectStore) -> None:
    """Of the bucket's files some are of before: journals that are finished, outputs without their ``job.json``."""
    job.write(rows_of(20))
    environment = {**commands, **store.environment}
    stopped = machine(job, environment, "first", "--max-total-tokens", "200")
    assert stopped.wait(60) == 75
    job.write([*rows_of(25)[2:], {"id": "new", "question": "Why?"}])
    assert machine(job, environment, "second", "--update").wait(60) == 0
    for name in ("job.json", "report.json"):
        store.remove(BUCKET, f"{job.folder.name}/{name}")
    assert machine(job, environment, "third", "--update").wait(60) == 0
    undisturbed = job.elsewhere("undisturbed", load_job(job.toml()))
    assert without_timings(job.folder / "third" / "outputs.jsonl") == undisturbed


# ---------------------------------------------------------------- shards


def slurm(job: JobMaker, environment: dict[str, str], number: int, *flags: str) -> int:
    array = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_JOB_ID": "77"}
    command = [str(RECIPES / "slurm.sh"), str(job.toml()), str(job.folder / "part"), *flags]
    return subprocess.run(command, env=environment | array, timeout=60, check=False, capture_output=True).returncode


def test_the_tasks_of_a_slurm_array_are_shards_that_merge(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(40))
    assert [slurm(job, commands, number) for number in (1, 2)] == [0, 0]
    assert call(["merge", f"{job.folder}/part-1", f"{job.folder}/part-2", "-o", f"{job.folder}/whole"]) == 0
    assert [row["index"] for row in read_lines(job.folder / "whole" / "outputs.jsonl")] == list(range(40))
    assert not (job.folder / "scontrol").exists()


def test_a_slurm_task_that_stops_early_is_queued_again_and_goes_on(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(80))
    assert slurm(job, commands, 2, "--max-total-tokens", "200") == 0
    assert (job.folder / "scontrol").read_text() == "requeue 77_2\n"
    assert not (job.folder / "part-2" / "outputs.jsonl").exists()
    assert slurm(job, commands, 2) == 0
    assert len(read_lines(job.folder / "part-2" / "outputs.jsonl")) == 40


def test_a_slurm_task_whose_shard_is_finished_with_failed_rows_lets_the_merge_run(
    job: JobMaker, commands: dict[str, str]
) -> None:
    job.write([*rows_of(10), "{", "{"])
    assert [slurm(job, commands, number) for number in (1, 2)] == [0, 0]
    assert call(["merge", f"{job.folder}/part-1", f"{job.folder}/part-2", "-o", f"{job.folder}/whole"]) == 3
    assert slurm(job, commands, 1, "--no-such-flag") == 2


def test_the_merge_of_a_slurm_array_waits_for_its_tasks() -> None:
    text = (RECIPES / "slurm.sh").read_text()
    merges = [line for line in text.splitlines() if "batchgen merge" in line]
    assert merges
    assert all("sbatch --dependency=afterok:$id" in line for line in merges)


def pod(job: JobMaker, environment: dict[str, str], index: int) -> subprocess.Popen[bytes]:
    yaml = pytest.importorskip("yaml")
    spec: dict[str, Any] = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())["spec"]
    assert spec["completionMode"] == "Indexed"
    assert f"/{spec['completions']}" in spec["template"]["spec"]["containers"][0]["args"][0]
    rules = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert rules == [[75], [2]]
    container = spec["template"]["spec"]["containers"][0]
    script = container["args"][0].replace("/jobs/job.toml", str(job.toml())).replace("/runs/", f"{job.folder}/")
    return subprocess.Popen([*container["command"], script], env=environment | {"JOB_COMPLETION_INDEX": str(index)})


def test_a_pod_runs_its_shard_and_failed_rows_are_no_failed_pod(job: JobMaker, commands: dict[str, str]) -> None:
    job.write([*rows_of(15), "{"])
    assert pod(job, commands, 7).wait(60) == 0
    assert [row["index"] for row in read_lines(job.folder / "part-7" / "outputs.jsonl")] == [7]
    assert len(read_lines(job.folder / "part-7" / "errors.jsonl")) == 1


def test_an_evicted_pod_says_75_and_the_next_one_goes_on(job: JobMaker, commands: dict[str, str]) -> None:
    job.write(rows_of(800))
    evicted = pod(job, commands | {"STEP_S": "0.05"}, 0)
    folder = job.folder / "part-0" / "journal"
    until = time.monotonic() + 60
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    evicted.send_signal(signal.SIGTERM)
    assert evicted.wait(60) == 75
    assert pod(job, commands, 0).wait(60) == 0
    assert len(read_lines(job.folder / "part-0" / "outputs.jsonl")) == 100


def test_a_table_that_is_edited_every_night_computes_what_is_new(here: Path, commands: dict[str, str]) -> None:
    job = JobMaker(here)
    job.write(rows_of(20))
    night = ["sh", "jobs/nightly_table.sh", str(job.toml()), "runs"]
    subprocess.run(night, env=commands, check=True)
    (today,) = Path("runs").iterdir()
    today.rename("runs/2020-01-01")
    job.write([*rows_of(25)[3:], {"id": "new", "question": "Why?"}])
    for _ in range(2):  # the second time it is done already
        subprocess.run(night, env=commands, check=True)
    assert sum("reused" not in row["timings"] for row in read_lines(today / "outputs.jsonl")) == 6
    assert len(read_lines(today / "outputs.jsonl")) == 23


def shown_script(recipe: str) -> str:
    """The commands that a recipe shows."""
    page = (REPOSITORY / "batchgen" / "docs" / "recipes.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```sh\n(.*?)```", page.partition(f"## {recipe}\n")[2].partition("\n## ")[0], re.DOTALL)
    return str(script)


@pytest.mark.skipif(shutil.which("jq") is None, reason="the command jq is not installed")
def test_all_wrong_rows_are_listed_of_which_the_report_shows_the_first(
    job: JobMaker, commands: dict[str, str], shell: Shell
) -> None:
    rows = rows_of(10)
    job.write(rows)
    texts = [row["text"] for row in job.elsewhere("texts")]
    answers = [texts[0], f" {texts[1]}\n", None, *range(7)]
    job.write([{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)])
    path = job.folder / "runs" / "quickstart"
    job.run(job.spec(output={"path": str(path)}, eval={"expected": "answer"}))
    script = ["sh", "-ec", shown_script("Wrong answers")]
    done = subprocess.run(script, cwd=job.folder, env=commands, check=True, capture_output=True, text=True)
    listed = [json.loads(line)[::2] for line in done.stdout.splitlines()]
    assert listed == [[rows[3 + index]["id"], index] for index in range(7)]
    page = job.folder / "page.html"
    assert "the first 5 of 7, " in shell("report", path).words
    shell("report", path, "--html", page)
    assert "<h2>Wrong answers: the first 5 of 7</h2>" in page.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("jq") is None, reason="the command jq is not installed")
def test_the_lines_for_prometheus_give_the_figures_of_a_report(job: JobMaker) -> None:
    job.write([*rows_of(5), "{"])
    job.run(job.spec(output={"path": str(job.folder / "runs" / "nightly")}))
    subprocess.run(["sh", "-ec", shown_script("Prometheus")], cwd=job.folder, check=True)
    lines = (job.folder / "nightly.prom").read_text().splitlines()
    assert 'batchgen_rows{run="runs/nightly",state="done"} 5' in lines
    assert 'batchgen_failed_rows{run="runs/nightly",code="bad_json"} 1' in lines
    assert all(re.fullmatch(r'batchgen_\w+\{run="[^"]+"(,\w+="\w+")?\} [\d.]+', line) for line in lines)

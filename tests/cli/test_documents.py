"""The README says what the program does, and switches do what their flags say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from run_helpers import JobMaker, smollm2

import batchgen.engine
from batchgen.cli.help import literals
from batchgen.cli.main import call
from batchgen.config.job import POLICIES
from batchgen.config.load import load_job

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_minute_and_its_two_commands_are_those_of_ci() -> None:
    assert README.count("\n") <= 100
    run = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").replace("pip install -q", "pip install")
    for command in ("pip install -e . && batchgen run jobs/quickstart.toml", "pip install -e '.[test]' && pytest"):
        assert f"```sh\n{command}\n```" in README
        assert re.search(rf"^{re.escape(command)}( --overwrite)?$", run, re.MULTILINE)


def test_the_versions_of_python_are_those_of_the_package() -> None:
    package = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [name.rpartition(" ")[2] for name in package["classifiers"] if ":: Python :: 3." in name]
    assert package["requires-python"] == f">={versions[0]}"
    for page in ("README.md", "batchgen/docs/install.md", "batchgen/docs/contributing.md"):
        assert f"Python {versions[0]} to {versions[-1]}" in (REPOSITORY / page).read_text(encoding="utf-8"), page


def test_its_links_lead_somewhere() -> None:
    for path, anchor in re.findall(r"\]\((batchgen/docs/[^)#]+)#?([^)]*)\)", README):
        titles = re.findall(r"^#+ (.*)$", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_chart_is_that_of_the_raw_files() -> None:
    command = [sys.executable, "tests/peers/compare.py", "chart", "tests/peers/raw"]
    drawn = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert (REPOSITORY / "batchgen" / "docs" / "speed.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # what "auto" is on two kinds of processors
def test_a_table_gets_the_answers_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    (tmp_path / "models").symlink_to(smollm2().parents[1])
    shown = re.search(r"```sh\n(pip install -q --no-deps.*?)```\n```csv\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    made, run = shown[1].replace("\\\n", " ").splitlines()[1:3]
    subprocess.run(made, shell=True, check=True)
    assert call([*shlex.split(run)[1:], "--dtype", dtype]) == 0
    said = Path("runs/things/outputs.csv").read_text(encoding="utf-8").splitlines()
    assert said[:2] == shown[2].splitlines()


def test_the_quickstart_prints_what_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = re.search(r"It prints[^`]*:\n\n```\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert call(["run", str(REPOSITORY / "jobs" / "quickstart.toml"), "--output", str(tmp_path / "quickstart")]) == 0
    of_progress = re.compile(r"tok/s computed|\([\d.]+ s\)$")  # what a machine under load shows
    said = [line for line in capsys.readouterr().err.splitlines() if not of_progress.search(line)]
    lines = [re.sub(r"\S+/quickstart", "quickstart", line) for line in shown[1].splitlines()]
    # a few tokens differ with the machine's instructions
    varying = r"[\d,]+ tokens out in [\d.]+ s \([\d,]+ tok/s\); loading [\d.]+ s|[\d.]+% \(\d+ of 300\)"
    assert [re.sub(varying, "", re.sub(r"\S+/quickstart", "quickstart", line)) for line in said] == [
        re.sub(varying, "", line) for line in lines
    ]
    right = [int(re.findall(r"(\d+) of 300", "".join(text))[0]) for text in (said, lines)]
    assert abs(right[0] - right[1]) <= 3


def test_the_python_shown_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(REPOSITORY)
    exec(shown[1], {})
    assert capsys.readouterr().out == "['SHADOW', 'SILVER', 'COPPER']\nSHADOW\n"


def test_the_job_file_shown_loads(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    path = tmp_path / "job.toml"
    path.write_text(shown[1], encoding="utf-8")
    assert load_job(path).model.path == tomllib.loads(shown[1])["model"]


# ---------------------------------------------------------------- switches


ROWS = [{"id": i, "question": f"Name the same city as row {i // 2}, in one word and no more."} for i in range(8)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_switch_reaches_the_engine_and_leaves_outputs_and_resumes_alone(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    name = policy.replace("-", "_")
    made: list[Any] = []
    real = batchgen.engine.Engine

    def engine(model: Any, config: Any, **rest: Any) -> Any:
        made.append(config if hasattr(config, name) else model)
        return real(model, config, **rest)

    monkeypatch.setattr(batchgen.engine, "Engine", engine)
    job.write(ROWS)
    toml = job.toml(sampling={"max_tokens": 6})
    assert call(["run", str(toml), "-q"]) == 0
    expected = job.outputs()
    stopped = ["run", str(toml), "-q", "--overwrite", "--max-num-batched-tokens", "16", "--max-total-tokens", "60"]
    assert call(stopped) == 75
    assert call(["run", str(toml), "-q", "--without", policy]) == 0
    assert job.outputs() == expected
    if hasattr(made[0], name):
        assert [getattr(config, name) for config in made] == [True, True, False]
    spec = load_job(toml)
    assert spec.without([policy]) != spec and spec.without([policy]).output_keys() == spec.output_keys()


# Words that a reader has to read twice: again, that many, continue, fix, compared with, is.
NOT_USED = re.compile(r"\b(anew|so many|go(?:es)? on|mend(?:s|ed)?|held against|stands? for)\b", re.IGNORECASE)


def test_messages_help_and_documents_use_plain_words() -> None:
    package = REPOSITORY / "batchgen"
    pages = [REPOSITORY / "README.md", *(package / "docs").glob("*.md"), *(REPOSITORY / ".github").glob("*.md")]
    texts = [*literals(), *((page.name, page.read_text(encoding="utf-8")) for page in pages)]
    assert [(name, match[0]) for name, text in texts for match in NOT_USED.finditer(text)] == []

"""The README says what the program says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchgen.cli.main import cli
from batchgen.config.load import load_job
from batchgen.core.errors import ExitCode, RowErrorCode

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_commands_shown_are_those_of_the_help() -> None:
    shown = re.search(r"<!-- help: the commands of batchgen --help -->\n```\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    result = CliRunner().invoke(cli, ["--help"], prog_name="batchgen", terminal_width=80)
    assert shown[1] == result.output[result.output.index("Commands:") :]


def test_the_row_shown_is_one_of_the_sample_data() -> None:
    shown, output = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", README, re.DOTALL)[:2])
    rows = (REPOSITORY / "sample_data" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[output["index"]]) == shown
    assert {name: output[name] for name in ("id", "task", "answer")} == {
        k: v for k, v in shown.items() if k != "question"
    }


def test_the_python_shown_prints_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(REPOSITORY)
    exec(shown[1], {})
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == re.findall(r"\d \w+", shown[1].rpartition("#")[2]) != []


def test_the_job_file_shown_loads(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    path = tmp_path / "job.toml"
    path.write_text(shown[1], encoding="utf-8")
    spec = load_job(path)
    assert spec.output.expected == "answer"
    assert tomllib.loads(shown[1])["model"]["path"] == spec.model.path


def test_every_exit_code_and_row_error_code_is_listed() -> None:
    listed = re.search(r"Exit codes: (.*?): run\s+again", README, re.DOTALL)
    assert listed is not None
    assert [int(code) for code in re.findall(r"(?:^|,\s)(\d+)\s", listed[1])] == sorted(ExitCode)
    assert all(f"`{code}`" in README for code in RowErrorCode)

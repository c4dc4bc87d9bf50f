"""The README says what the program does, and switches do what their flags say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from run_helpers import JobMaker

import batchgen.engine
from batchgen.cli.main import call, cli
from batchgen.config.job import KEYS
from batchgen.config.load import load_job
from batchgen.core.keys import BOOL

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_commands_shown_are_those_of_the_help() -> None:
    shown = re.search(r"<!-- help: the commands of batchgen --help -->\n```\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    result = CliRunner().invoke(cli, ["--help"], prog_name="batchgen", terminal_width=80)
    assert shown[1] == result.output[result.output.index("Commands:") : result.output.index("\nExit codes:")]


def test_the_row_shown_is_one_of_the_sample_data() -> None:
    shown, output = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", README, re.DOTALL)[:2])
    rows = (REPOSITORY / "sample_data" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[output["index"]]) == shown
    assert {name: output[name] for name in ("id", "task", "answer")} == {
        k: v for k, v in shown.items() if k != "question"
    }


def test_the_quickstart_prints_what_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = re.search(r"It prints:\n\n```\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert call(["run", str(REPOSITORY / "jobs" / "quickstart.toml"), "--output", str(tmp_path / "quickstart")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "tok/s computed" not in line]
    # a few tokens differ with the machine's dtype
    speed = r"[\d,]+ tokens out in [\d.]+ s \([\d,]+ tok/s\); loading [\d.]+ s"
    assert [re.sub(speed, "", re.sub(r"\S+/quickstart", "quickstart", line)) for line in said] == [
        re.sub(speed, "", line.replace("runs/quickstart", "quickstart")) for line in shown[1].splitlines()
    ]


def test_the_python_shown_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(REPOSITORY)
    exec(shown[1], {})
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[1:] == [["0", "shadow", "SHADOW"], ["1", "silver", "SILVER"], ["2", "copper", "COPPER"]]


def test_the_job_file_shown_loads(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    path = tmp_path / "job.toml"
    path.write_text(shown[1], encoding="utf-8")
    spec = load_job(path)
    assert spec.output.expected == "answer"
    assert tomllib.loads(shown[1])["model"]["path"] == spec.model.path


# ---------------------------------------------------------------- switches


SWITCHES = {
    "--no-prefix-caching": ("engine", "prefix_caching"),
    "--no-share-duplicates": ("engine", "share_duplicates"),
    "--no-longest-first": ("engine", "longest_first"),
    "--no-forecast-memory": ("engine", "forecast_memory"),
    "--no-batch-invariant": ("model", "batch_invariant"),
}
NAMED = (
    "--model --revision --dtype --device --tokenizer --input --prompt --system --no-chat --columns --limit",
    "--max-tokens --temperature --seed --ignore-eos --output --order --token-ids --workers --ray --speculate",
    "--threads --max-num-batched-tokens --max-num-seqs --block-size --kv-cache-memory --max-model-len",
    "--overwrite --strict --max-error-rate --deadline --max-runtime --max-total-tokens --shard",
)
ROWS = [{"id": i, "question": f"Name the same city as row {i // 2}, in one word and no more."} for i in range(8)]


def test_every_switch_that_changes_no_output_is_held_here() -> None:
    found = {(section, item.name) for section, keys in KEYS.items() for item in keys.values() if item.kind is BOOL}
    assert {place for place in found if KEYS[place[0]][place[1]].resume != "same"} == {*SWITCHES.values()}


def test_run_has_the_flags() -> None:
    flags = {name for option in cli.commands["run"].params for name in (*option.opts, *option.secondary_opts)}
    assert flags >= {*" ".join(NAMED).split(), *SWITCHES}


@pytest.mark.parametrize("flag", SWITCHES)
def test_a_switch_reaches_the_engine_and_leaves_outputs_and_resumes_alone(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    section, name = SWITCHES[flag]
    made: list[Any] = []
    real = batchgen.engine.Engine

    def engine(model: Any, config: Any, **rest: Any) -> Any:
        made.append(config if section == "engine" else model)
        return real(model, config, **rest)

    monkeypatch.setattr(batchgen.engine, "Engine", engine)
    job.write(ROWS)
    toml = job.toml(sampling={"max_tokens": 6})
    assert call(["run", str(toml), "-q"]) == 0
    expected = job.outputs()
    stopped = ["run", str(toml), "-q", "--overwrite", "--max-num-batched-tokens", "16", "--max-total-tokens", "60"]
    assert call(stopped) == 75
    assert call(["run", str(toml), "-q", flag]) == 0
    assert job.outputs() == expected
    if section == "engine":
        assert [getattr(config, name) for config in made] == [True, True, False]
    default, switched = (load_job(toml, flags) for flags in ({}, {section: {name: False}}))
    assert getattr(getattr(switched, section), name) is False
    assert default.output_keys() == switched.output_keys()

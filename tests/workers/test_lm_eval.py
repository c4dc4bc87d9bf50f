"""Scores of lm-evaluation-harness: those of its own model "hf", at every batch size, and after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import ENVIRONMENT, MODEL, REPOSITORY, read_lines, write_lines

from batchgen.core.errors import UsageError

lm_eval = pytest.importorskip("lm_eval", reason="an extra that the tests do not bring")
pytestmark = pytest.mark.filterwarnings("default")  # of lm-eval and what it imports

COMMON = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: ROWS}}\n"
TASKS = {
    "generated": """output_type: generate_until
doc_to_text: "<|startoftext|><|im_start|>user\\n{{question}}<|im_end|>\\n<|im_start|>assistant\\n"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", "E"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "chosen": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["SHADOW", "{{answer}}", "a b"]
doc_to_target: 1
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "whole": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}
KILLED = """
import json, os, signal, sys
from batchgen.run.results import ResultSink
finish, count = ResultSink.finish, 0
def finish_and_kill(self, *given):
    global count
    finish(self, *given)
    count += 1
    if count == 9:
        self.journal.commit()
        os.kill(os.getpid(), signal.SIGKILL)
ResultSink.finish = finish_and_kill
__import__("test_lm_eval").evaluate(sys.argv[1], output=sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tasks")
    rows = read_lines(REPOSITORY / "sample_data" / "questions.jsonl")[3:9]
    write_lines(found / "rows.jsonl", rows)
    for name, text in TASKS.items():
        common = COMMON.replace("ROWS", str(found / "rows.jsonl"))
        (found / f"{name}.yaml").write_text(f"task: {name}\n{common}{text}")
    return found


@cache
def evaluate(folder: str, kind: str = "batchgen", **given: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The scores of the tasks, and the model's answers in their order."""
    from lm_eval.tasks import TaskManager

    import batchgen.lm_eval  # noqa: F401 - registers the model

    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", "max_length": 48, **given},
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    answers = {name: [str(row["resps"]) for row in rows] for name, rows in found["samples"].items()}
    return dict(found["results"]), answers


def numbers(texts: list[str]) -> list[float]:
    return [float(number) for text in texts for number in re.findall(r"-\d+\.\d+", text)]


def test_scores_are_those_of_lm_evals_own_model(folder: Path) -> None:
    (scores, answers), (wanted, reference) = evaluate(str(folder)), evaluate(str(folder), "hf")
    assert answers["generated"] == reference["generated"]
    assert "SHADOW" in answers["generated"][1]
    assert [re.findall("True|False", text) for text in answers["chosen"]] == [
        re.findall("True|False", text) for text in reference["chosen"]
    ]
    assert scores["chosen"]["acc,none"] == wanted["chosen"]["acc,none"]
    assert scores["generated"]["exact_match,none"] == wanted["generated"]["exact_match,none"]
    for name in ("chosen", "whole"):
        assert numbers(answers[name]) == pytest.approx(numbers(reference[name]), abs=2e-4)


@pytest.mark.parametrize("max_num_seqs", [1, 8, 256])
def test_scores_are_the_same_at_every_batch_size(folder: Path, max_num_seqs: int) -> None:
    assert evaluate(str(folder), max_num_seqs=max_num_seqs)[1] == evaluate(str(folder))[1]


def command(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    tasks = ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / "found.json")]
    evaluated = [sys.executable, "-m", "batchgen.lm_eval", "run", "--model", "batchgen", *tasks, "--model_args", *given]
    return subprocess.run(evaluated, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_the_command_runs_on_the_device_that_there_is(folder: Path) -> None:
    done = command(folder, f"pretrained={MODEL}", "dtype=float32", "max_length=48")
    assert done.returncode == 0, done.stderr
    [found] = folder.glob("**/found*.json")
    assert json.loads(found.read_text())["results"].keys() == TASKS.keys()


def test_the_command_says_in_a_line_what_is_wrong(folder: Path) -> None:
    done = command(folder, f"pretrained={MODEL}", "dtyp=float32")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("batchgen: lm-eval: unknown model argument 'dtyp'")


def test_an_evaluation_that_was_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(Path(__file__).parent)])}
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "run")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert len([*(tmp_path / "run").glob("*/journal/*")]) > 0
    assert evaluate(str(folder), output=str(tmp_path / "run")) == evaluate(str(folder))
    assert len([*(tmp_path / "run").glob("*/outputs.jsonl")]) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [({"dtyp": "float32"}, "unknown model argument 'dtyp'.*dtype"), ({"max_gen_toks": 99, "max_length": 9}, "")],
)
def test_an_unknown_argument_is_refused(given: dict[str, Any], said: str) -> None:
    from batchgen.lm_eval import BatchgenLM

    if said:
        with pytest.raises(UsageError, match=said):
            BatchgenLM(str(MODEL), **given)
        return
    request = SimpleNamespace(args=("a", {"until": []}))
    with pytest.raises(UsageError, match="max_gen_toks = 99 must be below max_length = 9"):
        BatchgenLM(str(MODEL), **given).generate_until([request])


def test_a_chat_ends_with_the_header_of_an_answer_or_with_the_last_message() -> None:
    from batchgen.lm_eval import BatchgenLM

    model = BatchgenLM(str(MODEL))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    assert model.apply_chat_template(chat[:1]).endswith("<|im_start|>assistant\n")
    assert model.apply_chat_template(chat, add_generation_prompt=False).endswith("assistant\nIt is ")  # as transformers

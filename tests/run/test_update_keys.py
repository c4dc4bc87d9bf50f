"""One key changed under ``--update``, for every key that changes outputs: the folder is that of a fresh run.

The keys are those that ``core.keys`` declares, so a new one is missing here until it has values. A job that a fresh run
refuses is refused as an update too, and nothing changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer
from run_helpers import MODEL, read_lines, timeless, updating, write_lines
from stub_engine import stub_factory

from batchgen.config.job import KEYS
from batchgen.config.load import load_job
from batchgen.core.errors import BatchgenError, ExitCode
from batchgen.run.job import run_job

pytestmark = pytest.mark.breadth
Sections = Mapping[str, Mapping[str, Any]]
THINKS = "{# </think> #}{% for m in messages %}{{ m.content }}{% if enable_thinking %}!{% endif %}{% endfor %}"
FILES = {
    "thinks.jinja": THINKS,
    "brackets.jinja": THINKS.replace("</think>", "[/THINK]"),
    "rows.csv": "id;question\n1;Wie geht's?\n2;Größer, als?\n",
    "other.jsonl": "".join(json.dumps({"id": f"q-{i}", "question": f"And {i}?"}) + "\n" for i in range(4, 9)),
}
CHAT = {"input": {"prompt": None, "messages": "chat"}}
TABLE = {"input": {"path": "rows.csv", "columns": ["question"]}}
THINKING = {"input": {"chat_template": "thinks.jinja"}}
LABELLED = {"sampling": {"max_tokens": None}, "classify": {"labels": ["a", "b b"]}}

# Values of each key that changes outputs; its other keys, if it needs any. A path may name one of FILES.
CASES: dict[str, tuple[tuple[Any, ...], Sections]] = {
    "model.path": ((str(MODEL), "model"), {}),
    "model.dtype": (("auto", "bfloat16", "float32"), {}),
    "model.quantization": (KEYS["model"]["quantization"].kind.choices, {}),
    "model.device": (("auto", "cpu"), {}),
    "model.tokenizer": (("", "tokenizer"), {}),
    "input.path": (("rows.jsonl", "other.jsonl"), {}),
    "input.format": (("auto", "jsonl", "text"), {"input": {"prompt": "{text}", "id": None}}),
    "input.delimiter": ((None, ";", ","), TABLE),
    "input.encoding": ((None, "cp1252"), TABLE),
    "input.id": ((None, "id"), {"sampling": {"temperature": 1.0}}),
    "input.prompt": (("{question}", "question", "Say: {question}"), {}),
    "input.messages": (("chat", "chats"), CHAT),
    "input.prompt_token_ids": (("ids", "other_ids"), {"input": {"prompt": None}}),
    "input.system": ((None, "Be brief."), {}),
    "input.chat_template": (("auto", "none", "thinks.jinja", "brackets.jinja"), {"output": {"parse": ["reasoning"]}}),
    "input.chat_template_kwargs": ((None, {"enable_thinking": True}, {"enable_thinking": False}), THINKING),
    "input.continue_final_message": ((False, True), CHAT),
    "input.special_tokens": (KEYS["input"]["special_tokens"].kind.choices, {}),
    "input.columns": ((["*"], [], ["answer"]), {}),
    "input.limit": ((None, 3, 5), {}),
    "output.token_ids": ((False, True), {}),
    "output.parse": (([], ["reasoning"], ["json"], ["reasoning", "json"]), {}),
    "engine.kv_cache_dtype": (("auto", "bfloat16", "int8"), {}),
    "engine.max_model_len": ((None, 40, 30), {}),
    "eval.expected": ((None, "answer"), {}),
    "eval.extract": ((None, "last_number", "([0-9]+)"), {"eval": {"expected": "answer"}}),
    "sampling.max_tokens": ((8, 4, 30), {}),
    "sampling.min_tokens": ((0, 6), {}),
    "sampling.temperature": ((0.0, 0.5, 1.0), {}),
    "sampling.top_p": ((1.0, 0.5), {"sampling": {"temperature": 1.0}}),
    "sampling.top_k": ((0, 5), {"sampling": {"temperature": 1.0}}),
    "sampling.min_p": ((0.0, 0.2), {"sampling": {"temperature": 1.0}}),
    "sampling.repetition_penalty": ((1.0, 1.5), {}),
    "sampling.presence_penalty": ((0.0, 1.0), {}),
    "sampling.frequency_penalty": ((0.0, 1.0), {}),
    "sampling.seed": ((0, 1), {"sampling": {"temperature": 1.0}}),
    "sampling.stop": ([[], ["zq"], ["a"]], {}),
    "sampling.stop_token_ids": (([], [9]), {}),
    "sampling.ignore_eos": ((False, True), {}),
    "sampling.n": ((1, 2), {"sampling": {"temperature": 1.0}}),
    "sampling.logprobs": ((None, 0, 2), {}),
    "sampling.prompt_logprobs": ((None, 0, 2), {}),
    "sampling.thinking_token_budget": ((None, 2, 4), THINKING),
    "sampling.max_repeats": ((0, 3), {}),
    "sampling.logit_bias": (({}, {"20": 2}), {}),
    "sampling.allowed_token_ids": (([], [20, 21, 22]), {}),
    "sampling.bad_words": (([], ["no"]), {}),
    "sampling.structured_outputs": (({}, {"choice": ["a", "b"]}, {"regex": "[0-9]"}), {}),
    "sampling.generation_config": (("none", "auto"), {"model": {"path": "model"}}),
    "classify.labels": (([], ["a", "b"], ["b", "a"]), {}),
    "classify.by": (("sum", "mean"), LABELLED),
}
# Keys without a case here, and where they have one.
ELSEWHERE = {
    "model.revision": "a folder has no revisions; the digests of its files are compared, as of model.path",
    "model.adapter": "test_adapters.py: the digests of its files are compared, as of model.path",
    "input.regenerate": "test_turns.py: chats need a model that answers turns",
    **{f"embed.{name}": "test_vectors.py: the stub makes no vectors" for name in KEYS["embed"]},
}
# Every value becomes another by default; from every value to every other, the rest are slow.
CHANGES = [
    pytest.param(key, was, now, marks=[] if now - was in (1, 1 - len(values)) else pytest.mark.slow)
    for key, (values, _) in CASES.items()
    for was, now in permutations(range(len(values)), 2)
]


def test_every_key_that_changes_outputs_has_values() -> None:
    keys = {
        f"{section}.{name}" for section, names in KEYS.items() for name, key in names.items() if key.resume != "free"
    }
    assert keys == CASES.keys() | ELSEWHERE.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, templates, another model and another tokenizer."""
    root = tmp_path_factory.mktemp("keys")
    for name, text in FILES.items():
        (root / name).write_bytes(text.encode("cp1252" if name.endswith(".csv") else "utf-8"))
    texts = [*(f"What is {i} times {i}?" for i in range(6)), "Say <|im_end|>.", ""]
    rows = [
        {
            "id": f"q-{i}",
            "question": text,
            "text": f"{text} Or?",
            "answer": str(i),
            "chat": [{"role": "user", "content": text or "Hi"}, {"role": "assistant", "content": "So"}],
            "chats": [{"role": "user", "content": f"{text} Well?"}],
            "ids": [5, 6, i],
            "other_ids": [7, i],
        }
        for i, text in enumerate(texts)
    ]
    write_lines(root / "rows.jsonl", rows)
    shutil.copytree(MODEL, root / "model")
    (root / "model" / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 9}', encoding="utf-8")
    write_tokenizer(root / "tokenizer")
    return root


Outcome = tuple[str, Any]


def outcome_of(folder: Path, key: str, number: int, output: Path) -> Outcome:
    """What a run of the job with one of the values of a key leaves in ``output``, or that it is refused."""
    (values, others), (section, name) = CASES[key], key.split(".")
    keys: dict[str, dict[str, Any]] = {
        "model": {"path": str(MODEL)},
        "input": {"path": "rows.jsonl", "id": "id", "prompt": "{question}"},
        "sampling": {"max_tokens": 8},
        "output": {"path": str(output), "format": "jsonl"},
    }
    for part, more in [*others.items(), (section, {name: values[number]})]:
        keys[part] = {**keys.get(part, {}), **more}
    for part in keys.values():
        for item, value in part.items():
            if isinstance(value, str) and (folder / value).exists() and value:
                part[item] = str(folder / value)
    flags = {part: {item: value for item, value in more.items() if value is not None} for part, more in keys.items()}
    try:
        spec = load_job(None, flags)
        code = run_job(spec, updating(), engine_factory=stub_factory()).exit_code
    except BatchgenError as error:
        return "refused", error.exit_code
    assert code in (ExitCode.OK, ExitCode.ROWS_FAILED)
    names = ("outputs.jsonl", "errors.jsonl")
    records = {name: [*map(timeless, read_lines(output / name))] for name in names if (output / name).exists()}
    return "done", (code, records)


@pytest.mark.parametrize(("key", "was", "now"), CHANGES)
def test_a_folder_whose_job_changes_in_one_key_is_that_of_a_fresh_run(
    folder: Path, tmp_path: Path, key: str, was: int, now: int
) -> None:
    begun = outcome_of(folder, key, was, tmp_path / "out")
    assert begun[0] == "done" or CASES[key][0][was] == ",", "the values of a case are possible"
    updated = outcome_of(folder, key, now, tmp_path / "out")
    assert updated == outcome_of(folder, key, now, tmp_path / "fresh")

"""Facts of answers that a chat template states: each is in the fingerprint of the rows that depend on it."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import THINKING, TOOLS
from input_helpers import write_tokenizer
from run_helpers import MODEL

import batchgen
from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.core.records import Cursor, Row, SamplingParams
from batchgen.output.record_builder import RecordBuilder
from batchgen.text.answer_facts import AnswerFacts
from batchgen.text.tokenizer import Tokenizer

PACKAGE = Path(batchgen.__file__).parent
ROW = Row(0, "in.jsonl", 1, {"tools": TOOLS}, Cursor(0, 9, 0, 1), prompt_token_ids=(5, 6))
# Where the text of a chat template is read: its facts, and an adapter that only passes it on.
READERS = {"text/tokenizer.py", "lm_eval.py", "input/turns.py"}  # the last one names a chat by it
OTHER: dict[str, Any] = {"closing": "[/THINK]", "thinks": False, "tools": "Llama 3"}
BUDGET = SamplingParams(thinking_token_budget=4)


def spec(*parse: str) -> JobSpec:
    return JobSpec(ModelSpec(path=str(MODEL)), InputSpec(path=("in.jsonl",)), OutputSpec(path="out", parse=parse))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING))


def fingerprint(tokenizer: Tokenizer, *parse: str, params: SamplingParams | None = None, ends: tuple[int, ...]) -> str:
    builder = RecordBuilder(spec(*parse), tokenizer, end_ids=ends)
    return builder.fingerprint(replace(ROW, params=params or SamplingParams()))


@pytest.mark.parametrize("name", [item.name for item in fields(AnswerFacts)])
def test_each_fact_is_in_the_fingerprint_of_a_row_that_depends_on_it(tokenizer: Tokenizer, name: str) -> None:
    jobs: list[tuple[tuple[str, ...], SamplingParams]] = [(("tool_calls",), SamplingParams())]
    jobs += [] if name == "tools" else [(("reasoning",), SamplingParams()), ((), BUDGET)]
    tokenizer.answer_facts = replace(tokenizer.answer_facts, tools="LFM2")
    before = [fingerprint(tokenizer, *parse, params=params, ends=(7,)) for parse, params in jobs]
    plain = fingerprint(tokenizer, ends=(7,))
    tokenizer.answer_facts = replace(tokenizer.answer_facts, **{name: OTHER[name]})
    after = [fingerprint(tokenizer, *parse, params=params, ends=(7,)) for parse, params in jobs]
    assert all(was != now for was, now in zip(before, after, strict=True))
    assert fingerprint(tokenizer, ends=(7,)) == plain, "a row that is not split keeps its result"


def test_the_tokens_that_end_answers_are_in_each_fingerprint(tokenizer: Tokenizer) -> None:
    assert fingerprint(tokenizer, ends=(7,)) != fingerprint(tokenizer, ends=(7, 8))
    assert fingerprint(tokenizer, ends=(8, 7)) == fingerprint(tokenizer, ends=(7, 8))


def test_the_tools_that_calls_are_read_by_are_in_the_fingerprint(tokenizer: Tokenizer) -> None:
    builder = RecordBuilder(spec("tool_calls"), tokenizer)
    others = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    rows = [replace(ROW, columns={"tools": tools}) for tools in (TOOLS, others)]
    assert builder.fingerprint(rows[0]) != builder.fingerprint(rows[1])
    plain = RecordBuilder(spec(), tokenizer)
    assert plain.fingerprint(rows[0]) == plain.fingerprint(rows[1])


def test_the_text_of_a_template_is_read_for_its_facts_alone() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "source" and "template" in ast.dump(node.value):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == READERS

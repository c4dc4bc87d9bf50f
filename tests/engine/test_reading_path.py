"""What a feature may not put into the ten files of the reading path; ``tests/test_house.py`` counts their lines."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

from batchgen.engine import Engine
from batchgen.engine.sequence import Sequence

PACKAGE = Path(__file__).parents[2] / "batchgen"
FILES = [
    *("core/records", "engine/sequence", "engine/block_pool", "engine/scheduler", "engine/schedule"),
    *("engine/model_input", "engine/model_runner", "engine/engine", "model/decoder", "model/layers"),
]
MAX_STEP_LINES = 90
MAX_FIELDS = 18
MAX_PARAMETERS = 7


def text(name: str) -> str:
    return (PACKAGE / f"{name}.py").read_text(encoding="utf-8")


def test_they_name_no_device() -> None:
    assert [name for name in FILES if re.search(r"\b(cpu|cuda|gpu)\b", text(name), re.IGNORECASE)] == []


def test_a_step_and_what_it_calls_in_its_file_is_short() -> None:
    (engine,) = [node for node in ast.parse(text("engine/engine")).body if isinstance(node, ast.ClassDef)]
    methods = {node.name: node for node in engine.body if isinstance(node, ast.FunctionDef)}
    found, waiting = set[str](), ["step"]
    while waiting:
        name = waiting.pop()
        if name in methods and name not in found:
            found.add(name)
            waiting += re.findall(r"self\.(\w+)\(", ast.unparse(methods[name]))
    assert found > {"step", "_compute", "_update"}
    ends = [(methods[name].lineno, methods[name].end_lineno or 0) for name in found]
    assert sum(end - start + 1 for start, end in ends) <= MAX_STEP_LINES


def test_a_sequence_has_few_fields_and_an_engine_few_parameters() -> None:
    assert len(fields(Sequence)) <= MAX_FIELDS
    assert len(inspect.signature(Engine).parameters) <= MAX_PARAMETERS

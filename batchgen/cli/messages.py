"""Lookup of the page that explains a message of the program, for ``batchgen help MESSAGE``.

The messages are all string literals of the package, found by their constant parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
PAGES = {  # the page or heading for messages of a room or module; the longest name wins
    **{"": "faq", "api": "python", "llm": "python", "lm_eval": "evaluate with lm-evaluation-harness"},
    **{"bench": "bench", "check": "test it on your machine", "cli": "commands", "config": "job-file"},
    **{"config/cluster": "[cluster]", "config/sampling": "[sampling]"},
    **{"core/gguf": "models", "core/model": "models", "core/remote": "credentials", "core/structured": "extract"},
    **{"core/shard": "shards", "engine": "slow", "kernels": "gpus"},
    **{"input": "rows that fail", "input/formats": "[input]", "input/columns": "[input]", "input/source": "[input]"},
    **{"input/openai_batch": "openai batch files", "input/requests": "error codes", "model": "models"},
    **{"output": "the run directory", "output/publish": "copies", "plan": "plan", "report": "report", "run": "updates"},
    **{"run/merge": "shards", "run/stdin": "standard input", "run/loader": "models", "run/vectors": "embeddings"},
    **{"text": "structured_outputs", "text/chat": "template_error", "text/gguf": "models", "text/tokenizer": "models"},
    **{"text/template": "template_error", "text/tool_calls": "parse", "workers": "workers", "workers/ray": "ray"},
}
_MIN_WORDS = 2
_ROW = re.compile(r"\| `([^`]+)` \|")


class Message(NamedTuple):
    """A message with "…" in place of its variable parts, and the page that explains it."""

    text: str
    page: str


def answers(topic: str, faq: str) -> list[str]:
    """The rows of the tables in the page ``faq`` whose message contains ``topic`` or is contained in it."""
    wanted = _words(topic)
    rows = ((match, line) for line in faq.splitlines() if (match := _ROW.match(line)))
    is_long = wanted.count(" ") + 1 >= _MIN_WORDS
    return [line for match, line in rows if (said := _words(match[1])) in wanted or (is_long and wanted in said)]


def printed(topic: str, texts: Iterable[tuple[str, str]] | None = None) -> Message | None:
    """The message of the program that contains ``topic``; if there are several, the one with the most in common.

    ``texts`` are the ``literals`` of the package, which take a second to read.
    """
    wanted = _words(topic)
    if wanted.count(" ") + 1 < _MIN_WORDS:
        return None
    best, most = None, 0
    for name, text in literals() if texts is None else texts:
        parts = [part for part in map(_words, text.split("…")) if part]
        common = [part for part in parts if f" {part} " in f" {wanted} "]
        size = sum(map(len, common))
        if wanted in _words(text):
            size = len(wanted) + 1
        elif 2 * size < sum(map(len, parts)) or not any(" " in part for part in common):
            continue
        if size > most:
            best, most = Message(text, page_of(name)), size
    return best


def page_of(module: str) -> str:
    """The page for messages of a module such as ``run/merge``."""
    return PAGES[max((name for name in PAGES if module.startswith(name)), key=len)]


def literals() -> Iterator[tuple[str, str]]:
    """Module and text of each string of the package that may be a message, "…" in place of filled-in values."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if id(node) not in skipped and " " in (text := text_of(node)).strip(" …"):
                yield module, text


def text_of(node: ast.AST) -> str:
    """A string literal, with "…" in place of filled-in values; "" for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "…" for part in parts)
    return ""


@cache
def _words(text: str) -> str:
    """The words of a text in lower case, separated by one blank, without punctuation."""
    return " ".join(re.findall(r"[\w-]+", text.lower()))

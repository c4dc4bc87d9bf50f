"""Checkpoints with several chat templates: that for tools is taken for chats with tools, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer

from batchgen.text.chat import in_one
from batchgen.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi there"}]
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Find it", "parameters": {"type": "object"}}}]
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
WITH_TOOLS = "{% if tools %}Call one of {{ tools | tojson }}{% endif %}" + TURNS
PAIRS = {  # of a default and a template for tools
    "plain": (TURNS, WITH_TOOLS),
    "both show tools": (WITH_TOOLS + " default", WITH_TOOLS + " tools"),
    "newlines around": ("\n" + TURNS + "\n\n", "\n\n" + WITH_TOOLS + "\n"),
    "spaces at the beginning": ("  " + TURNS, " \n   {% if true %}\n x" + WITH_TOOLS + "\n {% endif %}\n"),
    "names of their own": ("{% set x = 1 %}" + TURNS + "{{ x }}", "{% set x = 2 %}" + WITH_TOOLS + "{{ x }}"),
    "one macro each": (
        "{% macro show(x) %}<{{ x }}>{% endmacro %}" + TURNS + "{{ show(1) }}",
        "{% macro show(x) %}({{ x }}){% endmacro %}" + WITH_TOOLS + "{{ show(1) }}",
    ),
    "comments": ("{# a #}\n" + TURNS + "{# b #}\n", "{#- c -#}\n " + WITH_TOOLS + " {#- d -#}\n\n"),
}


def as_list(folder: Path, default: str, for_tools: str) -> Path:
    named = {"rag": "{{ documents }}", "default": default, "tool_use": for_tools}
    return write_tokenizer(folder, chat_template=[{"name": n, "template": text} for n, text in named.items()])


def as_object(folder: Path, default: str, for_tools: str) -> Path:
    return write_tokenizer(folder, chat_template={"default": default, "tool_use": for_tools})


def as_files(folder: Path, default: str, for_tools: str) -> Path:
    write_tokenizer(folder, chat_template="not this one")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (folder / "chat_template.jinja").write_text(default, encoding="utf-8")
    (more / "tool_use.jinja").write_text(for_tools, encoding="utf-8")
    return folder


FORMS = {"list": as_list, "object": as_object, "files": as_files}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_prompt_is_that_of_transformers(form: Any, pair: tuple[str, str], tools: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = form(tmp_path, *pair)
    chat: dict[str, Any] = {"messages": CHAT} | ({"tools": tools} if tools else {})
    (found,) = Tokenizer.load(folder).render_chats([chat])
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert found == wanted


def test_without_one_for_tools_the_default_is_as_it_stands() -> None:
    assert in_one({"default": TURNS, "rag": "x"}) == TURNS

"""What a chat passes to its template beside messages: tools, variables of its own, and the time of day."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATS, DATED, THINKING, TOOLS, VARIABLES, fix_date
from input_helpers import write_tokenizer

from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer


@pytest.mark.parametrize("template", [THINKING, DATED], ids=["thinking", "dated"])
def test_tools_and_variables_render_as_in_transformers(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    now = datetime(2026, 5, 1)
    fix_date(now, monkeypatch)
    folder = write_tokenizer(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.load(folder, now), transformers.AutoTokenizer.from_pretrained(folder)
    asked = [(chat, variables) for chat in CHATS for variables in VARIABLES]
    expected = [
        theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **variables)
        for chat, variables in asked
    ]
    assert len(set(expected)) > 12  # they do make a difference
    assert list(ours.render_chats([{**variables, "messages": chat} for chat, variables in asked])) == expected


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (THINKING, {"tools", "enable_thinking", "messages", "add_generation_prompt"}),
        (DATED, {"tools", "custom_tools", "date_string", "strftime_now", "bos_token"}),
        ("{{ 'tools' }}{# tools #} tools {{ messages.tools }}", {"messages"}),
        ("{% macro m(a) %}{{ a }}{{ wide }}{% endmacro %}{{ m(1) }}", {"wide"}),
    ],
)
def test_the_names_of_a_template_are_those_that_it_could_look_at(template: str, names: set[str]) -> None:
    found = ChatTemplate(template, {}).names
    assert names <= found
    assert "tools" in names or "tools" not in found


def test_a_template_keeps_its_names_over_a_restart_of_its_process() -> None:
    template = ChatTemplate("{{ messages[0].content if a else messages[0].content * 10**12 }}", {})
    answers = list(template.render([{"messages": [{"content": "x"}]}, {"messages": [{"content": "x"}], "a": 1}]))
    assert isinstance(answers[0], ChatTemplateError) and answers[1] == "x"
    assert template.names == {"messages", "a"}


def test_a_variable_of_one_chat_is_none_of_the_next() -> None:
    template = ChatTemplate("{{ a is defined }} {{ tools is none }}", {})
    chats: list[Any] = [{"messages": [], "a": None, "tools": TOOLS}, {"messages": []}, []]
    assert list(template.render(chats)) == ["True False", "False True", "False True"]


def test_the_time_of_a_template_is_the_one_given_in_its_own_place() -> None:
    given = datetime.fromisoformat("2026-02-03T23:30:00-11:00")
    assert list(ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {}, given).render([[]])) == ["03 Feb 2026 23:30"]

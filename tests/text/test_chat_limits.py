"""Chat templates of strangers: each costs only its own row, and a stop ends one that does not end by itself."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer
from repeats import slow
from run_helpers import MODEL, JobMaker, finish, start, until_delivered, until_phase

from batchgen.core.errors import ExitCode, ModelError
from batchgen.text import chat
from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer

HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    *("{{ 1 / 0 }}", "{{ '%c' % 55357 }}", "{{ 'a' * 10**15 }}", "{{ 10**15 * [0] }}", "{{ range(10**9)|list }}"),
    "{{ messages.append(1) }}",
    "{% for i in range(100) %}{{ 'a' * 10**6 }}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    # Out of the sandbox, and faults.
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__.__base__.__subclasses__()[0] }}"),
    *("{{ self.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}"),
    *("{{ strftime_now.__self__.__class__.__init__.__globals__['x'] }}", "{{ raise_exception.__globals__.json }}"),
    "{{ ''|attr('__class__')|attr('__mro__')|last }}{{ ''|attr('__class__').__name__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    *("{% include 'tokenizer.json' %}", "{% import 'os' as os %}"),
    *("{{ raise_exception('roles must alternate') }}", "{{ missing.attribute }}"),
    *("{{ 'a' + none }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def answers_of(source: str, *contents: Any) -> list[str | ChatTemplateError]:
    return list(ChatTemplate(source, {}).render([user(content) for content in contents]))


def only_if(content: str, source: str) -> str:
    """A template that is hostile in chats with this content, and writes others down."""
    return f"{{% if messages[0].content == '{content}' %}}{source}{{% endif %}}{{{{ messages[0].content }}}}"


def folder_with(template: str, folder: Path) -> Path:
    """A copy of the sample model with another chat template."""
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_ends_in_one_line(source: str) -> None:
    try:
        [answer] = answers_of(source, "hi")
    except ChatTemplateError as error:  # while it was compiled, which computes constants
        answer = error
    assert isinstance(answer, ChatTemplateError) and "\n" not in str(answer)


def test_a_prompt_beyond_any_context_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_CHARS", 1000)
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    assert answers_of("{{ messages[0].content }}", "a" * 1000) == ["a" * 1000]
    [answer] = answers_of(source, "a")
    assert str(answer) == "the chat template failed: it makes a text of more than 1,000 characters"


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ '%c' % 55357 }}", "{{ raise_exception('no') }}"])
def test_a_chat_that_fails_costs_no_neighbour(source: str) -> None:
    answers = answers_of(only_if("bad", source), "a", "bad", "b", "bad", "bad", "c")
    texts = [answer if isinstance(answer, str) else "error" for answer in answers]
    assert texts == ["a", "error", "b", "error", "error", "c"]


def test_the_date_is_one_for_the_whole_run() -> None:
    first, second = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", {}).render([user(""), user("")])
    assert isinstance(first, str) and first == second


def test_message_values_without_a_json_type_print_as_text() -> None:
    contents = [date(2024, 5, 1), float("nan"), "é\u2028", b"x", 10**30]
    assert answers_of("{{ messages[0].content }}", *contents) == [str(content) for content in contents]


def test_messages_with_lone_surrogates_fail_as_any_text_of_them_would() -> None:
    assert answers_of("{{ messages[0].content|length }}", "\ud800") == ["1"]
    [answer] = answers_of("{{ messages[0].content }}", "\ud800")
    assert isinstance(answer, ChatTemplateError)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 10_000 + ")" * 10_000 + " }}",
        "{{ 1" + " + 1" * 50_000 + " }}",
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "{{ [" * 20_000,
        "{% block a %}{% endblock %}" * 2,
        "{{ '" + "\\" * 9 + " }}",
    ],
    ids=["parentheses", "sum", "blocks", "lists", "twice", "quote"],
)
def test_a_template_that_cannot_be_compiled_is_one_line_that_names_the_file(source: str, tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template does not compile: ") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_short", "signals"),
    [
        (0, [signal.SIGINT]),
        (30, [signal.SIGINT, signal.SIGINT]),
        slow(30, [signal.SIGTERM]),  # the rows under way have their 8 seconds
    ],
)
def test_a_signal_ends_a_run_whose_template_hangs(
    num_short: int, signals: Sequence[signal.Signals], job: JobMaker
) -> None:
    folder = folder_with(only_if("hang", HANGS), job.folder / "model")
    job.write([{"id": i, "question": "short" if i < num_short else "hang"} for i in range(num_short + 300)])
    process = start(["run", job.toml(model={"path": str(folder)})], step_s=0.01)
    until_phase(process, job.output, "generating" if num_short else "reading the input")
    for number in signals:
        process.send_signal(number)
        until_delivered(process, number)
    code, said = finish(process)
    assert code == ExitCode.STOPPED, said

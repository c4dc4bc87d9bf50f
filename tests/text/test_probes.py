"""A chat reaches its prompt whole: what a template does not show is given in another form, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chat_templates import ALTERNATING, DATED, LISTING, PUBLISHED, THINKING, TOOLS

from batchgen.text import probes
from batchgen.text.chat import ChatTemplate
from batchgen.text.probes import HiddenError, Probes

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {"tz": "UTC"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "content": "12:00", "tool_call_id": "call00001"}
TURN = "{{ m.role }}: {{ m.content }}\n"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}"
# A branch for each role that it knows, and none for any other; calls where they are.
BRANCHES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    + TURN
    + "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}tool: {{ m.content }}\n{% endif %}{% endfor %}"
)
# What is neither a user's nor a tool's turn is an assistant's.
ELSE = (
    "{% for m in messages %}{% if m.role == 'system' %}S{% elif m.role == 'user' %}U{% elif m.role == 'tool' %}T"
    "{% else %}A{% endif %}: {{ m.content }}\n{% endfor %}"
)
SHOWS_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def rendered(template: str, *messages: Mapping[str, Any], **variables: Any) -> str:
    """The prompt of a chat, or what is wrong with it."""
    [answer] = Probes(ChatTemplate(template, {"bos_token": ""}).render).render([{"messages": messages, **variables}])
    return str(answer)


def hidden(place: str) -> str:
    return f"{place}: the model's chat template never shows it; leave it out, or name in model.tokenizer a"


@pytest.mark.parametrize(
    ("template", "messages", "variables", "place"),
    [
        (BRANCHES, [{"role": "context", "content": "C"}, USER], {}, "messages[0].content (role 'context')"),
        (BRANCHES, [USER, {"role": "ipython", "content": "C"}], {}, "messages[1].content (role 'ipython')"),
        (BRANCHES, [USER, {"role": "User", "content": "C"}], {}, "messages[1].content (role 'User')"),
        (PLAIN, [USER, CALLED, ANSWERED], {}, "messages[1].tool_calls[0]"),
        (LISTING, [USER, CALLED, ANSWERED], {}, "messages[1].tool_calls[0]"),
        (DATED, [USER, {**CALLED, "content": "Let me see."}, ANSWERED], {}, "messages[1].content"),
        (
            PLAIN,
            [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
            {},
            "messages[1].reasoning_content",
        ),
        (PLAIN, [USER, {"role": "assistant", "content": "a", "refusal": "b"}], {}, "messages[1].refusal"),
        (
            PLAIN.replace("messages", "messages[:1]"),
            [USER, {"role": "assistant", "content": "a"}],
            {},
            "messages[1].content",
        ),
        (PLAIN + "{{ '' if tools }}", [USER], {"tools": TOOLS}, "tools[0], its name"),
        (
            "{{ tools | map(attribute='function.name') | join }}" + PLAIN,
            [USER],
            {"tools": TOOLS},
            "tools[0], its description",
        ),
        (
            "{{ tools | map(attribute='function.name') | join }}{{ tools[0].function.description }}" + PLAIN,
            [USER],
            {"tools": TOOLS},
            "tools[0], its parameters",
        ),
        ("{{ tools[0] }}" + PLAIN, [USER], {"tools": TOOLS}, "tools[1], its name"),
        (
            "{% for m in messages %}" + TURN + "{% if m.tool_calls %}{{ m.tool_calls[0] }}{% endif %}{% endfor %}",
            [USER, {**CALLED, "tool_calls": [CALL, CALL]}],
            {},
            "messages[1].tool_calls[1]",
        ),
        (
            "{% for m in messages %}"
            + TURN
            + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}",
            [USER, CALLED],
            {},
            "messages[1].tool_calls[0]",
        ),
        ("{{ messages[-1].content }}", [{"role": "system", "content": "S"}, USER], {}, "messages[0].content"),
        ("Hi {{ messages | length }}", [USER], {}, "messages[0].content"),
    ],
)
def test_what_the_template_never_shows_is_refused_by_name(
    template: str, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], place: str
) -> None:
    assert rendered(template, *messages, **variables).startswith(hidden(place))


@pytest.mark.parametrize(
    "arguments", [{"n": 7}, {"x": 0.5}, {"flag": True}, {"deep": [{"a": None}]}, {"s": "t", "n": 1}]
)
def test_arguments_that_the_template_never_shows_are_found_whatever_their_type(arguments: dict[str, Any]) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    only_names = (
        "{% for m in messages %}"
        + TURN
        + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    assert rendered(only_names, USER, {**CALLED, "tool_calls": calls}).startswith(hidden("messages[1].tool_calls[0]"))
    whole = only_names.replace("c.function.name", "c.function")
    assert "tool_calls" not in rendered(whole, USER, {**CALLED, "tool_calls": calls})


def test_a_message_of_the_job_and_the_column_are_named_as_the_user_knows_them() -> None:
    answers = Probes(ChatTemplate("{{ messages[-1].content }}", {}).render).render(
        [{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, USER]}]
    )
    [problem] = answers
    assert isinstance(problem, HiddenError)
    assert problem.describe("chat", 1).startswith("input.system: ") and problem.describe("chat").startswith(
        "chat[0].content: "
    )


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "function", "function": {}}])
def test_a_tool_without_a_name_is_shown_whole_or_refused(tool: dict[str, Any]) -> None:
    found = rendered("{{ tools | tojson }}" + PLAIN, USER, tools=[tool])
    assert '"type"' in found and "zq" not in found
    names = "{% for tool in tools %}{{ tool.function.name if tool.function }}{% endfor %}"
    assert rendered(names + PLAIN, USER, tools=[*TOOLS[1:], tool]).startswith(hidden("tools[1]"))


@pytest.mark.parametrize("required", [True, 5, "ab", {"a": 1}, None, [["a"], 3]])
def test_a_schema_may_hold_anything(required: Any) -> None:
    schema = {"type": "object", "properties": {"a": 3}, "required": required}
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    assert json.dumps(required) in rendered("{{ tools | tojson }}" + PLAIN, USER, tools=[tool])


def test_a_schema_by_another_name_is_shown_or_refused() -> None:
    tool = {"type": "function", "function": {"name": "find", "input_schema": {"properties": {"city": {}}}}}
    assert "city" in rendered("{{ tools | tojson }}" + PLAIN, USER, tools=[tool])
    chosen = "{% for tool in tools %}{{ tool.function.name }}{{ tool.function.parameters }}{% endfor %}"
    assert rendered(chosen + PLAIN, USER, tools=[tool]).startswith(hidden("tools[0], its input_schema"))


# ---------------------------------------------------------------- roles that go by another name


@pytest.mark.parametrize(
    "template", [BRANCHES, ELSE, THINKING, ALTERNATING], ids=["branches", "else", "qwen3", "gemma3"]
)
def test_a_developer_is_the_system_where_the_template_knows_no_developer(template: str) -> None:
    turns = [{"role": "developer", "content": "Be terse."}, USER]
    expected = rendered(template, {**turns[0], "role": "system"}, USER)
    assert "Be terse." in expected
    assert rendered(template, *turns) == expected


def test_a_developer_stays_one_where_the_template_shows_the_role() -> None:
    assert rendered(PLAIN, {"role": "developer", "content": "D"}, USER) == "developer: D\nuser: Hi\n"
    named = BRANCHES.replace("'system', ", "'system', 'developer', ")
    assert rendered(named, {"role": "developer", "content": "D"}, USER) == "developer: D\nuser: Hi\n"


def test_the_answer_of_a_function_is_that_of_a_tool_where_the_template_knows_no_function() -> None:
    answered = {**ANSWERED, "role": "function", "name": "now"}
    assert rendered(BRANCHES, USER, CALLED, answered) == rendered(BRANCHES, USER, CALLED, ANSWERED)
    assert "function: 12:00" in rendered(PLAIN, USER, answered)


def test_a_role_that_is_shown_as_another_is_refused() -> None:
    found = rendered(ELSE, USER, {"role": "context", "content": "C"})
    assert found.startswith("messages[1].role (role 'context'): the model's chat template does not know this role")
    assert rendered(ELSE, USER, {"role": "assistant", "content": "C"}) == "U: Hi\nA: C\n"


def test_a_second_system_turn_that_the_template_passes_over_is_refused() -> None:
    only_first = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}{% endfor %}"
    system = {"role": "system", "content": "S"}
    assert rendered(only_first, system, USER) == "system: S\nuser: Hi\n"
    for late in (system, {"role": "developer", "content": "D"}):
        found = rendered(only_first.replace("!= 'system'", "not in ['system', 'developer']"), USER, late)
        assert found.startswith("messages[1].content")


# ---------------------------------------------------------------- parts of a content


def test_parts_go_to_a_template_that_takes_them_as_they_are() -> None:
    assert rendered(SHOWS_PARTS, {"role": "user", "content": parts("a", "b")}) == "user: <a><b>;"
    assert "ab<|im_end|>" in rendered(ALTERNATING, {"role": "user", "content": parts(" a ", "b")})


@pytest.mark.parametrize(
    "write", ["m.content", "m.content | tojson", "m.content | string", "'' + m.content", "m.content | trim"]
)
def test_parts_are_joined_by_newlines_where_the_template_takes_a_text(write: str) -> None:
    template = PLAIN.replace("m.content", write)
    expected = rendered(template, {"role": "user", "content": "a\nb"})
    assert rendered(template, {"role": "user", "content": parts("a", "b")}) == expected


def test_parts_are_joined_in_those_messages_alone_that_need_it() -> None:
    mixed = SHOWS_PARTS.replace("m.content is string", "m.content is string or m.role == 'tool'")
    turns = [{"role": "user", "content": parts("a", "b")}, {"role": "tool", "content": parts("c", "d")}]
    assert rendered(mixed, *turns) == "user: <a><b>;tool: c\nd;"


def test_parts_beyond_the_first_are_not_lost() -> None:
    first = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    assert rendered(first, {"role": "user", "content": parts("a", "b")}) == "a\nb"
    assert "S\nT\n\nHi" in rendered(ALTERNATING, {"role": "system", "content": parts("S", "T")}, USER)


# ---------------------------------------------------------------- thoughts


def test_earlier_thoughts_may_be_left_out_by_a_template_that_shows_the_last_ones() -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "So.", "thinking": "So."}
    assert "So." in rendered(THINKING, USER, thought)
    found = rendered(THINKING, USER, thought, USER)
    assert "Yes." in found and "So." not in found


# ---------------------------------------------------------------- probes that fail


def test_a_template_that_demands_something_of_the_texts_is_asked_with_them() -> None:
    demands = "{% if '[x]' not in messages[0].content %}{{ raise_exception('no [x]') }}{% endif %}"
    shown = Probes(ChatTemplate(demands + BRANCHES, {}).render)
    chats = [
        [{"role": "user", "content": f"[x] {n}"}, {"role": role, "content": "C"}]
        for n, role in enumerate(["tool", "b"])
    ]
    found = [str(answer) for chat in chats for answer in shown.render([{"messages": chat}])]
    assert found == ["user: [x] 0\ntool: C\n", str(HiddenError(probes.Place(1, "content", "b")))]
    assert next(shown.render([{"messages": [USER, *chats[0][1:]]}])).args == ("the chat template failed: no [x]",)  # type: ignore[union-attr]


def test_a_chat_whose_template_cannot_be_asked_with_other_words_is_refused() -> None:
    exact = "{% if messages[0].content != 'Hi' %}{{ raise_exception('not Hi') }}{% endif %}Hi"
    assert rendered(exact, USER).startswith("messages: the model's chat template fails on them with other words")
    assert rendered(exact, {"role": "user", "content": "Ho"}) == "the chat template failed: not Hi"


# ---------------------------------------------------------------- shapes


class Counted:
    """A template whose renderings are counted."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})
        self.num_rendered = 0

    def render(self, chats: Sequence[Any]) -> Any:
        self.num_rendered += len(chats)
        return self._template.render(chats)


def test_chats_of_one_shape_are_probed_once() -> None:
    counted = Counted(BRANCHES)
    shown = Probes(counted.render)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}", "name": f"u{n}"},
                {
                    **CALLED,
                    "tool_calls": [{**CALL, "id": f"{n}", "function": {"name": f"f{n}", "arguments": {"a": n}}}],
                },
                {**ANSWERED, "content": f"a{n}", "tool_call_id": f"{n}"},
            ]
        }
        for n in range(50)
    ]
    for _ in range(3):
        assert len([answer for answer in shown.render(chats) if isinstance(answer, str)]) == 50
    assert counted.num_rendered == 150 + 1


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{**USER, "role": "x"}]},
        {"messages": [USER, USER]},
        {"messages": [{**USER, "content": ""}]},
        {"messages": [{**USER, "content": parts("a")}]},
        {"messages": [{**USER, "kind": "other"}]},
        {"messages": [{**USER, "reasoning_content": "r"}]},
        {"messages": [{**USER, "tool_calls": [CALL]}]},
        {"messages": [{**USER, "tool_calls": [{**CALL, "type": "custom"}]}]},
        {"messages": [{**USER, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"tz": 1}}}]}]},
        {"messages": [{**USER, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"tz": ["a"]}}}]}]},
        {"messages": [{**USER, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "text"}}]}]},
        {"messages": [USER], "enable_thinking": False},
        {"messages": [USER], "enable_thinking": True},
        {"messages": [USER], "tools": TOOLS},
        {"messages": [USER], "tools": TOOLS[:1]},
        {"messages": [USER], "tools": TOOLS[1:]},
    ],
)
def test_what_a_template_may_branch_on_makes_another_shape(other: dict[str, Any]) -> None:
    others = [probes._shape(chat) for chat in [{"messages": [USER]}] if chat != other]
    assert probes._shape(other) not in others


def test_the_shapes_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MAX_SHAPES", 5)
    shown = Probes(ChatTemplate(PLAIN, {}).render)
    chats = [{"messages": [{"role": f"r{n}", "content": "a"}]} for n in range(20)]
    assert list(shown.render(chats)) == [f"r{n}: a\n" for n in range(20)]
    assert len(shown._by_shape) == 5


def test_an_error_of_one_chat_stays_with_it() -> None:
    shown = Probes(ChatTemplate(BRANCHES, {}).render)
    bad = {"messages": [USER, {"role": "x", "content": "X"}]}
    good = {"messages": [USER]}
    found = list(shown.render([good, bad, good, {"messages": [USER], "deep": _deep(3000)}, good, bad]))
    kinds = [type(answer) for answer in found]
    assert kinds == [str, HiddenError, str, HiddenError, str, HiddenError]


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plain_chat_is_as_the_template_renders_it(name: str) -> None:
    template = ChatTemplate(PUBLISHED[name], {"bos_token": "<s>"})
    chats = [
        {"messages": [USER]},
        {"messages": [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "A"}, USER]},
    ]
    assert list(Probes(template.render).render(chats)) == list(template.render(chats))

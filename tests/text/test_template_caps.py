"""A chat reaches its prompt whole: what a template does not show is given in another form, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chat_templates import ALTERNATING, DATED, LISTING, PUBLISHED, THINKING, TOOLS

from batchgen.text.chat import ChatTemplate
from batchgen.text.template_caps import HiddenError, TemplateCaps

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
CALLS = "{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"
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
    [answer] = TemplateCaps(ChatTemplate(template, {"bos_token": ""})).render([{"messages": messages, **variables}])
    return str(answer)


def calling(write: str) -> str:
    """A template that writes this of each call."""
    calls = "{% for c in m.tool_calls or [] %}{{ " + write + " }}{% endfor %}"
    return "{% for m in messages %}" + TURN + calls + "{% endfor %}"


def hidden(place: str) -> str:
    return f"{place}: the model's chat template never shows it; leave it out, or name in model.tokenizer a"


@pytest.mark.parametrize(
    ("template", "messages", "variables", "place"),
    [
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
    texts = "{% for key, value in c.function.arguments.items() if value is string %}{{ key }}={{ value }}{% endfor %}"
    for template in (calling("c.function.name"), calling("c.function.name }}" + texts + "{{ ''")):
        assert rendered(template, USER, {**CALLED, "tool_calls": calls}).startswith(hidden("messages[1].tool_calls[0]"))
    assert "tool_calls" not in rendered(calling("c.function"), USER, {**CALLED, "tool_calls": calls})


# Templates that drop something in one shape of chats only.
BESIDE = [
    ("{% if not m.content %}", CALLS, "{% endif %}", "messages[1].tool_calls[0]"),
    ("{% if not tools %}", CALLS, "{% endif %}", "messages[1].tool_calls[0]"),
    ("", CALLS, "{% if m.tool_calls and m.content %}{% break %}{% endif %}", "messages[2].content"),
]


@pytest.mark.parametrize(("before", "calls", "after", "place"), BESIDE)
def test_a_part_that_is_hidden_in_this_chat_alone_is_refused(before: str, calls: str, after: str, place: str) -> None:
    template = "{{ tools }}{% for m in messages %}" + TURN + before + calls + after + "{% endfor %}"
    said = {**CALLED, "content": "Now."}
    assert rendered(template, USER, said, ANSWERED, tools=TOOLS).startswith(hidden(place))


@pytest.mark.parametrize("text", ["Be terse in all that you say.", "user", "Hi"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_system_turn_is_refused_where_tools_hide_it_however_short_its_text_is(text: str, tools: list[Any]) -> None:
    template = (
        "{{ tools }}{% for m in messages %}{% if m.role != 'system' or not tools %}" + TURN + "{% endif %}{% endfor %}"
    )
    found = rendered(template, {"role": "system", "content": text}, USER, tools=tools)
    assert found.startswith(hidden("messages[0].content") if tools else f"[]system: {text}\nuser: Hi")


@pytest.mark.parametrize(
    ("write", "shown"),
    [
        ("m.role | upper }}: {{ m.content", "USER: "),
        ("m.content | trim", "Hello"),
        ("m.content | tojson", '"'),
        ("m.content.replace('/no_think', '')", "  Hello"),
    ],
)
def test_a_text_may_be_written_in_another_form(write: str, shown: str) -> None:
    template = "{% for m in messages %}{{ " + write + " }}{% endfor %}"
    for text in ("  Hello, where is the library?\n", "  Hello /no_think"):
        assert rendered(template, {"role": "user", "content": text}).startswith(shown)


def test_a_text_that_is_cut_is_refused() -> None:
    cut = PLAIN.replace("m.content", "m.content[:20]")
    assert rendered(cut, {"role": "user", "content": "Where is the library?"}).startswith(hidden("messages[0].content"))


def test_the_table_says_what_a_template_shows() -> None:
    tables = {name: TemplateCaps(ChatTemplate(text, {"bos_token": ""})).table for name, text in PUBLISHED.items()}
    shown = {name: " ".join(part for part, is_shown in table.items() if is_shown) for name, table in tables.items()}
    assert shown == {
        "lfm2": "system tools results",
        "lfm2.5": "system tools calls results",
        "qwen3": "system tools calls results thoughts",
        "llama3": "system tools calls results",
        "smollm3": "system tools results",
        "gemma3": "system results",
    }


def test_a_message_of_the_job_and_the_column_are_named_as_the_user_knows_them() -> None:
    answers = TemplateCaps(ChatTemplate("{{ messages[-1].content }}", {})).render(
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


@pytest.mark.parametrize("template", [BRANCHES, ELSE], ids=["branches", "else"])
@pytest.mark.parametrize("role", ["context", "ipython", "User"])
def test_a_role_that_is_not_shown_or_is_shown_as_another_is_refused(template: str, role: str) -> None:
    found = rendered(template, USER, {"role": role, "content": "C"})
    assert found.startswith(f"messages[1].role (role {role!r}): the model's chat template does not know this role;")
    assert "ipython\n" in rendered(DATED, USER, {"role": "ipython", "content": "C"})


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


# ---------------------------------------------------------------- the check itself


def test_a_template_that_demands_something_of_the_texts_is_asked_with_them() -> None:
    demands = "{% if '[x]' not in messages[0].content %}{{ raise_exception('no [x]') }}{% endif %}" + BRANCHES
    first, tool = {"role": "user", "content": "[x] 0"}, {"role": "tool", "content": "C"}
    assert rendered(demands, first, tool) == "user: [x] 0\ntool: C\n"
    assert rendered(demands, first, {"role": "b", "content": "C"}).startswith("messages[1].role (role 'b')")
    assert rendered(demands, USER, tool) == "the chat template failed: no [x]"


def test_a_chat_whose_template_cannot_be_asked_with_other_words_is_refused() -> None:
    exact = "{% if messages[0].content != 'Hi' %}{{ raise_exception('not Hi') }}{% endif %}Hi"
    assert rendered(exact, USER).startswith("messages: the model's chat template fails on them with other words")
    assert rendered(exact, {"role": "user", "content": "Ho"}) == "the chat template failed: not Hi"


class Counted(ChatTemplate):
    """A template whose renderings are counted."""

    num_rendered = 0

    def render(self, chats: Sequence[Any]) -> Any:
        self.num_rendered += len(chats)
        return super().render(chats)


def test_a_plain_chat_whose_texts_are_long_is_rendered_once() -> None:
    counted = Counted(BRANCHES, {})
    caps = TemplateCaps(counted)
    chats = [{"messages": [{"role": "user", "content": f"Question number {n}?"}]} for n in range(50)]
    assert len([*caps.render(chats)]) == counted.num_rendered == 50


def test_an_error_of_one_chat_stays_with_it() -> None:
    bad, good = {"messages": [USER, {"role": "x", "content": "X"}]}, {"messages": [USER]}
    chats = [good, bad, good, {"messages": [USER], "deep": _deep(3000)}, good, bad]
    found = [isinstance(answer, str) for answer in TemplateCaps(ChatTemplate(BRANCHES, {})).render(chats)]
    assert found == [True, False, True, False, True, False]


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
    assert list(TemplateCaps(template).render(chats)) == list(template.render(chats))

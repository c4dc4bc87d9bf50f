"""A chat reaches its prompt whole: what a template does not show is given in another form, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chat_templates import ALTERNATING, DATED, LISTING, PUBLISHED, THINKING, TOOLS

from batchgen.text.chat import ChatTemplate
from batchgen.text.marks import MarkedChat
from batchgen.text.template_caps import HiddenError, TemplateCaps


def each(write: str) -> str:
    """A template that writes this of each message."""
    return "{% for m in messages %}" + write + "{% endfor %}"


USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "S"}
SAID = {"role": "assistant", "content": "In the old town."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {"tz": "UTC"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "content": "12:00", "tool_call_id": "call00001"}
TURN = "{{ m.role }}: {{ m.content }}\n"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
BOTH_CALLS = {**CALLED, "tool_calls": [CALL, CALL]}
LONG = {**USER, "content": "Where is the library?"}
NAMES = "{{ tools | map(attribute='function.name') | join }}"
PLAIN, CALLING = each(TURN), each(TURN + CALLS)
# A branch for each role that it knows, and none for any other.
BRANCHES = each(
    "{% if m.role in ['system', 'user', 'assistant'] %}" + TURN + CALLS + "{% elif m.role == 'tool' %}"
    "tool: {{ m.content }}\n{% endif %}"
)
# What is neither a user's nor a tool's turn is an assistant's.
ELSE = each(
    "{% if m.role == 'system' %}S{% elif m.role == 'user' %}U{% elif m.role == 'tool' %}T{% else %}A{% endif %}: "
    "{{ m.content }}\n"
)
SHOWS_PARTS = each(
    "{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %};"
)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def rendered(template: str, *messages: Mapping[str, Any], **variables: Any) -> str:
    """The prompt of a chat, or what is wrong with it."""
    [answer] = TemplateCaps(ChatTemplate(template, {"bos_token": ""})).render([{"messages": messages, **variables}])
    return str(answer)


def hidden(place: str) -> str:
    return f"{place}: the model's chat template does not show it; leave it out, or name in model.tokenizer a"


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (LISTING, [USER, CALLED, ANSWERED], "messages[1].tool_calls[0]"),
        (CALLING.replace("{{ c.function.name }}", ""), [USER, CALLED], "messages[1].tool_calls[0]"),
        (DATED, [USER, {**CALLED, "content": "Let me see."}, ANSWERED], "messages[1].content"),
        (PLAIN, [LONG, {**SAID, "reasoning_content": "b"}], "messages[1].reasoning_content"),
        (PLAIN, [LONG, {**SAID, "refusal": "b"}], "messages[1].refusal"),
        (PLAIN.replace("messages", "messages[:1]"), [USER, SAID], "messages[1].content"),
        (each(TURN + "{{ (m.tool_calls or [1])[0] }}"), [BOTH_CALLS], "messages[0].tool_calls[1]"),
        ("{{ messages[-1].content }}", [SYSTEM, USER], "messages[0].content"),
        ("Hi {{ messages | length }}", [USER], "messages[0].content"),
        (PLAIN.replace("messages", "messages[1:]"), [LONG, SAID, LONG], "messages[0].content"),
        # A text that is cut, and what is dropped in one shape of chats alone.
        (PLAIN.replace("content", "content[:20]"), [LONG], "messages[0].content"),
        (each(TURN + "{% if not m.content %}" + CALLS + "{% endif %}"), [CALLED | SAID], "messages[0].tool_calls[0]"),
        (each(TURN + CALLS + "{% if m.tool_calls %}{% break %}{% endif %}"), [CALLED, ANSWERED], "messages[1].content"),
        (each("{% if m.role == 'user' or loop.first %}" + TURN + "{% endif %}"), [USER, SYSTEM], "messages[1].content"),
    ],
)
def test_what_the_template_does_not_show_is_refused_by_name(
    template: str, messages: Sequence[Mapping[str, Any]], place: str
) -> None:
    assert rendered(template, *messages).startswith(hidden(place))


@pytest.mark.parametrize(
    ("template", "place"),
    [
        (CALLING + "{{ '' if tools }}", "tools[0], its name"),
        (NAMES + CALLING, "tools[0], its description"),
        (NAMES + "{{ tools[0].function.description }}" + CALLING, "tools[0], its parameters"),
        ("{{ tools[0] }}" + CALLING, "tools[1], its name"),
        ("{{ tools }}" + each(TURN + "{% if not tools %}" + CALLS + "{% endif %}"), "messages[1].tool_calls[0]"),
    ],
)
def test_what_the_template_does_not_show_beside_tools_is_refused(template: str, place: str) -> None:
    messages = [LONG, CALLED] if "calls" in place else [LONG]
    assert rendered(template, *messages, tools=TOOLS).startswith(hidden(place))


@pytest.mark.parametrize("text", ["Be terse in all that you say.", "user", "Hi"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_system_turn_is_refused_where_tools_hide_it_however_short_its_text_is(text: str, tools: list[Any]) -> None:
    template = "{{ tools }}" + each("{% if m.role != 'system' or not tools %}" + TURN + "{% endif %}")
    found = rendered(template, {**SYSTEM, "content": text}, USER, tools=tools)
    assert found.startswith(hidden("messages[0].content") if tools else f"[]system: {text}\nuser: Hi")


@pytest.mark.parametrize(
    "arguments", [{"n": 7}, {"x": 0.5}, {"flag": True}, {"deep": [{"a": None}]}, {"s": "t", "n": 1}]
)
def test_arguments_that_the_template_does_not_show_are_found_whatever_their_type(arguments: dict[str, Any]) -> None:
    message = {**CALLED, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}
    texts = "{% for key, value in c.function.arguments.items() if value is string %}{{ key }}={{ value }}{% endfor %}"
    for write in ("", texts):
        template = each(TURN + CALLS.replace("{{ c.function.arguments | tojson }}", write))
        assert rendered(template, USER, message).startswith(hidden("messages[1].tool_calls[0]"))
    assert rendered(CALLING, USER, message).startswith("user: Hi\nassistant: \nf{")


@pytest.mark.parametrize(
    ("write", "shown"),
    [
        ("m.role | upper }}: {{ m.content", "USER: "),
        ("m.content | trim", "Hello"),
        ("m.content | upper", "  HELLO"),
        ("m.content | tojson", '"'),
        ("m.content.replace('/no_think', '')", "  Hello"),
    ],
)
def test_a_text_may_be_written_in_another_form(write: str, shown: str) -> None:
    for text in ("  Hello, where is the library?\n", "  Hello /no_think"):
        assert rendered(each("{{ " + write + " }}"), {**USER, "content": text}).startswith(shown)


def test_earlier_thoughts_may_be_left_out_by_a_template_that_shows_the_last_ones() -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "So.", "thinking": "So."}
    assert "So." in rendered(THINKING, USER, thought)
    found = rendered(THINKING, USER, thought, USER)
    assert "Yes." in found and "So." not in found


def test_the_table_says_what_a_template_shows() -> None:
    tables = {name: TemplateCaps(ChatTemplate(text, {"bos_token": ""})).table for name, text in PUBLISHED.items()}
    assert {name: " ".join(part for part in table if table[part]) for name, table in tables.items()} == {
        "lfm2": "system tools results",
        "lfm2.5": "system tools calls results",
        "qwen3": "system tools calls results thoughts",
        "llama3": "system tools calls results",
        "smollm3": "system tools results",
        "gemma3": "system results",
    }


def test_a_message_of_the_job_and_the_column_are_named_as_the_user_knows_them() -> None:
    caps = TemplateCaps(ChatTemplate("{{ messages[-1].content }}", {}))
    [problem] = caps.render([{"messages": [SYSTEM, {"role": "user", "content": "a"}, USER]}])
    assert isinstance(problem, HiddenError)
    assert problem.describe("chat", 1).startswith("input.system: ")
    assert problem.describe("chat").startswith("chat[0].content: ")


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "function", "function": {}}])
def test_a_tool_without_a_name_is_shown_whole_or_refused(tool: dict[str, Any]) -> None:
    found = rendered("{{ tools | tojson }}" + PLAIN, USER, tools=[tool])
    assert '"type"' in found and "zq" not in found
    names = "{% for tool in tools %}{{ tool.function.name if tool.function }}{% endfor %}"
    assert rendered(names + PLAIN, USER, tools=[*TOOLS[1:], tool]).startswith(hidden("tools[1]"))


def test_a_schema_by_another_name_is_shown_or_refused() -> None:
    tool = {"type": "function", "function": {"name": "find", "input_schema": {"properties": {"city": {}}}}}
    assert "city" in rendered("{{ tools | tojson }}" + PLAIN, USER, tools=[tool])
    chosen = "{{ tools[0].function.name }}{{ tools[0].function.parameters }}"
    assert rendered(chosen + PLAIN, USER, tools=[tool]).startswith(hidden("tools[0], its input_schema"))


# ---------------------------------------------------------------- roles that go by another name


@pytest.mark.parametrize(
    ("template", "tools"),
    [(BRANCHES, None), (ELSE, None), (THINKING, None), (ALTERNATING, None), (DATED, TOOLS)],
    ids=["branches", "else", "qwen3", "gemma3", "llama3"],
)
def test_a_developer_is_the_system_where_the_template_knows_no_developer(template: str, tools: Any) -> None:
    expected = rendered(template, {**SYSTEM, "content": "Be terse."}, USER, tools=tools)
    assert "Be terse." in expected
    assert rendered(template, {"role": "developer", "content": "Be terse."}, USER, tools=tools) == expected


def test_a_developer_stays_one_where_the_template_shows_the_role() -> None:
    for template in (PLAIN, BRANCHES.replace("'system', ", "'system', 'developer', ")):
        assert rendered(template, {"role": "developer", "content": "D"}, USER) == "developer: D\nuser: Hi\n"


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


# ---------------------------------------------------------------- parts of a content


def test_parts_go_to_a_template_that_takes_them_as_they_are() -> None:
    assert rendered(SHOWS_PARTS, {"role": "user", "content": parts("a", "b")}) == "user: <a><b>;"
    assert "ab<|im_end|>" in rendered(ALTERNATING, {"role": "user", "content": parts(" a ", "b")})


def test_parts_are_joined_in_all_messages_if_the_template_does_not_show_those_of_one() -> None:
    mixed = SHOWS_PARTS.replace("m.content is string", "m.content is string or m.role == 'tool'")
    turns = [{"role": "user", "content": parts("a", "b")}, {"role": "tool", "content": parts("c", "d")}]
    assert rendered(mixed, *turns) == "user: a\nb;tool: c\nd;"
    first = each("{{ m.content if m.content is string else m.content[0].text }}")
    assert rendered(first, {"role": "user", "content": parts("a", "b")}) == "a\nb"
    assert "S\nT\n\nHi" in rendered(ALTERNATING, {"role": "system", "content": parts("S", "T")}, USER)


@pytest.mark.parametrize(
    "write", ["{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}", "{{ m.content[0].text }}"]
)
def test_texts_are_lists_of_one_part_if_the_template_takes_only_lists(write: str) -> None:
    template = each("{{ m.role }}: " + write + ";")
    prompt = rendered(template, SYSTEM, {**USER, "content": parts("a")}, SAID)
    assert prompt == "system: S;user: a;assistant: In the old town.;"
    assert TemplateCaps(ChatTemplate(template, {})).table["system"]
    assert rendered(template, USER, CALLED).startswith(hidden("messages[1].tool_calls[0]"))
    two = rendered(template, SYSTEM, {**USER, "content": parts("a", "b")})
    assert two == ("system: S;user: a\nb;" if "[0]" in write else "system: S;user: ab;")


# ---------------------------------------------------------------- the check itself


def test_a_message_that_is_dropped_since_it_equals_another_is_refused() -> None:
    drops = "{% set ns = namespace(last='') %}" + each(
        "{% if m.content != ns.last %}" + TURN + "{% endif %}{% set ns.last = m.content %}"
    )
    assert rendered(drops, LONG, {**SAID, "content": LONG["content"]}).startswith(hidden("messages[0].content"))
    assert rendered(drops, LONG, SAID, LONG).count(LONG["content"]) == 2


def test_a_template_that_demands_something_of_the_texts_is_asked_with_them() -> None:
    demands = "{% if '[x]' not in messages[0].content %}{{ raise_exception('no [x]') }}{% endif %}" + BRANCHES
    first, tool = {"role": "user", "content": "[x] 0"}, {"role": "tool", "content": "C"}
    assert rendered(demands, first, tool) == "user: [x] 0\ntool: C\n"
    assert rendered(demands, first, {"role": "b", "content": "C"}).startswith("messages[1].role (role 'b')")
    assert rendered(demands, USER, tool) == "the chat template failed: no [x]"


def test_a_chat_whose_template_cannot_be_asked_with_other_words_is_refused() -> None:
    exact = "{% if messages[0].content != 'Hi' %}{{ raise_exception('not Hi') }}{% endif %}Hi"
    assert rendered(exact, USER).startswith("messages: the model's chat template fails on them with other words")


def test_words_of_a_chat_that_look_like_marks_of_the_check_are_no_marks() -> None:
    text = "zq0qz zq1qz ZQQ0QZ"
    assert rendered(SHOWS_PARTS, {"role": "user", "content": parts(text, text)}) == f"user: <{text}><{text}>;"
    long = MarkedChat({"messages": [{"role": "user", "content": "z" + "q" * 10_000}]}).variables["messages"][0]
    assert len(long["content"]) < 10_050
    drops = each("{% if loop.last %}" + TURN + "{% endif %}")
    assert rendered(drops, {"role": "user", "content": text}, USER).startswith(hidden("messages[0].content"))


def test_a_plain_chat_whose_texts_are_long_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, numbers = ChatTemplate(BRANCHES, {}), []
    render = template.render
    monkeypatch.setattr(template, "render", lambda chats: numbers.append(len(chats)) or render(chats))
    chats = [{"messages": [{"role": "user", "content": f"Question number {n}?"}]} for n in range(50)]
    assert len([*TemplateCaps(template).render(chats)]) == sum(numbers) - 1 == 50  # one chat is the trial


def test_an_error_of_one_chat_stays_with_it() -> None:
    bad, good = {"messages": [USER, {"role": "x", "content": "X"}]}, {"messages": [USER]}
    answers = TemplateCaps(ChatTemplate(BRANCHES, {})).render([good, bad, {**good, "deep": _deep(3000)}, good])
    assert [isinstance(answer, str) for answer in answers] == [True, False, False, True]


def test_calls_and_tools_may_be_nested_as_deeply_as_the_template_takes_them() -> None:
    call = {"function": {"name": "f", "arguments": {"a": _deep(400)}, "function": _deep(400)}}
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": _deep(400)}}, "function": _deep(400)}}
    found = rendered("{{ tools | tojson }}" + CALLING, USER, {**CALLED, "tool_calls": [call]}, tools=[tool])
    assert '"function": "x"}}}' in found


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"name": "f", "function": value}
    return value

"""What a message may hold before a template sees it: what says nothing is not there, and what is no text is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.input.messages import checked_messages, checked_tools
from batchgen.input.rows import RowProblem

USER = {"role": "user", "content": "Time?"}
# What OpenAI's own client writes of a message, see model_dump().
UNSAID = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "name": None}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}


def said(**keys: Any) -> dict[str, Any]:
    """An assistant's message as a template gets it."""
    [_, message] = checked_messages("messages", [USER, {"role": "assistant", **keys}])
    return message


def problem(value: Any, name: str = "messages") -> str:
    with pytest.raises(RowProblem) as caught:
        checked_messages(name, value)
    return f"{caught.value.error.code}: {caught.value}"


def test_a_message_as_openais_client_dumps_it_says_no_more_than_its_text() -> None:
    assert said(content="12:00", **UNSAID) == {"role": "assistant", "content": "12:00", "annotations": []}


@pytest.mark.parametrize("arguments", [" ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    assert said(content=None, tool_calls=[call(arguments)])["tool_calls"] == [call({})]
    bare = {"function": {"name": "now"}}
    assert said(tool_calls=[bare])["tool_calls"] == [{"function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize("arguments", ["not json", "[1]", "7", "[" * 5000 + "]" * 5000])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    assert said(tool_calls=[call(arguments)])["tool_calls"] == [call(arguments)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("text", "12:00"), ("contents", "12:00"), ("parts", [{"text": "12:00"}]), ("output", {"a": "b"})],
)
def test_an_assistant_that_said_something_under_another_name_is_refused(name: str, value: Any) -> None:
    wanted = f"bad_type: messages[1].content is missing, and the turn has {name!r}, which no template reads"
    for nothing in ({}, {"content": None}):
        assert problem([USER, {"role": "assistant", **nothing, name: value}]) == wanted
    assert said(content="so", **{name: value})["content"] == "so"
    assert said(reasoning="so", **{name: value})["content"] == ""


@pytest.mark.parametrize("name", ["parameters", "input", "args"])
@pytest.mark.parametrize("value", [{"tz": "UTC"}, '{"tz": "UTC"}'])
def test_a_call_whose_arguments_go_by_another_name_is_refused(name: str, value: Any) -> None:
    wanted = f"arguments is missing, and the call has {name!r}, which no template reads"
    function = {"name": "now", name: value}
    assert problem([USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]).endswith(
        f"messages[1].tool_calls[0].function.{wanted}"
    )
    assert problem([USER, {"role": "assistant", "tool_calls": [function]}]).endswith(f"tool_calls[0].{wanted}")
    assert problem([USER, {"role": "assistant", "function_call": function}]).endswith(f"function.{wanted}")
    assert said(tool_calls=[{**function, "arguments": {"a": 1}}])["tool_calls"][0]["arguments"] == {"a": 1}


@pytest.mark.parametrize("role", ["user", "system", "tool", "developer"])
def test_of_others_a_content_is_required(role: str) -> None:
    assert problem([USER, {"role": role, "content": None}]) == "bad_type: messages[1].content is null, not a string"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_by_any_name_win_over_names_that_are_null(name: str) -> None:
    nulls = dict.fromkeys(("thinking", "reasoning_content", "reasoning"))
    found = said(content="12:00", **{**nulls, name: "look it up"})
    assert found["thinking"] == found["reasoning_content"] == "look it up" and None not in found.values()


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_by_two_names_are_the_same_or_the_row_is_refused(name: str) -> None:
    others = [other for other in ("reasoning_content", "thinking", "reasoning") if other != name]
    for other in others:
        found = said(content="12:00", **{other: "", name: "look it up"})
        assert found["thinking"] == found["reasoning_content"] == "look it up" and "" not in found.values()
        both = problem([USER, {"role": "assistant", other: "a", name: "b"}])
        assert "messages[1] has other text in" in both and name in both and other in both


@pytest.mark.parametrize("value", [["look it up"], {"text": "look it up"}, 7])
def test_thoughts_that_are_no_text_are_refused(value: Any) -> None:
    assert problem([USER, {"role": "assistant", "thinking": value}]).startswith("bad_type: messages[1].thinking is ")
    assert said(content="12:00", reasoning=type(value)()) == {"role": "assistant", "content": "12:00"}


@pytest.mark.parametrize("name", ["reasoning_details", "thinking_blocks"])
def test_thoughts_in_a_list_of_another_api_are_refused_where_they_are_nowhere_else(name: str) -> None:
    found = [{"type": "reasoning.text", "text": "look it up"}]
    turn = {"role": "assistant", "content": "12:00", name: found}
    assert problem([USER, turn]).startswith(f"bad_type: messages[1].{name}: give the")
    assert said(content="12:00", reasoning="look it up", **{name: found})[name] == found
    assert said(content="12:00", **{name: []})[name] == []


@pytest.mark.parametrize("arguments", ['{"tz": "UTC"}', {"tz": "UTC"}])
def test_a_function_call_is_a_call(arguments: Any) -> None:
    older = {"name": "now", "arguments": arguments}
    expected = [{"type": "function", "function": {"name": "now", "arguments": {"tz": "UTC"}}}]
    assert said(content=None, function_call=older) == {"role": "assistant", "content": "", "tool_calls": expected}
    both = [USER, {"role": "assistant", "function_call": older, "tool_calls": [call("")]}]
    assert problem(both).startswith("bad_type: messages[1] has both tool_calls and function_call")
    assert problem([USER, {"role": "assistant", "function_call": "now"}]).startswith(
        "bad_type: messages[1].tool_calls[0]"
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_the_text_of_a_refusal_is_what_the_assistant_said(content: Any) -> None:
    assert said(content=content, refusal="I cannot.") == {"role": "assistant", "content": "I cannot."}
    assert said(content="Well.", refusal="I cannot.")["refusal"] == "I cannot."  # a probe tells whether it is shown


@pytest.mark.parametrize(
    ("made", "place"),
    [
        ({"type": "custom", "custom": {"name": "f", "input": "x"}}, "tool_calls[0].function is null, not an object"),
        ({"function": {"arguments": "{}"}}, "tool_calls[0].function.name is null, not a string"),
        ({"name": None, "arguments": {}}, "tool_calls[0].function.name is null, not a string"),
        ({"function": {"name": 7}}, "tool_calls[0].function.name is a number, not a string"),
    ],
)
def test_a_call_that_names_no_function_is_refused(made: dict[str, Any], place: str) -> None:
    assert problem([USER, {"role": "assistant", "tool_calls": [made]}]) == f"bad_type: messages[1].{place}"


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a", "image_url": None},
        {"type": "refusal", "refusal": "a", "text": None},
    ],
)
def test_a_part_of_text_is_one_by_any_of_its_names(part: Any) -> None:
    assert checked_messages("c", [{"role": "user", "content": [part]}])[0]["content"] == [{"type": "text", "text": "a"}]


def test_other_keys_of_a_part_stay() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert checked_messages("c", [{"role": "user", "content": [part]}])[0]["content"] == [part]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"text": "a"}, 7, None, "a", {"type": []}])
def test_a_part_that_is_no_text_is_refused(part: Any) -> None:
    found = problem([{"role": "user", "content": [part]}])
    is_typed = not isinstance(part, dict) or "image_url" in part
    assert found.startswith("bad_type: messages[0].content[0]" + (".type is " if isinstance(part, dict) else " is "))
    assert found.endswith(": only text parts are supported" if is_typed else ", not a string")


@pytest.mark.parametrize(("value", "what"), [({}, "null"), ({"text": None}, "null"), ({"text": 7}, "a number")])
def test_a_part_whose_text_is_no_string_is_named(value: Any, what: str) -> None:
    found = problem([{"role": "user", "content": [{"type": "text", **value}]}])
    assert found == f"bad_type: messages[0].content[0].text is {what}, not a string"


def test_parts_without_any_text_are_an_empty_prompt() -> None:
    for content in ([], [{"type": "text", "text": " "}]):
        assert problem([{"role": "user", "content": content}]).startswith("empty_prompt")


# ---------------------------------------------------------------- JSON text


def test_messages_and_tools_may_be_json_text() -> None:
    assert checked_messages("messages", json.dumps([USER])) == [USER]
    assert checked_tools(json.dumps([{"a": None}])) == [{"a": None}]
    assert checked_tools(float("nan")) == checked_tools(None) == checked_tools("null") == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "hello",
            "is a string that is not JSON, not a list of messages: not valid JSON: Expecting value at character 1",
        ),
        ('[{"role": "user"', "is a string that is not JSON, not a list of messages: not valid JSON"),
        ("{}", "is an object, not a list of messages"),
        ("7", "is a number, not a list of messages"),
        ("null", "is null, not a list of messages"),
        ("[" * 5000, "is a string that is not JSON, not a list of messages: nested more than 100 levels deep"),
    ],
)
def test_a_text_that_is_no_list_in_json_is_told(value: str, message: str) -> None:
    assert problem(value, "chat").startswith(f"bad_type: column 'chat' {message}")


def test_an_empty_text_is_an_empty_prompt() -> None:
    assert problem("") == "empty_prompt: column 'messages' has no message with any text"


def test_what_lost_its_type_on_the_way_is_read_of_its_text() -> None:
    """As pandas reads ``arrow.json`` of Parquet: a text at whatever depth the type stood."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    whole = {"type": "function", "function": {"name": "weather", "parameters": schema}}

    written, properties = json.dumps, schema["properties"]
    parts = (written(schema), {**schema, "properties": written(properties)})
    deepest = {**schema, "properties": {"city": written(properties["city"])}}
    functions = [{"name": "weather", "parameters": parameters} for parameters in (*parts, deepest)]
    shapes: list[Any] = [written(whole), *({**whole, "function": one} for one in (written(functions[0]), *functions))]
    assert [checked_tools([shape]) for shape in shapes] == [[whole]] * len(shapes)
    assert checked_messages("messages", [written(USER)]) == [USER]
    assert said(tool_calls=[written(call({"a": 1}))])["tool_calls"] == [call({"a": 1})]
    assert said(tool_calls=[{**call(""), "function": written({"name": "now", "arguments": {"a": 1}})}]) == said(
        tool_calls=[call({"a": 1})]
    )


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (None, "tools[0] is null"),
        ({"function": "x"}, "tools[0].function is a string"),
        ({"function": 7}, "tools[0].function is a number"),
        ({"function": {"parameters": "x"}}, "tools[0].function.parameters is a string"),
        ({"name": "f", "parameters": {"properties": "[]"}}, "tools[0].parameters.properties is a list"),
        (
            {"function": {"parameters": {"properties": {"a": "x"}}}},
            "tools[0].function.parameters.properties['a'] is a string",
        ),
    ],
)
def test_a_tool_whose_schema_is_a_text_that_is_no_object_is_refused(tool: Any, place: str) -> None:
    with pytest.raises(RowProblem) as caught:
        checked_tools([tool])
    assert str(caught.value) == f"{place}, not an object"

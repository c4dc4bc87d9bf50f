"""What a row passes to the chat template beside its messages: variables of its own and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import THINKING, TOOLS
from input_helpers import TEXT, loaded, openai_line
from input_helpers import told as answer

from batchgen.core.errors import UsageError
from batchgen.text.tokenizer import Tokenizer

OFF = {"enable_thinking": False}
NO_THOUGHTS = "<think>\n\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return loaded(THINKING)


@pytest.mark.parametrize(
    ("job", "row", "has_thoughts"),
    [
        (None, {}, True),
        (OFF, {}, False),
        (None, OFF, False),
        (OFF, {"enable_thinking": True}, True),
        (OFF, {"add_vision_id": None}, False),
        (OFF, {"enable_thinking": None}, False),  # as Parquet fills in what other rows have
        (OFF, None, False),
        (OFF, json.dumps({"enable_thinking": True}), True),
    ],
)
@pytest.mark.parametrize("shape", ["prompt", "messages", "batch", "template"])
def test_a_row_wins_over_the_job_by_key(
    tokenizer: Tokenizer, shape: str, job: Any, row: Any, has_thoughts: bool
) -> None:
    shapes = {
        "prompt": {"prompt": "Hi", "chat_template_kwargs": row},
        "template": {"q": "Hi", "chat_template_kwargs": row},
        "messages": {"messages": MESSAGES, "chat_template_kwargs": row},
        "batch": openai_line(chat_template_kwargs=row),
    }
    prompt = "{q}" if shape == "template" else None
    found = answer(tokenizer, shapes[shape], chat_template_kwargs=job, prompt=prompt)
    assert found == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + ("" if has_thoughts else NO_THOUGHTS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"messages": []}, "sets 'messages', which batchgen sets itself"),
        ({"add_generation_prompt": False}, "sets 'add_generation_prompt'"),
        ({"bos_token": ""}, "sets 'bos_token'"),
        ({"tools": []}, "sets 'tools'"),
        ({"enable_thinkin": False}, "'enable_thinkin': the model's chat template has no such variable"),
        ([["enable_thinking", False]], "must be an object of JSON values"),
        ("enable_thinking", "must be an object of JSON values"),
        ({"enable_thinking": float("nan")}, "must be an object of JSON values"),
        ({"enable_thinking": "\ud800"}, "must be an object of JSON values"),
        (7, "must be an object of JSON values"),
    ],
)
def test_a_rows_impossible_variables_make_it_an_error_row(tokenizer: Tokenizer, value: Any, message: str) -> None:
    for row in ({"prompt": "Hi", "chat_template_kwargs": value}, openai_line(chat_template_kwargs=value)):
        found = answer(tokenizer, row)
        assert found.startswith("bad_param: chat_template_kwargs") and message in found, found


def test_variables_are_not_looked_at_where_no_chat_is_rendered(tokenizer: Tokenizer) -> None:
    columns = {"chat_template_kwargs": 7, "tools": 7}
    assert answer(tokenizer, {"prompt": "Hi", **columns}, chat_template="none") == "<|startoftext|>Hi"
    assert answer(tokenizer, {"prompt_token_ids": [1], **columns}) == "<|startoftext|>"
    assert NO_THOUGHTS not in answer(tokenizer, {"prompt": "Hi", "tools": 7})  # tools belong to a row's messages


def test_a_completion_takes_neither_variables_nor_tools(tokenizer: Tokenizer) -> None:
    for field, value in (("chat_template_kwargs", OFF), ("tools", TOOLS)):
        found = answer(tokenizer, openai_line(TEXT, **{field: value}))
        assert found.startswith("bad_param") and field in found


def test_a_job_may_name_only_variables_that_the_template_has(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"no variable 'enable_thinkin' \(did you mean \"enable_thinking\"\?\)$"):
        answer(tokenizer, {"prompt": "Hi"}, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(UsageError, match="the model's chat template has no variable 'enable_thinking'"):
        answer(loaded(), {"prompt": "Hi"}, chat_template_kwargs=OFF)


def test_a_name_that_the_template_gives_itself_is_none_of_its_variables(tokenizer: Tokenizer) -> None:
    for name in ("message", "loop", "at", "tool"):
        found = answer(tokenizer, {"prompt": "Hi", "chat_template_kwargs": {name: "x"}})
        assert found.endswith(f"{name!r}: the model's chat template has no such variable")


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("tools", [{}, 7, "x", "{}", ["weather"], [TOOLS], [*TOOLS, None], "[" * 100_000])
def test_tools_of_another_kind_are_of_a_bad_type(tokenizer: Tokenizer, tools: Any) -> None:
    for row in ({"messages": MESSAGES, "tools": tools}, openai_line(tools=tools)):
        assert answer(tokenizer, row).startswith(("bad_type: 'tools' is ", "bad_type: tools["))


def test_tools_that_the_template_would_leave_out_are_refused() -> None:
    for row in ({"messages": MESSAGES, "tools": TOOLS}, openai_line(tools=TOOLS)):
        assert answer(loaded(), row) == "bad_param: tools: this model's chat template cannot take tools"


def test_a_choice_of_tools_changes_no_prompt_but_none_hides_them(tokenizer: Tokenizer) -> None:
    for make in (openai_line, lambda **columns: {"messages": MESSAGES, **columns}):
        assert answer(tokenizer, make(tools=TOOLS, tool_choice="auto")) == answer(tokenizer, make(tools=TOOLS))
        assert answer(tokenizer, make(tools=TOOLS, tool_choice="none")) == answer(tokenizer, make())
    assert answer(tokenizer, {"messages": MESSAGES, "tool_choice": 7}) == answer(tokenizer, openai_line())


@pytest.mark.parametrize("choice", ["required", "always", 7, {"function": {"name": "now"}}])
def test_a_choice_that_would_force_a_call_is_refused(tokenizer: Tokenizer, choice: Any) -> None:
    said = answer(tokenizer, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice})
    assert said == f"bad_param: tool_choice = {choice!r} must be auto or none: no answer is forced to call a tool"
    for more in ({"tools": TOOLS}, {}):
        said = answer(tokenizer, openai_line(tool_choice=choice, **more))
        assert said == "bad_param: body field 'tool_choice' is not supported with this value"


def test_calls_that_are_no_calls_are_of_a_bad_type(tokenizer: Tokenizer) -> None:
    for calls in (7, [7], [{"function": 7}], {"a": 1}, "x"):
        row = {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]}
        assert answer(tokenizer, row).startswith("bad_type: messages[1].tool_calls")

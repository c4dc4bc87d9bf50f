"""What a row passes to the chat template beside its messages: variables of its own and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import THINKING, TOOLS
from input_helpers import told as answer
from input_helpers import write_tokenizer

from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.errors import UsageError
from batchgen.core.records import SamplingParams
from batchgen.input.openai_batch import parse_batch_line
from batchgen.input.rows import RowProblem
from batchgen.text.tokenizer import Tokenizer

OFF = {"enable_thinking": False}
NO_THOUGHTS = "<think>\n\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Hi"}]
HEAD = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=THINKING))


def batch_line(**body: Any) -> dict[str, Any]:
    return {**HEAD, "body": {"messages": MESSAGES, **body}}


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
        "batch": batch_line(chat_template_kwargs=row),
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
    for row in ({"prompt": "Hi", "chat_template_kwargs": value}, batch_line(chat_template_kwargs=value)):
        found = answer(tokenizer, row)
        assert found.startswith("bad_param: chat_template_kwargs") and message in found, found


def test_variables_are_not_looked_at_where_no_chat_is_rendered(tokenizer: Tokenizer) -> None:
    columns = {"chat_template_kwargs": 7, "tools": 7}
    assert answer(tokenizer, {"prompt": "Hi", **columns}, chat_template="none") == "<|startoftext|>Hi"
    assert answer(tokenizer, {"prompt_token_ids": [1], **columns}) == "<|startoftext|>"
    assert NO_THOUGHTS not in answer(tokenizer, {"prompt": "Hi", "tools": 7})  # tools belong to a row's messages


def test_a_completion_takes_neither_variables_nor_tools(tokenizer: Tokenizer) -> None:
    line = {"custom_id": "a", "url": "/v1/completions"}
    for field, value in (("chat_template_kwargs", OFF), ("tools", TOOLS)):
        found = answer(tokenizer, {**line, "body": {"prompt": "Hi", field: value}})
        assert found.startswith("bad_param") and field in found


def test_a_job_may_name_only_variables_that_the_template_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no variable 'enable_thinkin' \(did you mean \"enable_thinking\"\?\)$"):
        answer(tokenizer, {"prompt": "Hi"}, chat_template_kwargs={"enable_thinkin": False})
    plain = Tokenizer.load(write_tokenizer(tmp_path))
    with pytest.raises(UsageError, match="the model's chat template has no variable 'enable_thinking'"):
        answer(plain, {"prompt": "Hi"}, chat_template_kwargs=OFF)


def test_a_name_that_the_template_gives_itself_is_none_of_its_variables(tokenizer: Tokenizer) -> None:
    for name in ("message", "loop", "at", "tool"):
        found = answer(tokenizer, {"prompt": "Hi", "chat_template_kwargs": {name: "x"}})
        assert found.endswith(f"{name!r}: the model's chat template has no such variable")


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("value", [TOOLS, json.dumps(TOOLS)], ids=["objects", "text"])
def test_a_rows_tools_stand_in_its_prompt(tokenizer: Tokenizer, value: Any) -> None:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
    lines_of_a_batch = batch_line(tools=value), batch_line(tools=value, tool_choice="auto")
    for row in ({"messages": MESSAGES, "tools": value}, *lines_of_a_batch):
        assert f"<tools>\n{lines}\n</tools>" in answer(tokenizer, row)


@pytest.mark.parametrize("tools", [None, [], ""])
def test_no_tools_are_none(tokenizer: Tokenizer, tools: Any) -> None:
    for row in ({"messages": MESSAGES, "tools": tools}, batch_line(tools=tools or None)):
        assert answer(tokenizer, row) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tools", [{}, 7, "x", "{}", ["weather"], [TOOLS], [*TOOLS, None], "[" * 100_000])
def test_tools_of_another_kind_are_of_a_bad_type(tokenizer: Tokenizer, tools: Any) -> None:
    for row in ({"messages": MESSAGES, "tools": tools}, batch_line(tools=tools)):
        assert answer(tokenizer, row).startswith("bad_type: 'tools' is ")


def test_tools_that_the_template_would_leave_out_are_refused(tmp_path: Path) -> None:
    plain = Tokenizer.load(write_tokenizer(tmp_path))
    for row in ({"messages": MESSAGES, "tools": TOOLS}, batch_line(tools=TOOLS)):
        assert answer(plain, row) == "bad_param: tools: this model's chat template cannot take tools"


def test_a_choice_of_tools_changes_no_prompt_but_none_hides_them(tokenizer: Tokenizer) -> None:
    for make in (batch_line, lambda **columns: {"messages": MESSAGES, **columns}):
        assert answer(tokenizer, make(tools=TOOLS, tool_choice="auto")) == answer(tokenizer, make(tools=TOOLS))
        assert answer(tokenizer, make(tools=TOOLS, tool_choice="none")) == answer(tokenizer, make())
    assert answer(tokenizer, {"messages": MESSAGES, "tool_choice": 7}) == answer(tokenizer, batch_line())


@pytest.mark.parametrize("choice", ["required", "always", 7, {"function": {"name": "now"}}])
def test_a_choice_that_would_force_a_call_is_refused(tokenizer: Tokenizer, choice: Any) -> None:
    said = answer(tokenizer, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice})
    assert said == f"bad_param: tool_choice = {choice!r} must be auto or none: no answer is forced to call a tool"
    for more in ({"tools": TOOLS}, {}):
        said = answer(tokenizer, batch_line(tool_choice=choice, **more))
        assert said == "bad_param: body field 'tool_choice' is not supported with this value"


def test_a_call_without_a_text_is_a_message_and_its_arguments_may_be_json_text(tokenizer: Tokenizer) -> None:
    def chat(content: Any, arguments: Any) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {"messages": [*MESSAGES, {"role": "assistant", "content": content, "tool_calls": [call]}]}

    found = answer(tokenizer, chat("", {"city": "Zürich", "n": [1]}))
    assert '"arguments": {"city": "Zürich", "n": [1]}}' in found
    assert answer(tokenizer, chat(None, '{"city":"Z\\u00fcrich","n":[1]}')) == found
    assert '"arguments": not json}' in answer(tokenizer, chat("", "not json"))
    for calls in (7, [7], [{"function": 7}], {"a": 1}, "x"):
        row = {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]}
        assert answer(tokenizer, row).startswith("bad_type: messages[1].tool_calls")


def test_earlier_reasoning_is_known_by_any_of_its_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def chat(**fields: Any) -> dict[str, Any]:
        return {"messages": [*MESSAGES, {"role": "assistant", "content": "Yes.", **fields}]}

    expected = answer(tokenizer, chat(content="<think>\nSo.\n</think>\n\nYes."))
    assert "<think>\nSo.\n</think>" in expected
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert answer(tokenizer, chat(**{name: "So."})) == expected
    assert answer(tokenizer, chat(reasoning="So.", reasoning_content="So.")) == expected
    assert answer(tokenizer, chat(reasoning="other", reasoning_content="So.")).startswith("bad_type: messages[1] has")
    assert answer(tokenizer, chat(reasoning=None)) == answer(tokenizer, chat())
    older = Tokenizer.load(
        write_tokenizer(tmp_path, chat_template="{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}")
    )
    assert answer(older, chat(reasoning="So.")) == "HiYes.So."


# ---------------------------------------------------------------- OpenAI bodies


CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"


def asked(url: str, **body: Any) -> Mapping[str, Any]:
    """The sampling values that a body asks for."""
    content = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT_URL else {"prompt": "Hi"}
    return parse_batch_line({"custom_id": "a", "method": "POST", "url": url, "body": content | body}).sampling


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (CHAT_URL, {"stop": "\n"}, {"stop": ("\n",)}),
        (CHAT_URL, {"stop": ["a", "b"], "n": 3}, {"stop": ("a", "b"), "n": 3}),
        (CHAT_URL, {"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1, "frequency_penalty": -2}),
        (CHAT_URL, {"logprobs": True}, {"logprobs": 0}),
        (CHAT_URL, {"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}),
        (CHAT_URL, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT_URL, {"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
        (CHAT_URL, {"logprobs": False, "top_logprobs": 0}, {}),
        (CHAT_URL, {"logprobs": None, "top_logprobs": None}, {}),
        (COMPLETION_URL, {"logprobs": 3}, {"logprobs": 3}),
        (COMPLETION_URL, {"logprobs": 0}, {"logprobs": 0}),
        (COMPLETION_URL, {"logprobs": None}, {}),
        (COMPLETION_URL, {"n": 2, "best_of": 2}, {"n": 2}),
        (COMPLETION_URL, {"best_of": 1, "echo": False}, {}),
        (COMPLETION_URL, {"repetition_penalty": 1.1, "min_p": 0.5}, {"repetition_penalty": 1.1, "min_p": 0.5}),
        (COMPLETION_URL, {"stop_token_ids": [3]}, {"stop_token_ids": (3,)}),
        (CHAT_URL, {"logit_bias": {"50256": -100}}, {"logit_bias": ((50256, -100.0),)}),
        (CHAT_URL, {"logit_bias": {}}, {}),
        (COMPLETION_URL, {"logit_bias": None}, {}),
        (COMPLETION_URL, {"bad_words": ["a"]}, {"bad_words": ("a",)}),
        (CHAT_URL, {"allowed_token_ids": [3]}, {"allowed_token_ids": (3,)}),
        (CHAT_URL, {"structured_outputs": {"regex": "a"}}, {"structured_outputs": '{"regex": "a"}'}),
    ],
)
def test_an_openai_body_asks_in_openais_words(url: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert merge_params(SamplingParams(), asked(url, **body)) == replace(SamplingParams(), **expected)


@pytest.mark.parametrize("field", ["service_tier", "prompt_cache_key", "prediction"])
def test_a_field_about_openais_service_costs_no_row(field: str) -> None:
    assert asked(CHAT_URL, **{field: "low"}) == asked(CHAT_URL)


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT_URL, {"logprobs": 1}, "body field 'logprobs' of a chat must be true or false"),
        (CHAT_URL, {"top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT_URL, {"logprobs": False, "top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT_URL, {"logprobs": True, "top_logprobs": -1}, "logprobs = -1 must be an integer from 0 to 2147483647"),
        (CHAT_URL, {"stop": ""}, "stop = '' holds an empty string"),
        (COMPLETION_URL, {"top_logprobs": 2}, "body field 'top_logprobs' is not supported with this value"),
        (COMPLETION_URL, {"logprobs": -1}, "logprobs = -1 must be an integer from 0 to 2147483647"),
        (COMPLETION_URL, {"echo": True}, "body field 'echo' is not supported with this value"),
        (COMPLETION_URL, {"best_of": 2}, "body field 'best_of' is not supported with this value"),
        (COMPLETION_URL, {"n": 3, "best_of": 4}, "body field 'best_of' is not supported with this value"),
        (COMPLETION_URL, {"foo": 1}, "unknown field 'foo' in the body"),
        (
            CHAT_URL,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and response_format both say what the text must look like: give one of them",
        ),
        (
            COMPLETION_URL,
            {"guided_choice": ["a"]},
            'guided_choice is structured_outputs = {"choice": ...} here, as in vLLM since 0.12',
        ),
        (COMPLETION_URL, {"n": 0}, "n = 0 must be an integer from 1 to 128"),
    ],
)
def test_an_openai_body_that_cannot_be_honoured_is_refused_by_key(url: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises((RowProblem, ParamError)) as caught:
        merge_params(SamplingParams(), asked(url, **body))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("body", "is_chat"),
    [({"messages": [{"role": "user", "content": "Hi"}]}, True), ({"prompt": "Hi", "max_tokens": 3}, False)],
)
def test_a_line_of_an_id_and_a_body_is_what_its_body_says(body: dict[str, Any], is_chat: bool) -> None:
    request = parse_batch_line({"custom_id": "a", "body": body})
    assert (request.is_chat, request.content) == (is_chat, body["messages" if is_chat else "prompt"])

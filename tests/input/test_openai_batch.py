"""What an OpenAI body asks for, in this package's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.records import SamplingParams
from batchgen.input.openai_batch import parse_batch_line
from batchgen.input.rows import RowProblem

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
        (COMPLETION_URL, {"choices": ["a", "b"]}, {"choices": ("a", "b")}),
        (CHAT_URL, {"logit_bias": {"50256": -100}}, {"logit_bias": ((50256, -100.0),)}),
        (CHAT_URL, {"logit_bias": {}}, {}),
        (COMPLETION_URL, {"logit_bias": None}, {}),
        (COMPLETION_URL, {"bad_words": ["a"]}, {"bad_words": ("a",)}),
        (CHAT_URL, {"allowed_token_ids": [3]}, {"allowed_token_ids": (3,)}),
        (CHAT_URL, {"response_format": {"type": "text"}, "guided_decoding_backend": "x"}, {}),
        (CHAT_URL, {"response_format": {"type": "json_object"}}, {"structured_outputs": '{"json_object": true}'}),
        (CHAT_URL, {"structured_outputs": {"regex": "a"}}, {"structured_outputs": '{"regex": "a"}'}),
        (COMPLETION_URL, {"guided_choice": ["a"]}, {"structured_outputs": '{"choice": ["a"]}'}),
        (
            CHAT_URL,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}},
            {"structured_outputs": '{"json": {}}'},
        ),
    ],
)
def test_an_openai_body_asks_in_openais_words(url: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert merge_params(SamplingParams(), asked(url, **body)) == replace(SamplingParams(), **expected)


@pytest.mark.parametrize("field", ["reasoning_effort", "verbosity", "service_tier", "prompt_cache_key"])
def test_a_field_about_openais_models_and_service_costs_no_row(field: str) -> None:
    assert asked(CHAT_URL, **{field: "low"}) == asked(CHAT_URL)


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT_URL, {"logprobs": 1}, "body field 'logprobs' of a chat must be true or false"),
        (CHAT_URL, {"top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT_URL, {"logprobs": False, "top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT_URL, {"logprobs": True, "top_logprobs": 21}, "logprobs = 21 must be an integer from 0 to 20"),
        (CHAT_URL, {"stop": ""}, "stop = '' holds an empty string"),
        (COMPLETION_URL, {"top_logprobs": 2}, "body field 'top_logprobs' is not supported with this value"),
        (COMPLETION_URL, {"logprobs": 21}, "logprobs = 21 must be an integer from 0 to 20"),
        (COMPLETION_URL, {"echo": True}, "body field 'echo' is not supported with this value"),
        (COMPLETION_URL, {"best_of": 2}, "body field 'best_of' is not supported with this value"),
        (COMPLETION_URL, {"n": 3, "best_of": 4}, "body field 'best_of' is not supported with this value"),
        (COMPLETION_URL, {"foo": 1}, "unknown field 'foo' in the body"),
        (
            CHAT_URL,
            {"logit_bias": {"7": 101}},
            "logit_bias = {'7': 101} must be an object from token ids to numbers from -100 to 100, "
            'such as {"50256": -100}',
        ),
        (CHAT_URL, {"tool_choice": "required"}, "body field 'tool_choice' is not supported with this value"),
        (
            CHAT_URL,
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format and guided_regex both say what the text must look like: give one of them",
        ),
        (COMPLETION_URL, {"n": 0}, "n = 0 must be an integer from 1 to 128"),
    ],
)
def test_an_openai_body_that_cannot_be_honoured_is_refused_by_its_field(
    url: str, body: dict[str, Any], message: str
) -> None:
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

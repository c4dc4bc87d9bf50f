"""Fields of OpenAI's bodies: each is honoured or refused by name, those inside of others too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from input_helpers import CHAT, TEXT, VECTOR, builder_of, loaded, openai_line, requests_of, row_of, told
from run_helpers import JobMaker

from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, SamplingParams
from batchgen.input.openai_batch import parse_batch_line
from batchgen.input.rows import RowProblem
from batchgen.run.invocation import RunOptions

EFFORT = "[{{ reasoning_effort }}]"
THOUGHTS = "({{ enable_thinking }})"
FUNCTION = {"name": "now", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASKED = {"temperature": 0.7, "top_p": 0.9, "seed": 11}


class Made:
    """Requests made of single rows with a template, which follows the messages in a line of their own."""

    def __init__(self, template: str, **keys: Any) -> None:
        self.tokenizer = loaded("{{ messages }}\n" + template)
        self.builder, self.keys = builder_of(self.tokenizer, **keys), keys

    def prompt(self, columns: dict[str, Any]) -> str:
        """The end of the prompt that a row becomes, or the code and message of its error."""
        head, _, tail = told(self.tokenizer, columns, **self.keys).partition("\n")
        return tail or head


def asked(url: str, **body: Any) -> SamplingParams:
    return merge_params(SamplingParams(), parse_batch_line(openai_line(url, **body)).sampling)


def refusal(url: str, **body: Any) -> str:
    """What is said of the body of a line."""
    with pytest.raises((RowProblem, ParamError)) as caught:
        asked(url, **body)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (CHAT, {"stop": "\n"}, {"stop": ("\n",)}),
        (TEXT, ASKED | {"max_completion_tokens": 9}, ASKED | {"max_tokens": 9}),
        (CHAT, {"stop": ["a", "b"], "n": 3}, {"stop": ("a", "b"), "n": 3}),
        (CHAT, {"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1, "frequency_penalty": -2}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT, {"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
        (CHAT, {"logprobs": None, "top_logprobs": None}, {}),
        (TEXT, {"logprobs": 3}, {"logprobs": 3}),
        (TEXT, {"logprobs": 0}, {"logprobs": 0}),
        (TEXT, {"logprobs": None}, {}),
        (TEXT, {"n": 2, "best_of": 2}, {"n": 2}),
        (TEXT, {"best_of": 1, "echo": False}, {}),
        (TEXT, {"repetition_penalty": 1.1, "min_p": 0.5}, {"repetition_penalty": 1.1, "min_p": 0.5}),
        (TEXT, {"stop_token_ids": [3]}, {"stop_token_ids": (3,)}),
        (CHAT, {"logit_bias": {"50256": -100}}, {"logit_bias": ((50256, -100.0),)}),
        (CHAT, {"logit_bias": {}}, {}),
        (TEXT, {"logit_bias": None}, {}),
        (TEXT, {"bad_words": ["a"]}, {"bad_words": ("a",)}),
        (CHAT, {"allowed_token_ids": [3]}, {"allowed_token_ids": (3,)}),
        (CHAT, {"structured_outputs": {"regex": "a"}}, {"structured_outputs": '{"regex": "a"}'}),
    ],
)
def test_an_openai_body_asks_in_openais_words(url: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(url, **body) == replace(SamplingParams(), **expected)


# ---------------------------------------------------------------- reasoning_effort


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        (EFFORT, "none", "[none]"),
        (EFFORT, "high", "[high]"),
        (THOUGHTS, "none", "(False)"),
        (THOUGHTS, "low", "(True)"),
        (EFFORT + THOUGHTS, "none", "[none](False)"),
        (EFFORT + THOUGHTS, "max", "[max](True)"),
        (EFFORT + THOUGHTS, None, "[]()"),
    ],
)
def test_an_effort_sets_the_variables_that_the_template_names(template: str, effort: str | None, expected: str) -> None:
    assert Made(template).prompt(openai_line(reasoning_effort=effort)) == expected


@pytest.mark.parametrize("effort", ["none", "medium", "high"])
def test_an_effort_that_the_template_cannot_express_is_refused(effort: str) -> None:
    said = Made("{{ messages }}").prompt(openai_line(reasoning_effort=effort))
    assert said.startswith("bad_param: body field 'reasoning_effort': the model's chat template has no variable for it")


@pytest.mark.parametrize("effort", ["off", "", 0, False, ["none"], {"effort": "none"}])
def test_an_effort_of_another_value_is_refused(effort: Any) -> None:
    said = Made(EFFORT).prompt(openai_line(reasoning_effort=effort))
    assert said.startswith("bad_param: body field 'reasoning_effort' is ") and "not one of none, minimal" in said


def test_a_bodys_own_variables_win_over_its_effort_and_that_over_the_jobs() -> None:
    made = Made(EFFORT + THOUGHTS, chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "low"})
    own = {"enable_thinking": True}
    assert made.prompt(openai_line()) == "[low](True)"
    assert made.prompt(openai_line(reasoning_effort="none")) == "[none](False)"
    assert made.prompt(openai_line(reasoning_effort="none", chat_template_kwargs=own)) == "[none](True)"


# ---------------------------------------------------------------- fields inside of fields


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "json_object", "schema": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json_object", "schema": '{"type": "array"}'}, {"json": {"type": "array"}}),
        ({"type": "json_object", "schema": None}, {"json_object": True}),
        ({"type": "json_object", "schema": {}}, {"json_object": True}),
        ({"type": "json_object", "json_schema": None}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": SCHEMA}}, {"json": SCHEMA}),
    ],
)
@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_a_response_format_is_taken_with_its_schema(url: str, given: Any, expected: dict[str, Any]) -> None:
    assert asked(url, response_format=given) == merge_params(SamplingParams(), {"structured_outputs": expected})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "text", "foo": 1}, "unknown key 'foo'"),
        ({"type": "text", "schema": SCHEMA}, "unknown key 'schema'"),
        ({"type": "json_object", "foo": 1}, "unknown key 'foo'"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "unknown key 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "foo": 1}}, "unknown key 'foo'"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}, "unknown key 'schema'"),
        ({"type": "json_schema", "schema": SCHEMA}, "unknown key 'schema'"),
        ({"type": "grammar", "grammar": "a"}, 'whose type is "text", "json_object" or "json_schema"'),
        ({"type": ["text"]}, 'whose type is "text", "json_object" or "json_schema"'),
        ({"schema": SCHEMA}, 'whose type is "text", "json_object" or "json_schema"'),
    ],
)
def test_an_unknown_key_of_a_response_format_is_refused(given: Any, said: str) -> None:
    found = refusal(CHAT, response_format=given)
    assert found.startswith("response_format = ") and said in found


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        (CHAT, {"tools": [{"type": "web_search"}]}, "'tools[0]' is of the type 'web_search': only functions"),
        (CHAT, {"tools": [TOOL, {"type": "custom", "custom": {"name": "a"}}]}, "'tools[1]' is of the type 'custom'"),
        (CHAT, {"tools": [TOOL | {"cache_control": {}}]}, "unknown field 'cache_control' in body field 'tools[0]'"),
        (CHAT, {"tools": [{"name": "now", "parameters": {}}]}, "unknown field 'name' in body field 'tools[0]'"),
        (CHAT, {"tools": [{"function": FUNCTION | {"defer_loading": True}}]}, "unknown field 'defer_loading' in body"),
        (CHAT, {"tools": [{"function": 7}]}, "body field 'tools[0].function' is a number, not an object"),
        (CHAT, {"tools": [{"function": FUNCTION | {"strict": True}}]}, "body field 'tools[0].function.strict' is true"),
        (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, "body field 'parallel_tool_calls' is false"),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": "required"},
            "body field 'tool_choice' is not supported with this value",
        ),
        (CHAT, {"stream_options": {"include_foo": True}}, "unknown field 'include_foo' in body field 'stream_options'"),
        (CHAT, {"stream_options": True}, "body field 'stream_options' is a boolean, not an object"),
        (CHAT, {"verbosity": "low"}, "body field 'verbosity' is not supported with this value"),
        (CHAT, {"modalities": ["text", "audio"]}, "body field 'modalities' is not supported with this value"),
        (CHAT, {"audio": {"voice": "alloy"}}, "unknown field 'audio' in the body"),
        (CHAT, {"web_search_options": {}}, "unknown field 'web_search_options' in the body"),
        (CHAT, {"enable_thinking": False}, "unknown field 'enable_thinking' in the body"),
        (CHAT, {"continue_final_message": 1}, "body field 'continue_final_message' is a number, not a boolean"),
        (CHAT, {"add_generation_prompt": False}, "body field 'add_generation_prompt' is not supported with this value"),
        *((url, {"reasoning_effort": "none"}, "unknown field 'reasoning_effort'") for url in (TEXT, VECTOR)),
        (CHAT, {"logprobs": 1}, "body field 'logprobs' of a chat must be true or false"),
        (CHAT, {"top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT, {"logprobs": False, "top_logprobs": 2}, "body field 'top_logprobs' needs 'logprobs': true"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "logprobs = -1 must be an integer from 0 to 2147483647"),
        (CHAT, {"stop": ""}, "stop = '' holds an empty string"),
        (TEXT, {"top_logprobs": 2}, "body field 'top_logprobs' is not supported with this value"),
        (TEXT, {"logprobs": -1}, "logprobs = -1 must be an integer from 0 to 2147483647"),
        (TEXT, {"echo": True}, "body field 'echo' is not supported with this value"),
        (TEXT, {"best_of": 2}, "body field 'best_of' is not supported with this value"),
        (TEXT, {"n": 3, "best_of": 4}, "body field 'best_of' is not supported with this value"),
        (TEXT, {"foo": 1}, "unknown field 'foo' in the body"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and response_format both say what the text must look like: give one of them",
        ),
        (
            TEXT,
            {"guided_choice": ["a"]},
            'guided_choice is structured_outputs = {"choice": ...} here, as in vLLM since 0.12',
        ),
        (TEXT, {"n": 0}, "n = 0 must be an integer from 1 to 128"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(url: str, body: dict[str, Any], said: str) -> None:
    assert said in refusal(url, **body)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TOOL, {"function": FUNCTION | {"strict": False, "description": "d"}}]},
        {"tools": [{"function": FUNCTION | {"strict": True}}], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": None, "parallel_tool_calls": False},
        {"tools": [], "tool_choice": "none", "stop": None, "n": 1, "presence_penalty": 0, "logprobs": False},
        {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}},
        {"service_tier": "low", "prompt_cache_key": "low", "prediction": "low"},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"verbosity": "medium", "modalities": ["text"], "store": True, "audio": None, "web_search_options": None},
    ],
)
def test_what_asks_for_nothing_else_costs_no_row(body: dict[str, Any]) -> None:
    assert asked(CHAT, **body) == SamplingParams()


def test_null_is_no_field_of_a_request_for_a_vector() -> None:
    assert parse_batch_line(openai_line(VECTOR, dimensions=None, truncate_prompt_tokens=None)).embedding


# ---------------------------------------------------------------- beside the body


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_values_beside_the_body_count_as_in_any_row_and_the_bodys_win(url: str) -> None:
    made = Made("{{ messages }}")
    for beside, body, expected in (
        ({"sampling": {"max_tokens": 4}}, {}, 4),
        ({"sampling": {"max_tokens": 4}}, {"max_tokens": 5}, 5),
    ):
        [found] = requests_of(made.builder, [row_of(openai_line(url, **body) | beside)])
        assert isinstance(found, Request) and found.params.max_tokens == expected


@pytest.mark.parametrize("key", ["prompt", "messages", "prompt_token_ids"])
def test_a_job_over_requests_names_no_prompt_of_its_own(key: str) -> None:
    with pytest.raises(UsageError, match=rf"^input\.{key} does not go with input\.format = 'openai-batch'"):
        Made("{{ messages }}", format="openai-batch", **{key: "q"})


def test_calls_that_could_not_be_told_from_text_are_not_asked_for() -> None:
    made = Made("{% if tools %}T{% endif %}{{ messages[0].content }}")
    said = made.prompt(openai_line(tools=[TOOL]))
    assert said.startswith("bad_param: body field 'tools': this model's format of tool calls is unknown")
    assert made.prompt(openai_line(tools=[TOOL], tool_choice="none")) == "Hi"
    known = Made("{% if tools %}<tool_call>{{ tools }}{% endif %}{{ messages[0].content }}")
    assert known.prompt(openai_line(tools=[TOOL])).startswith("<tool_call>[")


def test_a_run_over_requests_says_how_to_get_openais_form(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([openai_line()])
    for form, says in (("jsonl", True), ("openai-batch", False)):
        spec = job.spec(
            input={"prompt": None, "id": None, "chat_template": "auto"},
            output={"path": str(job.folder / form), "format": form},
        )
        assert job.run(spec, RunOptions()).exit_code == 0
        assert ("--output-format openai-batch gives the answers" in capsys.readouterr().err) == says


@pytest.mark.parametrize(
    ("body", "is_chat"),
    [({"messages": [{"role": "user", "content": "Hi"}]}, True), ({"prompt": "Hi", "max_tokens": 3}, False)],
)
def test_a_line_of_an_id_and_a_body_is_what_its_body_says(body: dict[str, Any], is_chat: bool) -> None:
    request = parse_batch_line({"custom_id": "a", "body": body})
    assert (request.is_chat, request.content) == (is_chat, body["messages" if is_chat else "prompt"])

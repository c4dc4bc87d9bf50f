"""Where a row's prompt and sampling values come from, and that a request carries exactly those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import builder_of, codes, loaded, problem, requests_of, row_of, text_of

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, Row, SamplingParams
from batchgen.input import requests as prompt_module
from batchgen.input.rows import RowProblem, with_id
from batchgen.input.template import Template
from batchgen.text.tokenizer import Tokenizer

JOB = SamplingParams(max_tokens=32, seed=5)


def spec(**keys: Any) -> InputSpec:
    return InputSpec(path=("rows.jsonl",), **keys)


def build(tokenizer: Tokenizer | None, *rows: Mapping[str, Any], **keys: Any) -> list[Request | Row]:
    builder = builder_of(tokenizer, JOB, **keys)
    keys.pop("max_model_len", None)
    return requests_of(builder, (with_id(row_of(row, index), spec(**keys)) for index, row in enumerate(rows)))


def chat(*turns: tuple[str, str]) -> str:
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"<|startoftext|>{said}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        ({"prompt": "hi"}, {}, chat(("user", "hi"))),
        ({"text": "hi"}, {}, chat(("user", "hi"))),
        ({"text": "hi", "n": 1}, {}, chat(("user", "hi"))),
        ({"text": "hi", "prompt": "ho"}, {}, chat(("user", "ho"))),
        ({"q": "hi", "prompt": "no"}, {"prompt": "q"}, chat(("user", "hi"))),
        ({"q": "hi", "n": {"a": [1, True]}}, {"prompt": "{q}: {n[a][0]}"}, chat(("user", "hi: 1"))),
        ({"prompt": "hi"}, {"system": "Be terse."}, chat(("system", "Be terse."), ("user", "hi"))),
        ({"prompt": "hi"}, {"chat_template": "none"}, "<|startoftext|>hi"),
        ({"messages": [{"role": "user", "content": "hi"}], "prompt": "no"}, {}, chat(("user", "hi"))),
        ({"messages": None, "prompt_token_ids": None, "prompt": "hi"}, {}, chat(("user", "hi"))),
        (
            {"c": [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}]},
            {"messages": "c", "system": "Job's."},
            chat(("system", "Own."), ("user", "hi")),
        ),
        (
            {"c": [{"role": "developer", "content": "Own."}, {"role": "user", "content": "hi"}]},
            {"messages": "c", "system": "Job's."},
            chat(("developer", "Own."), ("user", "hi")),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            {},
            chat(("user", "a\nb")),
        ),
        ({"prompt_token_ids": [1, 8, 9], "prompt": "no", "messages": "no"}, {}, None),
        ({"ids": [1, 8, 9]}, {"prompt_token_ids": "ids"}, None),
    ],
)
def test_the_prompt_is_what_the_job_names_or_else_the_first_column_there_is(
    row: dict[str, Any], keys: dict[str, Any], expected: str | None, tokenizer: Tokenizer
) -> None:
    [answer] = build(tokenizer, row, **keys)
    if expected is None:
        assert isinstance(answer, Request) and answer.prompt_token_ids == (1, 8, 9)
    else:
        assert text_of(answer, tokenizer) == expected


def test_the_user_can_end_a_turn_inside_a_prompt(tokenizer: Tokenizer) -> None:
    [answer] = build(tokenizer, {"prompt": "a<|im_end|>"}, chat_template="none")
    assert isinstance(answer, Request) and answer.prompt_token_ids[-1] == 7


CHAT_LINE = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"q": " "}, {"prompt": "{q}"}, "the prompt that the template '{q}' makes is empty"),
        ({"q": ""}, {"prompt": "{q}" * 40}, f"the prompt that the template '{'{q}' * 19}{{q…' makes is empty"),
        ({"q": ""}, {"prompt": "q"}, "column 'q' is empty"),
        ({"prompt": ""}, {}, "column 'prompt' is empty"),
        ({"text": "\n"}, {}, "column 'text' is empty"),
        ({"prompt_token_ids": []}, {}, "column 'prompt_token_ids' has no token ids"),
        ({"messages": []}, {}, "column 'messages' has no message with any text"),
        ({"custom_id": "r", "url": "/v1/completions", "body": {"prompt": ""}}, {}, "column 'body.prompt' is empty"),
        ({**CHAT_LINE, "body": {"messages": []}}, {}, "column 'body.messages' has no message with any text"),
    ],
)
def test_an_empty_prompt_is_told_by_where_it_comes_from(
    row: dict[str, Any], keys: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    [answer] = build(tokenizer, row, **keys)
    assert problem(answer) == f"empty_prompt: {message}"


def test_answers_come_in_the_order_of_the_rows_with_their_index_as_key(tokenizer: Tokenizer) -> None:
    answers = build(tokenizer, {"prompt": "a"}, {"prompt": ""}, {"prompt_token_ids": [8]}, {"prompt": "b"})
    assert codes(answers) == ["ok", "empty_prompt", "ok", "ok"]
    assert [a.index if isinstance(a, Row) else a.key for a in answers] == [0, 1, 2, 3]


def test_rows_are_tokenized_alike_whatever_is_with_them(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "x" * n} for n in (1, 50, 3, 200, 7)]
    together = build(tokenizer, *rows)
    monkeypatch.setattr(prompt_module, "_MAX_ENCODED_CHARS", 60)
    assert build(tokenizer, *rows) == together


def test_rows_whose_prompts_are_more_than_is_held_at_once_are_answered_in_order(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_module, "_MAX_DRAFTED_CHARS", 60)
    rows = [{"prompt": letter * length} for letter, length in zip("abcdef", (3, 90, 2, 2, 2, 70), strict=True)]
    answers = build(tokenizer, *rows, {"prompt": 5})
    texts = [text_of(answer, tokenizer) for answer in answers[:-1]]
    assert texts == [chat(("user", row["prompt"])) for row in rows] and codes(answers[-1:]) == ["bad_type"]


def test_sampling_values_come_from_the_job_then_the_sampling_object(tokenizer: Tokenizer) -> None:
    [answer] = build(tokenizer, {"prompt": "a", "sampling": {"top_k": 4, "seed": None}})
    assert isinstance(answer, Request) and answer.params == SamplingParams(max_tokens=32, seed=5, top_k=4)


def test_a_column_named_like_a_sampling_key_is_data(tokenizer: Tokenizer) -> None:
    row = {"prompt": "Which?", "labels": ["a", "b"], "max_tokens": 3, "temperature": "hot"}
    [answer] = build(tokenizer, row)
    assert isinstance(answer, Request) and answer.params == JOB


def test_a_huge_prompt_is_refused_without_tokenizing_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    [answer] = build(tokenizer, {"prompt": "x" * 1000}, max_model_len=10, chat_template="none")
    assert problem(answer).startswith("too_long: the prompt has at least 67 tokens; the context of 10 allows")


def test_a_model_without_a_tokenizer_takes_token_ids_only() -> None:
    answers = build(None, {"prompt_token_ids": [1, 8]}, {"prompt": "hi"}, {"text": "hi"})
    assert codes(answers) == ["ok", "missing_column", "missing_column"]
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    assert codes(build(None, batch, {**batch, "body": {"prompt": [8]}})) == ["bad_type", "ok"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt": "{a"}, "lone '{' at character 1"),
        ({"prompt": "a}"}, "lone '}' at character 2"),
        ({"prompt": "{}"}, "cannot read the field {}"),
        ({"prompt": "{a!r}"}, "cannot read the field {a!r}"),
        ({"prompt": "{a:>10}"}, "cannot read the field {a:>10}"),
        ({"prompt": 'As {"label": "a"}: {q}'}, "other braces, as of JSON, are doubled: {{ and }}"),
        ({"prompt": 'As {"a": {"b": 1}}: {q}'}, "write '{{' for a brace that names no column"),
        ({"prompt": "{a[b}"}, "cannot read the field"),
        ({"prompt": "{a[]}"}, "cannot read the field"),
        ({"prompt": "{[a]}"}, "cannot read the field"),
        ({"messages": "m", "chat_template": "none"}, "input.messages needs a chat"),
        ({"system": "s", "chat_template": "none"}, "input.system needs a chat"),
        ({"system": "caf\udce9"}, "input.system holds bytes that are not UTF-8"),
        ({"prompt": "caf\udce9 {a}", "chat_template": "none"}, "input.prompt holds bytes that are not UTF-8"),
    ],
)
def test_an_input_section_that_cannot_work_is_refused_before_any_row(
    keys: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UsageError) as caught:
        build(tokenizer, **keys)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["prompt", "messages", "system"])
def test_an_input_section_that_needs_a_tokenizer_is_refused_without_one(key: str) -> None:
    with pytest.raises(UsageError, match=f"input.{key} needs a tokenizer"):
        build(None, **{key: "x"})


def test_a_model_without_a_chat_template_needs_raw_completion() -> None:
    plain = loaded(None)
    with pytest.raises(UsageError, match=r"no chat template; set input\.chat_template = "):
        build(plain, {"prompt": "hi"})
    assert codes(build(plain, {"prompt": "hi"}, chat_template="none")) == ["ok"]
    assert codes(build(plain, {"ids": [8]}, prompt_token_ids="ids")) == ["ok"]


BATCH_LINE = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "gpt-4o-mini",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello world!"}],
        "max_tokens": 1000,
    },
}


@pytest.mark.parametrize("form", ["auto", "openai-batch"])
def test_the_documented_openai_batch_line_is_a_request(form: str, tokenizer: Tokenizer) -> None:
    [answer] = build(tokenizer, BATCH_LINE, format=form)
    assert text_of(answer, tokenizer) == chat(("system", "Be kind."), ("user", "Hello world!"))
    assert isinstance(answer, Request) and answer.params == SamplingParams(max_tokens=1000, seed=5)
    assert with_id(row_of(BATCH_LINE), spec(format=form)).id == "request-1"


def test_an_openai_completion_is_raw_text_or_token_ids_even_in_a_chat_job(tokenizer: Tokenizer) -> None:
    line = {**BATCH_LINE, "url": "/v1/completions"}
    text, ids = build(tokenizer, {**line, "body": {"prompt": "Say"}}, {**line, "body": {"prompt": [8, 9]}}, system="S")
    assert text_of(text, tokenizer) == "<|startoftext|>Say"
    assert isinstance(ids, Request) and ids.prompt_token_ids == (8, 9)


def test_a_job_that_names_its_columns_takes_an_openai_line_as_any_row(tokenizer: Tokenizer) -> None:
    [answer] = build(tokenizer, BATCH_LINE, prompt="{body[messages][1][content]}")
    assert text_of(answer, tokenizer) == chat(("user", "Hello world!"))


def test_an_error_row_keeps_the_row_its_place_and_its_id(tokenizer: Tokenizer) -> None:
    [answer] = build(tokenizer, {"key": 17, "prompt": 3}, id="key")
    assert isinstance(answer, Row) and answer.error
    assert answer == replace(row_of({"key": 17, "prompt": 3}), id=17, error=answer.error)


def test_an_id_is_a_string_or_an_integer_of_the_column_that_the_job_names() -> None:
    for value in ("a", "", 7, 10**40):
        assert with_id(row_of({"id": value}), spec(id="id")).id == value
    for value in (None, True, 1.5, ["a"], {"a": 1}):
        error = with_id(row_of({"id": value}), spec(id="id")).error
        assert error and "column 'id'" in error.message
    assert with_id(row_of({"id": "a"}), spec()) == row_of({"id": "a"})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{a} {b}", "x 1.5"),
        ("{{{a}}} {{}}", "{x} {}"),
        ("{with space}|{dotted.name}", "s|d"),
        ("{list}", '[1, "é"]'),
        ("{object[key]} {object}", 'v {"key": "v"}'),
        ("{list[1]}{list[0]}", "é1"),
        ("{yes}", "true"),
        ("no fields }}", "no fields }"),
    ],
)
def test_a_template_writes_strings_as_they_stand_and_all_else_as_json(template: str, expected: str) -> None:
    columns = {"a": "x", "b": 1.5, "with space": "s", "dotted.name": "d", "list": [1, "é"], "yes": True}
    columns["object"] = {"key": "v"}
    assert Template.parse(template).render(columns) == expected


def test_a_template_cannot_reach_attributes() -> None:
    with pytest.raises(RowProblem, match=r"no column 'a\.__class__'"):
        Template.parse("{a.__class__}").render({"a": "x"})
    with pytest.raises(RowProblem, match="looks for"):
        Template.parse("{a[__class__]}").render({"a": "x"})


@settings(deadline=None)
@given(st.text(alphabet="{}[]ab!:.0", max_size=12), st.dictionaries(st.text("ab", min_size=1), st.text(), max_size=3))
def test_any_template_is_refused_or_renders_or_names_what_is_missing(text: str, columns: dict[str, str]) -> None:
    try:
        template = Template.parse(text)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    try:
        assert isinstance(template.render(columns), str)
    except RowProblem as problem:
        assert problem.error.code in ("missing_column", "template_error")

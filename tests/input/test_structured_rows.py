"""Rows that ask for structured outputs: where they say so, what cannot be compiled, and what needs the package."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from input_helpers import VOCAB_SIZE, write_tokenizer

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import BadRow, Cursor, Record, Request, SamplingParams
from batchgen.core.structured import canonical
from batchgen.input.requests import RequestBuilder
from batchgen.text.grammar import Grammars
from batchgen.text.tokenizer import Tokenizer

FREE = SamplingParams()
CHOICE = canonical({"choice": ["yes", "no"]})
LOOKS_BACK = {"regex": "(?<=a)b"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def builder_of(tokenizer: Tokenizer, sampling: SamplingParams = FREE) -> RequestBuilder:
    spec = InputSpec(path=("rows.jsonl",), chat=False)
    grammars = Grammars(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)
    columns = ("structured_outputs", "response_format", "guided_regex")
    sizes = {"max_model_len": 1000, "vocab_size": VOCAB_SIZE}
    return RequestBuilder(spec, sampling, tokenizer, grammars=grammars, columns=columns, **sizes)


def one(builder: RequestBuilder, **columns: Any) -> Request | BadRow:
    [answer] = builder.build([Record(0, "rows.jsonl", 1, columns, Cursor(0, 0, 1, 1))])
    return answer


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, CHOICE),
        ({"structured_outputs": {"regex": "a"}}, '{"regex": "a"}'),
        ({"structured_outputs": '{"regex": "a"}'}, '{"regex": "a"}'),
        ({"response_format": {"type": "json_object"}}, '{"json_object": true}'),
        ({"guided_regex": "a"}, '{"regex": "a"}'),
        ({"guided_json": {"type": "null"}}, CHOICE),  # no column that the job lists
        ({"sampling": {"guided_json": {"type": "null"}}}, '{"json": {"type": "null"}}'),
        ({"structured_outputs": {"regex": "a"}, "sampling": {"structured_outputs": {"regex": "b"}}}, '{"regex": "b"}'),
        ({"sampling": {"structured_outputs": {}}}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"structured_outputs": None, "response_format": None, "sampling": {"guided_choice": None}}, CHOICE),
    ],
)
def test_a_column_or_the_sampling_object_replaces_the_jobs(
    tokenizer: Tokenizer, row: dict[str, Any], expected: str
) -> None:
    answer = one(builder_of(tokenizer, SamplingParams(structured_outputs=CHOICE)), prompt="p", **row)
    assert isinstance(answer, Request) and answer.params.structured_outputs == expected


def test_a_row_of_a_structured_job_scores_choices_only_without_its_grammar(tokenizer: Tokenizer) -> None:
    builder = builder_of(tokenizer, SamplingParams(structured_outputs=CHOICE))
    answer = one(builder, prompt="p", sampling={"choices": ["a", "b"]})
    assert isinstance(answer, BadRow) and answer.error.code == "bad_param"
    assert answer.error.message.startswith(
        "choices = ('a', 'b') does not go with structured_outputs: change choices, or"
    )
    answer = one(builder, prompt="p", sampling={"choices": ["a", "b"], "structured_outputs": {}})
    assert isinstance(answer, Request) and len(answer.choices) == 2 and not answer.params.structured_outputs


def test_what_cannot_be_compiled_is_a_bad_row_or_a_refused_job(tokenizer: Tokenizer) -> None:
    answer = one(builder_of(tokenizer), prompt="p", structured_outputs=LOOKS_BACK)
    assert isinstance(answer, BadRow) and answer.error.code == "bad_param"
    assert answer.error.message.startswith("structured_outputs: ") and "look" in answer.error.message
    with pytest.raises(UsageError, match=r"^sampling\.structured_outputs: .*look"):
        builder_of(tokenizer, SamplingParams(structured_outputs=canonical(LOOKS_BACK)))


def test_without_the_package_jobs_are_refused_and_rows_fail_with_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # importing it raises ImportError
    with pytest.raises(
        UsageError, match=r"^sampling\.structured_outputs: needs .*pip install 'batchgen\[structured\]'"
    ):
        builder_of(tokenizer, SamplingParams(structured_outputs=CHOICE))
    builder = builder_of(tokenizer)
    assert isinstance(one(builder, prompt="p"), Request)
    answer = one(builder, prompt="p", structured_outputs={"regex": "a"})
    assert isinstance(answer, BadRow) and answer.error.code == "bad_param"
    assert answer.error.message.startswith("structured_outputs: needs the package llguidance: pip install")


def test_a_row_needs_a_tokenizer_to_ask(tokenizer: Tokenizer) -> None:
    spec, sizes = InputSpec(path=("rows.jsonl",)), {"max_model_len": 1000, "vocab_size": VOCAB_SIZE}
    answer = one(RequestBuilder(spec, FREE, None, **sizes), prompt_token_ids=[8], sampling={"guided_regex": "a"})
    assert isinstance(answer, BadRow)
    assert (
        answer.error.message
        == "structured_outputs needs a tokenizer and this model has none; name one in model.tokenizer"
    )

"""What rows ask for besides a prompt: labels to score, stop strings, and the room that each needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import input_helpers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import VOCAB_SIZE, problem, read_bytes, requests_of, row_of
from run_helpers import JobMaker

from batchgen.config.sampling import ROW_KEYS
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, Row, SamplingParams
from batchgen.core.structured import canonical
from batchgen.input.requests import RequestBuilder
from batchgen.run.invocation import RunOptions
from batchgen.text.grammar import Grammars
from batchgen.text.tokenizer import Tokenizer

JOB = SamplingParams(max_tokens=32, seed=5)
LABELLED = SamplingParams(labels=("a", "b"))


def builder_of(tokenizer: Tokenizer | None, sampling: SamplingParams = JOB, **keys: Any) -> RequestBuilder:
    return input_helpers.builder_of(tokenizer, sampling, chat_template="none", **keys)


def record(columns: dict[str, Any], index: int = 0) -> Row:
    """A row whose values with the names of sampling keys are in its ``sampling`` object."""
    values = {name: columns[name] for name in columns if name in ROW_KEYS} | columns.get("sampling", {})
    columns = {name: value for name, value in columns.items() if name not in values} | {"sampling": values}
    return row_of(columns, index)


def one(builder: RequestBuilder, **columns: Any) -> Request | Row:
    [answer] = requests_of(builder, [record(columns)])
    return answer


def test_labels_are_tokenized_by_themselves_as_they_stand(tokenizer: Tokenizer) -> None:
    labels = ["yes", " yes", "n<|im_end|>"]
    answer = one(builder_of(tokenizer, LABELLED), prompt="yes", labels=labels)
    assert isinstance(answer, Request) and answer.params.labels == tuple(labels)
    assert answer.labels == tuple(map(tuple, tokenizer.encode_batch(labels, add_special_tokens=False)))
    assert len(answer.labels[0]) + 1 == len(answer.labels[1]) and answer.labels[2][-1] == 7
    assert tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False) == "<|startoftext|>yes"  # with its bos


def test_a_text_is_tokenized_once_a_chunk(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode_batch

    def noting(self: Tokenizer, batch: Any, add_special_tokens: bool) -> list[list[int]]:
        texts.extend(batch)
        return encode(self, batch, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", noting)
    builder = builder_of(tokenizer, SamplingParams(labels=("yes", "no")))
    assert len([*builder.build([record({"prompt": prompt}) for prompt in ("p", "q", "p", "p")])]) == 4
    assert sorted(texts) == ["no", "p", "q", "yes"]


def test_rows_of_token_ids_take_labels_where_there_is_a_tokenizer(tokenizer: Tokenizer) -> None:
    answer = one(builder_of(tokenizer, LABELLED), prompt_token_ids=[1, 8])
    assert isinstance(answer, Request) and answer.prompt_token_ids == (1, 8)
    assert answer.labels == tuple(map(tuple, tokenizer.encode_batch(["a", "b"], add_special_tokens=False)))


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "limit"),
    [
        (9, {}, 9),
        (10, {"max_tokens": 0, "prompt_logprobs": 0}, 10),
        (9, {"max_tokens": 1, "prompt_logprobs": 0}, 9),
        (6, {"labels": ["a", "abcd"]}, 6),
        (9, {"labels": ["a", "b"]}, 9),
    ],
)
def test_a_prompt_leaves_room_for_what_is_asked_for(
    num_tokens: int, sampling: dict[str, Any], limit: int, tokenizer: Tokenizer
) -> None:
    builder = builder_of(tokenizer, LABELLED if "labels" in sampling else JOB, max_model_len=10)
    assert isinstance(one(builder, prompt_token_ids=[8] * num_tokens, sampling=sampling), Request)
    answer = one(builder, prompt_token_ids=[8] * (num_tokens + 1), sampling=sampling)
    message = f"too_long: the prompt has {num_tokens + 1} tokens; the context of 10 allows at most {limit}"
    assert problem(answer).startswith(message)


def test_a_label_longer_than_the_context_is_refused_without_tokenizing_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: pytest.fail("tokenized"))
    builder = builder_of(tokenizer, LABELLED, max_model_len=10)
    answer = one(builder, prompt_token_ids=[8], labels=["a", "x" * 10_000])
    limits = "the context of 10 allows at most 0 before a label of at least 667"
    assert problem(answer) == f"too_long: the prompt has 1 tokens; {limits}"


def test_bad_words_are_tokenized_with_and_without_a_space_before_them(tokenizer: Tokenizer) -> None:
    builder = builder_of(tokenizer, SamplingParams(bad_words=("yes", " no", "\n")))
    job, other, none = requests_of(builder, [record({"prompt": "a", "bad_words": words}) for words in (None, "a", [])])
    ways = ["yes", " yes", "no", " no", "\n", " \n"]
    assert isinstance(job, Request) and isinstance(other, Request) and isinstance(none, Request)
    assert job.bad_words == tuple(map(tuple, tokenizer.encode_batch(ways, add_special_tokens=False)))
    assert other.bad_words == tuple(map(tuple, tokenizer.encode_batch(["a", " a"], add_special_tokens=False)))
    assert none.bad_words == job.labels == ()


def test_a_token_that_the_model_does_not_have_makes_a_bad_row_or_job(tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size
    for key, value in (("allowed_token_ids", [7, vocab_size]), ("logit_bias", {"7": 1, str(vocab_size): 1})):
        answer = one(builder_of(tokenizer, vocab_size=vocab_size), prompt="a", **{key: value})
        told = f"bad_param: {key} holds the token id {vocab_size}, and the model has {vocab_size} tokens"
        assert problem(answer) == told
    with pytest.raises(UsageError, match=f"^sampling.allowed_token_ids holds the token id {vocab_size},"):
        builder_of(tokenizer, SamplingParams(allowed_token_ids=(vocab_size,)), vocab_size=vocab_size)


@pytest.mark.parametrize(
    "sampling", [{"stop": "a"}, {"labels": ["a", "b"]}, {"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}}]
)
def test_a_row_that_needs_a_tokenizer_where_there_is_none_is_a_bad_one(sampling: dict[str, Any]) -> None:
    answer = one(builder_of(None), prompt_token_ids=[8], **sampling)
    said = f"bad_param: {next(iter(sampling))} needs a tokenizer and this model has none; name"
    assert problem(answer).startswith(said)


@pytest.mark.parametrize("sampling", [SamplingParams(stop=("a",)), SamplingParams(labels=("a", "b"))])
def test_a_job_that_needs_a_tokenizer_where_there_is_none_is_refused_at_once(sampling: SamplingParams) -> None:
    with pytest.raises(
        UsageError, match=r"^(sampling\.stop|classify\.labels) needs a tokenizer and this model has none"
    ):
        builder_of(None, sampling)


@pytest.mark.parametrize(("job", "labels"), [(JOB, ["a", "b"]), (LABELLED, [])])
def test_a_job_gives_labels_to_all_rows_or_to_none(
    tokenizer: Tokenizer, job: SamplingParams, labels: list[str]
) -> None:
    answer = one(builder_of(tokenizer, job), prompt="p", labels=labels)
    said = problem(answer)
    assert said.startswith("bad_param") and said.endswith("set [classify] labels, in whose place a row's own come")


def test_a_label_without_tokens_is_a_bad_one(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda _, texts, __: [[] if t == "b" else [8] for t in texts])
    answer = one(builder_of(tokenizer, LABELLED), prompt="p")
    assert problem(answer) == "bad_param: labels: one of the texts has no tokens"


def test_the_first_bad_value_is_the_one_named(tokenizer: Tokenizer) -> None:
    for names in (["n", "top_p", "stop"], ["stop", "n", "top_p"], ["top_p", "stop", "n"]):
        answer = one(builder_of(tokenizer), prompt="p", sampling=dict.fromkeys(names, -7))
        assert problem(answer).startswith(f"bad_param: {names[0]} = -7")


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"prompt": st.text("aé", max_size=4)},
            optional={
                "labels": st.lists(st.text("ab", max_size=3), max_size=4),
                "stop": st.text("ab", max_size=2),
                "max_tokens": st.integers(0, 3),
            },
        ),
        max_size=6,
    )
)
def test_rows_get_the_answers_they_would_get_alone(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> None:
    builder = builder_of(tokenizer, LABELLED, max_model_len=6)
    records = [record(row, index) for index, row in enumerate(rows)]
    assert [*builder.build(records)] == [answer for alone in records for answer in builder.build([alone])]


# ---------------------------------------------------------------- structured outputs


FREE = SamplingParams()
CHOICE = canonical({"choice": ["yes", "no"]})
LOOKS_BACK = {"regex": "(?<=a)b"}


def with_grammars(tokenizer: Tokenizer, sampling: SamplingParams = FREE) -> RequestBuilder:
    grammars = Grammars(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)
    return builder_of(tokenizer, sampling, grammars=grammars)


def test_what_cannot_be_compiled_is_a_bad_row_or_a_refused_job(tokenizer: Tokenizer) -> None:
    answer = one(with_grammars(tokenizer), prompt="p", structured_outputs=LOOKS_BACK)
    assert problem(answer).startswith("bad_param: structured_outputs: ") and "look" in problem(answer)
    with pytest.raises(UsageError, match=r"^sampling\.structured_outputs: .*look"):
        with_grammars(tokenizer, SamplingParams(structured_outputs=canonical(LOOKS_BACK)))


# ---------------------------------------------------------------- the column "sampling"


def asked(tokenizer: Tokenizer, columns: dict[str, Any]) -> Any:
    """The sampling values that a row asks for, or the code and message of its error."""
    [(row, _)] = builder_of(tokenizer, prompt="q").build([row_of({"q": "Hi", **columns})])
    return problem(row) if row.error else row.params


def test_a_table_gives_rows_values_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = b'q,sampling\r\na,"{""max_tokens"": 3, ""stop"": ""5""}"\r\nb,\r\n'
    rows = [row for row in read_bytes(tmp_path, table, "rows.csv") if row.error is None]
    found = [asked(tokenizer, row.columns) for row in rows]
    assert found == [replace(JOB, max_tokens=3, stop=("5",)), JOB]


@pytest.mark.parametrize("value", [{"max_tokens": 4}, '{"max_tokens": 4}', ' {"max_tokens":4}\n'])
def test_sampling_is_an_object_or_the_text_of_one(tokenizer: Tokenizer, value: Any) -> None:
    assert asked(tokenizer, {"sampling": value}) == replace(JOB, max_tokens=4)


@pytest.mark.parametrize("value", [None, "", {}, "{}", "weekly", "every {n} rows", 44_100, 0.5, True, ["a"], "[1]"])
def test_a_column_that_gives_no_key_a_value_is_data(tokenizer: Tokenizer, value: Any) -> None:
    assert asked(tokenizer, {"sampling": value}) == JOB


NO_OBJECT = "bad_type: column 'sampling' gives sampling values, but is not an object"
OF_JOBS = "bad_param: generation_config is a key of jobs: a row gives the values themselves"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((value, NO_OBJECT) for value in ('{"max_tokens": 4', "{'max_tokens': 4}", "max_tokens=4", ["seed = 4"])),
        *((value, NO_OBJECT) for value in ("temperature: 0.5", [{"max_tokens": 4}])),
        *((value, "bad_param: not a sampling key: 'max_token'") for value in ('{"max_token": 4}', {"max_token": 4})),
        ({"generation_config": "auto"}, OF_JOBS),
    ],
)
def test_what_gives_a_key_a_value_in_another_way_is_not_passed_over(
    tokenizer: Tokenizer, value: Any, said: str
) -> None:
    assert asked(tokenizer, {"sampling": value}).startswith(said)


def test_a_run_says_at_its_start_that_the_column_is_data(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    job.write([{"id": "a", "question": "q"}, {"id": "b", "question": "q", "sampling": "weekly"}])
    assert job.run(options=RunOptions()).exit_code == 0
    assert "the column 'sampling' holds plain data, not sampling values: 'weekly'" in capsys.readouterr().err

"""The output record: what is in it for what was asked, in one order, and as plain JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config.job import InputSpec, JobSpec, ModelSpec
from batchgen.config.output import OutputSpec
from batchgen.config.record_fields import RECORD_KEYS
from batchgen.core.json_line import encode_json
from batchgen.core.logprobs import Logprobs, TokenLogprob
from batchgen.core.records import Cursor, FinishReason, Result, Row, Sample, SamplingParams
from batchgen.output.formats.openai_batch import OpenAIBatchFormat
from batchgen.output.record_builder import RecordBuilder
from batchgen.text.answer_facts import AnswerFacts

ORDER = [
    *("id", "index", "fingerprint", "text", "reasoning", "tool_calls", "parsed", "extracted", "finish_reason"),
    *("finish_reasons", "complete", "usage", "timings", "token_ids", "logprobs", "samples"),
    *("prompt_logprobs", "perplexity"),
]
SPEC = JobSpec(ModelSpec("m"), InputSpec(("in.jsonl",), columns=()), OutputSpec("out"))
ROW = Row(3, "in.jsonl", 4, {"prompt": "Hi"}, Cursor(0, 9, 0, 4))
LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
END = len(LETTERS)


class Letters:
    """A tokenizer of which every token is a character, and one an end token."""

    answer_facts = AnswerFacts.of("", lambda token: None)
    silent_token_ids = frozenset((END,))

    def __init__(self, letters: str = LETTERS) -> None:
        self.letters = letters

    def decode(self, ids: Any, *, skip_special_tokens: bool = True, shown_in: str = "") -> str:
        end = "" if skip_special_tokens and "<end>" not in shown_in else "<end>"
        return "".join(self.letters[i] if i < len(self.letters) else end for i in ids)

    def token_id(self, token: str) -> int | None:
        return None


TOKENIZER: Any = Letters()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in text)


def payload(
    result: Result, labels: tuple[str, ...] = (), *, by: str = "sum", has_tokenizer: bool = True, **output: Any
) -> dict[str, Any]:
    """The record as a reader of the outputs finds it."""
    spec = replace(SPEC, output=replace(SPEC.output, **output))
    params = SamplingParams(labels=labels, by=by)
    record = RecordBuilder(spec, TOKENIZER if has_tokenizer else None).result(replace(ROW, params=params), result)
    return json.loads(encode_json(record))


def result(text: str = "ab", **fields: Any) -> Result:
    names = fields.keys() & {item.name for item in dataclasses.fields(Sample)}
    sample = replace(Sample(ids_of(text), FinishReason.LENGTH), **{name: fields.pop(name) for name in names})
    return Result(3, 5, **{"samples": (sample, *fields.pop("more_samples", ()))} | fields)


def test_a_plain_row_has_nothing_that_was_not_asked_for() -> None:
    record = payload(result())
    assert list(record) == ["id", "index", "fingerprint", "text", "finish_reason", "usage", "timings"]
    assert (record["text"], record["finish_reason"]) == ("ab", "length")
    assert record["usage"] == {"prompt_tokens": 5, "completion_tokens": 2}


def test_the_stop_string_and_what_follows_it_are_cut_off_but_their_tokens_stay() -> None:
    record = payload(result("a.b.\n", stop="\n", finish_reason=FinishReason.STOP), token_ids=True)
    assert (record["text"], record["finish_reason"]) == ("a.b.", "stop")
    assert record["token_ids"] == list(ids_of("a.b.\n")) and record["usage"]["completion_tokens"] == 5
    assert payload(result("a.b.", stop="."))["text"] == "a.b", "one that min_tokens let pass stays"


def test_log_probabilities_name_the_token_and_the_likeliest_ones() -> None:
    tokens = (
        TokenLogprob(0, -0.12345678, ((0, -0.12345678), (END, -2.0))),
        TokenLogprob(END, -1e-9, ((END, -1e-9), (0, -20.5))),
    )
    first = {"token_id": 0, "token": "a", "logprob": -0.123457}
    last = {"token_id": END, "token": "<end>", "logprob": 0.0}
    logprobs = [
        first | {"top_logprobs": [first, {"token_id": END, "token": "<end>", "logprob": -2.0}]},
        last | {"top_logprobs": [last, {"token_id": 0, "token": "a", "logprob": -20.5}]},
    ]
    record = payload(result(token_ids=(0, END), logprobs=Logprobs.of(tokens)))
    assert record["logprobs"] == logprobs and "-0.0" not in json.dumps(record["logprobs"][1])
    assert "samples" not in record


def test_without_a_tokenizer_ids_stand_for_text() -> None:
    record = payload(result(logprobs=Logprobs.of([TokenLogprob(0, -1.0)])), has_tokenizer=False)
    assert "text" not in record and record["token_ids"] == [0, 1]
    assert record["logprobs"] == [{"token_id": 0, "token": None, "logprob": -1.0, "top_logprobs": []}]


def test_all_samples_are_listed_and_the_first_one_is_the_rows() -> None:
    more = (Sample(ids_of("c."), FinishReason.STOP, "."), Sample((), FinishReason.REPETITION))
    record = payload(result("ab", more_samples=more))
    assert record["samples"] == [
        {"text": "ab", "finish_reason": "length"},
        {"text": "c", "finish_reason": "stop"},
        {"text": "", "finish_reason": "repetition"},
    ]
    assert (record["text"], record["finish_reason"], record["usage"]["completion_tokens"]) == ("ab", "length", 4)


def test_samples_hold_ids_and_log_probabilities_when_asked_for() -> None:
    logprobs = Logprobs.of([TokenLogprob(0, -1.0)])
    more = (Sample(ids_of("c"), FinishReason.STOP, logprobs=logprobs),)
    record = payload(result("a", logprobs=logprobs, more_samples=more), token_ids=True)
    assert [list(sample) for sample in record["samples"]] == [["text", "finish_reason", "token_ids", "logprobs"]] * 2
    assert record["samples"][0] == {name: record[name] for name in record["samples"][0]}


def test_a_prompts_perplexity_is_that_of_its_tokens_but_the_first() -> None:
    tokens = Logprobs.of(TokenLogprob(i, logprob) for i, logprob in enumerate((-1.0, -2.0, -0.5)))
    record = payload(result("", prompt_logprobs=tokens))
    assert [item["logprob"] for item in record["prompt_logprobs"]] == [-1.0, -2.0, -0.5]
    assert record["perplexity"] == round(math.exp(3.5 / 3), 6)
    assert record["text"] == "" and record["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("logprobs", [(), (-1e5,), (float("-inf"),), (float("nan"),)])
def test_a_perplexity_that_is_no_number_is_null(logprobs: tuple[float, ...]) -> None:
    tokens = Logprobs.of(TokenLogprob(0, logprob) for logprob in logprobs)
    assert payload(result(prompt_logprobs=tokens))["perplexity"] is None


@pytest.mark.parametrize(("logprobs", "best"), [((-2.0, -1.0), " no"), ((-1.0, -2.0), "yes"), ((-1.0, -1.0), "yes")])
def test_the_most_likely_label_stands_in_place_of_a_text(logprobs: tuple[float, ...], best: str) -> None:
    record = payload(result(best, label_logprobs=logprobs, label_means=logprobs), ("yes", " no"))
    assert list(record) == ["id", "index", "fingerprint", "label", "score", "scores", "usage", "timings"]
    assert record["label"] == best and record["usage"] == {"prompt_tokens": 5, "completion_tokens": 0}
    prob = round(1 / (1 + math.exp(logprobs[1] - logprobs[0])), 6)
    assert record["scores"] == {"yes": prob, " no": round(1 - prob, 6)}
    assert record["score"] == record["scores"][best]


def test_where_the_mean_per_token_decides_the_best_and_the_probabilities_are_by_it() -> None:
    scores = {"label_logprobs": (-3.0, -4.0, -8.0), "label_means": (-1.5, -1.0, -1.0)}
    record = payload(result(" no", **scores), ("yes", " no", "never"), by="mean")
    assert record["label"] == " no"
    first, second, third = record["scores"].values()
    assert first < second == third
    assert first + second + third == pytest.approx(1.0, abs=2e-6)


@given(st.lists(st.floats(-5000, 0), min_size=2, max_size=8))
def test_the_scores_of_labels_sum_to_one_however_unlikely_they_are(logprobs: list[float]) -> None:
    scores = {"label_logprobs": tuple(logprobs), "label_means": tuple(logprobs)}
    record = payload(result("a", **scores), tuple(map(str, range(len(logprobs)))))
    assert sum(record["scores"].values()) == pytest.approx(1.0, abs=1e-5)


def test_kept_columns_make_way_for_the_records_own_fields() -> None:
    spec = replace(SPEC, input=replace(SPEC.input, columns=("*",)))
    columns = {"finish_reason": [1], "perplexity": 2, "prompt_logprobs": 3, "samples": 4, "logprobs": 5, "other": 6}
    record = RecordBuilder(spec, TOKENIZER).result(replace(ROW, columns=columns), result())
    assert {name.removeprefix("input_"): value for name, value in list(record.items())[7:]} == columns
    assert not RECORD_KEYS & set(list(record)[7:])


def test_a_batch_request_is_no_column_that_is_kept_but_by_name() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}, "topic": 3}
    for columns, kept in ((("*",), {"topic": 3}), (("url",), {"url": "/v1/completions"}), ((), {})):
        spec = replace(SPEC, input=replace(SPEC.input, columns=columns))
        record = RecordBuilder(spec, TOKENIZER).result(replace(ROW, columns=line, id="a"), result())
        assert {name: value for name, value in record.items() if name not in RECORD_KEYS} == kept


def test_columns_of_data_do_not_say_what_form_a_batch_response_has() -> None:
    output = replace(SPEC.output, format="openai-batch")
    spec = replace(SPEC, input=replace(SPEC.input, columns=("*",), prompt="{q}"), output=output)
    columns = {"q": "Hi", "url": "https://example.org", "model": "T-Ford"}
    record = RecordBuilder(spec, TOKENIZER).result(replace(ROW, columns=columns, id="a"), result())
    line = json.loads(OpenAIBatchFormat("m", chat=True).result_row(encode_json(record)))
    assert (line["response"]["body"]["model"], line["response"]["body"]["object"]) == ("m", "chat.completion")
    assert line["kept_columns"] == {"q": "Hi", "input_url": "https://example.org", "input_model": "T-Ford"}


TOKENS, FLOATS = st.integers(0, END), st.floats(-50, 0)
LIKELIEST = st.lists(st.tuples(TOKENS, FLOATS), min_size=2, max_size=2).map(tuple)
LOGPROBS = st.none() | st.lists(st.builds(TokenLogprob, TOKENS, FLOATS, LIKELIEST), max_size=3).map(Logprobs.of)
SAMPLES = st.builds(
    Sample,
    st.lists(TOKENS, max_size=4).map(tuple),
    st.sampled_from(FinishReason),
    logprobs=LOGPROBS,
    is_complete=st.none() | st.booleans(),
)


@settings(deadline=None)
@given(st.lists(SAMPLES, min_size=1, max_size=3), LOGPROBS, st.booleans(), st.booleans(), st.booleans())
def test_the_order_of_fields_never_changes(
    samples: list[Sample], prompt_logprobs: Any, token_ids: bool, parse_json: bool, has_tokenizer: bool
) -> None:
    whole = result(samples=tuple(samples), prompt_logprobs=prompt_logprobs)
    parse = ("json",) if parse_json else ()
    record = payload(whole, token_ids=token_ids, parse=parse, has_tokenizer=has_tokenizer)
    assert list(record) == [name for name in ORDER if name in record]
    assert record["usage"]["completion_tokens"] == sum(len(sample.token_ids) for sample in samples)
    assert ("samples" in record) == (len(samples) > 1)
    assert ("parsed" in record) == (parse_json and has_tokenizer)
    assert record.get("complete") == samples[0].is_complete
    assert [sample.get("complete") for sample in record.get("samples", [record])] == [s.is_complete for s in samples]
    assert set(ORDER) == RECORD_KEYS


DIGITS = '0123456789[]{}:,"nul -.eENa'


def parsed(text: str, **fields: Any) -> Any:
    """The value in the record of a text made of ``DIGITS``."""
    tokenizer: Any = Letters(DIGITS)
    spec = replace(SPEC, output=replace(SPEC.output, parse=("json",)))
    made = result("", token_ids=tuple(map(DIGITS.index, text)), **fields)
    return json.loads(encode_json(RecordBuilder(spec, tokenizer).result(ROW, made)))["parsed"]


@pytest.mark.parametrize(
    ("text", "value"),
    [(' {"a": [1, 1.0, null]}', {"a": [1, 1.0, None]}), ("12", 12), ("9" * 40, int("9" * 40)), ('"a"', "a")]
    + [(text, None) for text in ("", "{", "NaN", "1e999", '{"a": 1, "a": 1}', "9" * 5000, "[" * 101 + "]" * 101)]
    + [("[" * 10**5, None), ("[" * 100 + "]" * 100, eval("[" * 100 + "]" * 100))],
)
def test_the_value_of_a_text_is_that_of_the_whole_text_or_null(text: str, value: Any) -> None:
    assert repr(parsed(text)) == repr(value)  # 1 and 1.0 are equal


@pytest.mark.parametrize(("is_complete", "value"), [(None, 12), (True, 12), (False, None)])
def test_a_text_that_was_cut_off_has_no_value(is_complete: bool | None, value: int | None) -> None:
    assert parsed("12", is_complete=is_complete) == value


@pytest.mark.parametrize("keep", [(), ("*",)])
def test_a_batch_line_without_a_url_is_answered_as_its_body_asks(keep: tuple[str, ...]) -> None:
    row = replace(ROW, columns={"custom_id": "a", "body": {"prompt": "Hi"}})
    spec = replace(SPEC, input=replace(SPEC.input, columns=keep), output=replace(SPEC.output, format="openai-batch"))
    assert RecordBuilder(spec, TOKENIZER).result(replace(row, id="a"), result())["url"] == "/v1/completions"


def test_a_part_of_a_character_has_its_bytes_beside_it() -> None:
    tokenizer: Any = Letters("abc\ufffde")
    tokenizer.token_bytes = lambda token_id: bytes([0xF0, token_id])
    builder = RecordBuilder(SPEC, tokenizer)
    likeliest = ((4, -0.5), (3, -1.0))
    scores = Logprobs.of([TokenLogprob(3, -0.5, likeliest), TokenLogprob(4, -0.5, likeliest)])
    first, second = builder.result(ROW, result(logprobs=scores))["logprobs"]
    assert (first["bytes"], first["top_logprobs"][1]["bytes"]) == ([0xF0, 3], [0xF0, 3])
    assert "bytes" not in second and "bytes" not in first["top_logprobs"][0]

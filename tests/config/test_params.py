"""Sampling values: vLLM's names and ranges, one line that names key, value and remedy for everything else."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchgen
from batchgen.config.sampling import CLASSIFY_KEYS, SAMPLING_KEYS, ParamError, merge_params
from batchgen.core.keys import keys_of
from batchgen.core.records import SamplingParams

BASE = SamplingParams()
FIELDS = [item.name for item in fields(SamplingParams)]
KNOWN = SAMPLING_KEYS.keys() | CLASSIFY_KEYS.keys()

ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "max_tokens": [(1, 1), (16.0, 16)],
    "min_tokens": [(0, 0)],
    "temperature": [(0, 0.0), (1e-9, 0.01), (2, 2.0)],
    "top_p": [(1, 1.0), (1e-9, 1e-9)],
    "top_k": [(0, 0), (-1, 0)],
    "min_p": [(0.0, 0.0), (1, 1.0)],
    "repetition_penalty": [(1, 1.0), (0.01, 0.01), (2.5, 2.5)],
    "presence_penalty": [(-2, -2.0), (2, 2.0)],
    "frequency_penalty": [(-2.0, -2.0), (0.5, 0.5)],
    "seed": [(-1, -1), (2**63 - 1, 2**63 - 1)],
    "stop_token_ids": [([], ()), ([7, 2], (7, 2))],
    "ignore_eos": [(True, True)],
    "stop": [
        *(("\n\n", ("\n\n",)), ([], ()), (["b", "a", "b"], ("b", "a"))),
        *((["x" * 1000] + [str(i) for i in range(15)], ("x" * 1000, *(str(i) for i in range(15)))),),
    ],
    "n": [(1, 1), (128, 128)],
    "logprobs": [(0, 0), (65536, 65536), (True, 0), (False, None)],
    "prompt_logprobs": [(5.0, 5), (False, None)],
    "max_repeats": [(0, 0), (2, 2)],
    "labels": [
        *((["yes", " yes"], ("yes", " yes")),),
        *(([str(i) for i in range(1000)], tuple(str(i) for i in range(1000))), ([], ())),
    ],
    "logit_bias": [
        *(({"7": 1, 2: -100, "3": 0}, ((2, -100.0), (7, 1.0))), ('{"50256": -100}', ((50256, -100.0),))),
        *(([[7, 1.5], [2, 100]], ((2, 100.0), (7, 1.5))), ({"5": None}, ()), ({}, ())),
    ],
    "allowed_token_ids": [([7, 2, 7], (2, 7)), ([], ())],
    "bad_words": [(["b", " a", "b"], ("b", " a")), ("a", ("a",))],
    "by": [("mean", "mean")],
}

# Wrong for every key but the few that they fit.
NONSENSE: list[Any] = [
    *(float("nan"), float("inf"), -float("inf"), 10**400, -(10**5000), 1e308),
    *({}, {"a": []}, [[]], [{}], [None], b"\xff", "nonsense", "\x00"),
]
FITTING = [(key, value) for key in ("stop", "bad_words") for value in ("nonsense", "\x00")]
FITTING += [("structured_outputs", {}), ("logit_bias", {})]

REFUSED: list[tuple[str, Any]] = [
    *((key, value) for key in FIELDS for value in NONSENSE if (key, value) not in FITTING),
    *(("max_tokens", value) for value in (0, -5, 1.5, "16", True, [1], 2**31, 10**30, 10**5000, float("nan"))),
    *(("min_tokens", value) for value in (-1, "0", 257)),
    *(("temperature", value) for value in (-1, -1e-9, "hot", True, float("nan"), float("inf"), 10**400, [0.5])),
    *(("top_p", value) for value in (0, -0.1, 1.01, "0.9", float("nan"))),
    *(("top_k", value) for value in (-2, 0.5, 2**31, "40", False)),
    *(("min_p", value) for value in (-0.1, 1.1, "0")),
    *(("seed", value) for value in (1.5, "7", 2**63, -(2**63) - 1, True)),
    *(("stop_token_ids", value) for value in (7, "7", [-1], ["7"], [True], [2**31], {"7": 1})),
    *(("ignore_eos", value) for value in (1, 0, "true", [])),
    *(("repetition_penalty", value) for value in (0, -1, 0.001, 101, 1e-300, 1e299, "1.1", True)),
    *((key, value) for key in ("presence_penalty", "frequency_penalty") for value in (-2.01, 2.01, "0", True, 1e308)),
    *(("stop", value) for value in ("", [""], ["a", ""], 7, [7], [["a"]], {"a": 1}, True, "x" * 1001, "\ud800")),
    ("stop", [str(i) for i in range(17)]),
    *(("n", value) for value in (0, -1, 129, 1.5, "2", True)),
    *((key, value) for key in ("logprobs", "prompt_logprobs") for value in (-1, 2**31, 0.5, "5", [5])),
    *(("max_repeats", value) for value in (1, -1, 2.5, "3", True, 2**31)),
    *(("labels", value) for value in (["a"], ["a", "a"], ["a", ""], ["a", 1], "ab", {"a": 1, "b": 2}, [["a", "b"]])),
    *(("labels", value) for value in (["a", "\udfff"], [str(i) for i in range(1001)], [None, "a"], 2)),
    *(("logit_bias", value) for value in ({"7": 101}, {"7": -100.5}, {"7": "1"}, {"7": True}, {"7": [1]}, {7.5: 1})),
    *(
        ("logit_bias", value)
        for value in ({"x": 1}, {"-1": 1}, {str(2**31): 1}, {"7": 1, 7: 2}, [7], ["ab"], "{", 7, True)
    ),
    *(("logit_bias", value) for value in ({"7" * 5000: 1}, {"7": float("nan")}, [[7, 1], [7, 1]], [[1, 2, 3]])),
    *(("allowed_token_ids", value) for value in (7, "7", [-1], [True], [2**31], ["7"])),
    *(("bad_words", value) for value in ("", ["a", ""], [7], "x" * 1001, "\ud800", [str(i) for i in range(1001)])),
    *(("by", value) for value in ("tokens", "", True, ["tokens"])),
]


def test_every_field_of_sampling_params_is_a_declared_key() -> None:
    assert [*keys_of(SamplingParams)] == FIELDS
    assert {*FIELDS, "generation_config"} == KNOWN


@pytest.mark.parametrize("name", FIELDS)
def test_every_default_is_a_value_of_its_kind(name: str) -> None:
    item = keys_of(SamplingParams)[name]
    assert item.default is None or item.kind.parse(item.default) == item.default


@pytest.mark.parametrize("key", ACCEPTED)
def test_a_sound_value_replaces_the_job_default(key: str) -> None:
    for value, parsed in ACCEPTED[key]:
        merged = merge_params(BASE, {key: value})
        assert merged == replace(BASE, **{key: parsed})
        assert type(getattr(merged, key)) is type(parsed)


def refusal(key: str, value: object) -> str:
    """What is said of a value that a job's sampling cannot have; "" if it is taken."""
    try:
        merge_params(BASE, {key: value})
    except ParamError as error:
        return str(error) if error.key == key else f"names {error.key}"
    return ""


def test_an_impossible_value_is_refused_in_one_line_that_names_the_key() -> None:
    assert len(REFUSED) > 400
    said = {(place, key): refusal(key, value) for place, (key, value) in enumerate(REFUSED)}
    wrong = {(place, key): line for (place, key), line in said.items() if not line.startswith(key)}
    assert not wrong, "by place in REFUSED"
    assert not [line for line in said.values() if "\n" in line or len(line) >= 200]


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParamError, match=r"not a sampling key: 'temprature' \(did you mean \"temperature\"\?\)"):
        merge_params(BASE, {"temprature": 1})
    with pytest.raises(ParamError, match="known: max_tokens, "):
        merge_params(BASE, {"x": 1})


def test_null_means_not_given() -> None:
    assert merge_params(BASE, dict.fromkeys(FIELDS)) == BASE


def test_min_tokens_is_held_against_the_merged_max_tokens() -> None:
    base = merge_params(BASE, {"max_tokens": 10, "min_tokens": 10})
    with pytest.raises(ParamError, match="min_tokens = 10 is above max_tokens = 9"):
        merge_params(base, {"max_tokens": 9})


LABELS = {"labels": ["yes", "no"]}
GUIDED = {"structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ({**LABELS, "n": 2}, "n", "n = 2 does not go with labels"),
        ({**LABELS, "stop": "a"}, "stop", r"stop = \('a',\) does not go with labels"),
        ({**LABELS, "logprobs": 0}, "logprobs", "logprobs = 0 does not go with labels"),
        ({**LABELS, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs = 1 does not go with labels"),
        ({**LABELS, "max_repeats": 2}, "max_repeats", "max_repeats = 2 does not go with labels"),
        ({**LABELS, "logit_bias": {"1": 2}}, "logit_bias", r"logit_bias = \(\(1, 2.0\),\) does not go with labels"),
        ({**LABELS, "allowed_token_ids": [1]}, "allowed_token_ids", "allowed_token_ids = .* with labels"),
        ({**LABELS, "bad_words": "a"}, "bad_words", r"bad_words = \('a',\) does not go with labels"),
        ({**GUIDED, "allowed_token_ids": [1]}, "allowed_token_ids", "allowed_token_ids = .* structured_outputs"),
        ({**GUIDED, "bad_words": "a"}, "bad_words", "bad_words = .* does not go with structured_outputs"),
        ({**LABELS, "max_tokens": 0}, "max_tokens", "max_tokens = 0 must be at least 1"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "only a row with prompt_logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n", "n = 2 does not go with max_tokens = 0"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens", "min_tokens = 1 is above"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ParamError, match=message) as caught:
        merge_params(BASE, overrides)
    assert caught.value.key == key


def test_a_contradiction_is_laid_to_the_layer_that_brought_it() -> None:
    base = merge_params(BASE, {"n": 2})
    with pytest.raises(ParamError, match="n = 2 does not go with labels") as caught:
        merge_params(base, LABELS)
    assert caught.value.key == "labels"


@pytest.mark.parametrize("overrides", [{"prompt_logprobs": 0}, {"prompt_logprobs": 20, "logprobs": 3}])
def test_a_scoring_job_may_generate_nothing(overrides: dict[str, Any]) -> None:
    assert merge_params(BASE, {"max_tokens": 0, **overrides}).max_tokens == 0


def test_a_row_can_do_without_what_the_job_asks_for() -> None:
    base = merge_params(BASE, {"logprobs": 5, "stop": "a"})
    assert merge_params(base, {"logprobs": False, "stop": []}) == BASE


def _value(key: str) -> st.SearchStrategy[Any]:
    """Values that fit ``key`` or nearly do, and some that fit nothing."""
    numbers = st.integers(-3, 200) | st.floats(-3, 3) | st.integers() | st.floats()
    texts = st.text("ab\ud800", max_size=3)
    anything = st.none() | st.booleans() | texts | st.lists(texts | numbers, max_size=3)
    return anything | {
        "stop": st.lists(texts, max_size=20),
        "labels": st.lists(texts, max_size=5),
        "logit_bias": st.dictionaries(texts | numbers, numbers, max_size=2),
    }.get(key, numbers)


@settings(deadline=None)
@given(
    st.fixed_dictionaries({}, optional={key: _value(key) for key in sorted(KNOWN)}),
    st.dictionaries(st.text(max_size=5), st.none() | st.integers(), max_size=1),
)
def test_any_values_are_accepted_in_range_or_refused(known: dict[str, Any], unknown: dict[str, Any]) -> None:
    overrides = known | unknown
    try:
        merged = merge_params(BASE, overrides)
    except ParamError as error:
        assert error.key in overrides and "\n" not in str(error)
        return
    assert all(overrides[key] is None for key in unknown.keys() - KNOWN)
    assert 0 <= merged.min_tokens <= merged.max_tokens < 2**31
    assert merged.max_tokens > 0 or merged.prompt_logprobs is not None
    assert merged.temperature == 0 or merged.temperature >= 0.01
    assert 0 < merged.top_p <= 1 and 0 <= merged.min_p <= 1 and merged.top_k >= 0
    assert 0.01 <= merged.repetition_penalty <= 100 and 1 <= merged.n <= 128 and merged.max_repeats != 1
    assert abs(merged.presence_penalty) <= 2 and abs(merged.frequency_penalty) <= 2
    assert all(value is None or 0 <= value <= 20 for value in (merged.logprobs, merged.prompt_logprobs))
    assert all(text and text.encode() for text in (*merged.stop, *merged.labels))
    assert not merged.labels or (merged.n, merged.stop, merged.logprobs) == (1, (), None)
    assert merge_params(merged, overrides) == merged


@pytest.mark.parametrize("key", ["temperature", "min_p", "presence_penalty"])
def test_zero_has_no_sign(key: str) -> None:
    """To kernels that compare bits, -0.0 is a huge number."""
    assert str(getattr(merge_params(BASE, {key: -0.0}), key)) == "0.0"


def test_something_acts_on_each_sampling_key() -> None:
    """A key that is declared but never read would be accepted and ignored."""
    package = Path(batchgen.__file__).parent
    read = {
        node.attr
        for room in ("core", "engine", "input", "output")
        for path in (package / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert KNOWN - {"generation_config"} <= read

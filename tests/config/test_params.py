"""Sampling values: vLLM's names and ranges, one line that names key, value and remedy for everything else."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import batchgen
from batchgen.config.sampling import CLASSIFY_KEYS, SAMPLING_KEYS, ParamError, merge_params
from batchgen.core.keys import keys_of
from batchgen.core.records import SamplingParams

BASE = SamplingParams()
FIELDS = [item.name for item in fields(SamplingParams)]
KNOWN = SAMPLING_KEYS.keys() | CLASSIFY_KEYS.keys()

# What a value becomes that is not taken as it is; bounds and types are in test_keys.
ACCEPTED: list[tuple[str, Any, Any]] = [
    *(("max_tokens", 16.0, 16), ("temperature", 0, 0.0), ("temperature", 1e-9, 0.01), ("top_k", -1, 0)),
    *(("logprobs", True, 0), ("logprobs", False, None), ("prompt_logprobs", 5.0, 5), ("prompt_logprobs", False, None)),
    *(("stop_token_ids", [7, 2], (7, 2)), ("allowed_token_ids", [7, 2, 7], (2, 7)), ("allowed_token_ids", [], ())),
    *(("stop", "\n\n", ("\n\n",)), ("stop", [], ()), ("stop", ["b", "a", "b"], ("b", "a"))),
    *((name, ["x" * 1000, *map(str, range(15))], ("x" * 1000, *map(str, range(15)))) for name in ("stop", "bad_words")),
    *(("labels", ["yes", " yes"], ("yes", " yes")), ("labels", [*map(str, range(1000))], (*map(str, range(1000)),))),
    *(("labels", [], ()), ("bad_words", ["b", " a", "b"], ("b", " a")), ("bad_words", "a", ("a",))),
    ("logit_bias", {"7": 1, 2: -100, "3": 0}, ((2, -100.0), (7, 1.0))),
    *(("logit_bias", value, ((50256, 100.0),)) for value in ('{"50256": 100}', [[50256, 100]])),
    *(("logit_bias", {"5": None}, ()), ("logit_bias", {}, ())),
]
LONE = "\ud800"
REFUSED: list[tuple[str, Any]] = [
    *(("stop", value) for value in ("", [""], ["a", ""], [7], "x" * 1001, LONE, [*map(str, range(17))])),
    *(("bad_words", value) for value in (["a", ""], "x" * 1001, LONE, [*map(str, range(1001))])),
    *(("labels", value) for value in (["a"], ["a", "a"], ["a", ""], ["a", 1], "ab", ["a", LONE])),
    ("labels", [*map(str, range(1001))]),
    *((key, value) for key in ("stop_token_ids", "allowed_token_ids") for value in ([-1], ["7"], [True], [2**31])),
    *(("max_repeats", 1), ("min_tokens", 257), ("logprobs", -1), ("seed", 2**63)),
    *(("logit_bias", {token: 1}) for token in (7.5, "x", "-1", str(2**31), "7" * 5000)),
    *(("logit_bias", {"7": bias}) for bias in (101, -100.5, "1", True, [1], float("nan"))),
    *(("logit_bias", value) for value in ({"7": 1, 7: 2}, [7], ["ab"], "{", [[7, 1], [7, 1]], [[1, 2, 3]])),
]


def test_every_field_of_sampling_params_is_a_declared_key() -> None:
    assert [*keys_of(SamplingParams)] == FIELDS
    assert {*FIELDS, "generation_config"} == KNOWN


def test_every_default_is_a_value_of_its_kind() -> None:
    for item in keys_of(SamplingParams).values():
        assert item.default is None or item.kind.parse(item.default) == item.default


def test_a_sound_value_replaces_the_job_default() -> None:
    for key, value, parsed in ACCEPTED:
        merged = merge_params(BASE, {key: value})
        assert merged == replace(BASE, **{key: parsed})
        assert type(getattr(merged, key)) is type(parsed)


def test_an_impossible_value_is_refused_in_one_line_that_names_the_key() -> None:
    for key, value in REFUSED:
        with pytest.raises(ParamError, match=rf"^{key} = .{{1,200}}$") as caught:
            merge_params(BASE, {key: value})
        assert caught.value.key == key


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
NARROWING = {"logit_bias": {"1": 2}, "allowed_token_ids": [1], "bad_words": "a"}


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({**LABELS, key: value}, key, rf"^{key} = .* does not go with labels")
        for key, value in {"n": 2, "stop": "a", "logprobs": 0, "prompt_logprobs": 1, "max_repeats": 2}.items()
    ),
    *(({**LABELS, key: value}, key, rf"^{key} = .* does not go with labels") for key, value in NARROWING.items()),
    *(
        ({**GUIDED, key: NARROWING[key]}, key, rf"^{key} = .* does not go with structured_outputs")
        for key in ("allowed_token_ids", "bad_words")
    ),
    ({**LABELS, "max_tokens": 0}, "max_tokens", "max_tokens = 0 must be at least 1"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "only a row with prompt_logprobs"),
    ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n", "n = 2 does not go with max_tokens = 0"),
    ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens", "min_tokens = 1 is above"),
]


def test_values_that_contradict_each_other_are_refused() -> None:
    for overrides, key, message in CONTRADICTIONS:
        with pytest.raises(ParamError, match=message) as caught:
            merge_params(BASE, overrides)
        assert caught.value.key == key


def test_a_contradiction_is_laid_to_the_layer_that_brought_it() -> None:
    base = merge_params(BASE, {"n": 2})
    with pytest.raises(ParamError, match="n = 2 does not go with labels") as caught:
        merge_params(base, LABELS)
    assert caught.value.key == "labels"


def test_a_scoring_job_may_generate_nothing() -> None:
    overrides = {"max_tokens": 0, "prompt_logprobs": 20, "logprobs": 3}
    assert merge_params(BASE, overrides).max_tokens == 0


def test_a_row_can_do_without_what_the_job_asks_for() -> None:
    base = merge_params(BASE, {"logprobs": 5, "stop": "a"})
    assert merge_params(base, {"logprobs": False, "stop": []}) == BASE


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

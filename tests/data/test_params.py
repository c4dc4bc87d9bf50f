"""Sampling values: vLLM's names and ranges, one line that names key, value and remedy for everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data import params
from batchgen.data.params import ParamError, merge_params
from batchgen.records import SAMPLING_KEYS, SamplingParams

BASE = SamplingParams()

ACCEPTED: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1),
    ("max_tokens", 16.0, 16),
    ("min_tokens", 0, 0),
    ("temperature", 0, 0.0),
    ("temperature", 1e-9, 0.01),
    ("temperature", 2, 2.0),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", 0, 0),
    ("top_k", -1, 0),
    ("min_p", 0.0, 0.0),
    ("min_p", 1, 1.0),
    ("seed", -1, -1),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("stop_token_ids", [], ()),
    ("stop_token_ids", [7, 2], (7, 2)),
    ("ignore_eos", True, True),
]

REFUSED: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -5, 1.5, "16", True, [1], 2**31, 10**30, 10**5000, float("nan"))),
    *(("min_tokens", value) for value in (-1, "0", 257)),
    *(("temperature", value) for value in (-1, -1e-9, "hot", True, float("nan"), float("inf"), 10**400, [0.5])),
    *(("top_p", value) for value in (0, -0.1, 1.01, "0.9", float("nan"))),
    *(("top_k", value) for value in (-2, 0.5, 2**31, "40", False)),
    *(("min_p", value) for value in (-0.1, 1.1, "0")),
    *(("seed", value) for value in (1.5, "7", 2**63, -(2**63) - 1, True)),
    *(("stop_token_ids", value) for value in (7, "7", [-1], ["7"], [True], [2**31], {"7": 1})),
    *(("ignore_eos", value) for value in (1, 0, "true", [])),
]


def test_there_is_one_rule_for_every_field_of_sampling_params() -> None:
    assert set(params._RULES) == set(SAMPLING_KEYS)
    assert not set(params._RULES) & set(params._UNSUPPORTED)


@pytest.mark.parametrize(("key", "value", "parsed"), ACCEPTED)
def test_a_sound_value_replaces_the_job_default(key: str, value: Any, parsed: Any) -> None:
    merged = merge_params(BASE, {key: value})
    assert merged == replace(BASE, **{key: parsed})
    assert type(getattr(merged, key)) is type(parsed)


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda value: str(value)[:20] if value != 10**5000 else "huge")
def test_an_impossible_value_is_refused_in_one_line_that_names_the_key(key: str, value: Any) -> None:
    with pytest.raises(ParamError) as caught:
        merge_params(BASE, {key: value})
    assert caught.value.key == key
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParamError, match=r"no sampling key 'temprature'; did you mean temperature\?"):
        merge_params(BASE, {"temprature": 1})
    with pytest.raises(ParamError, match="known are max_tokens, "):
        merge_params(BASE, {"x": 1})


def test_null_means_not_given() -> None:
    assert merge_params(BASE, dict.fromkeys(SAMPLING_KEYS)) == BASE


def test_min_tokens_is_held_against_the_merged_max_tokens() -> None:
    base = merge_params(BASE, {"max_tokens": 10, "min_tokens": 10})
    with pytest.raises(ParamError, match="min_tokens = 10 is above max_tokens = 9"):
        merge_params(base, {"max_tokens": 9})


@pytest.mark.parametrize(("key", "neutral", "value"), [("n", 1, 2), ("presence_penalty", 0.0, 0.5)])
def test_a_key_that_is_not_supported_is_refused_unless_it_asks_for_nothing(key: str, neutral: Any, value: Any) -> None:
    if key not in params._UNSUPPORTED:
        pytest.skip("supported by now")
    assert merge_params(BASE, {key: neutral}) == BASE
    with pytest.raises(ParamError, match=f"{key} = {value}: this key is not supported"):
        merge_params(BASE, {key: value})


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(params.PARAM_KEYS)) | st.text(max_size=5),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=3),
        max_size=4,
    )
)
def test_any_values_are_accepted_in_range_or_refused(overrides: dict[str, Any]) -> None:
    try:
        merged = merge_params(BASE, overrides)
    except ParamError as error:
        assert error.key in overrides or error.key == "min_tokens"
        return
    assert 1 <= merged.max_tokens < 2**31 and 0 <= merged.min_tokens <= merged.max_tokens
    assert merged.temperature == 0 or merged.temperature >= 0.01
    assert 0 < merged.top_p <= 1 and 0 <= merged.min_p <= 1 and merged.top_k >= 0

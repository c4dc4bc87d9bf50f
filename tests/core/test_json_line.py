"""Values that JSON cannot express still become one line of strict JSON; each row belongs to one shard."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.json_line import MAX_DEPTH, encode_json, is_too_deep, json_value
from batchgen.core.units import WHOLE, Shard
from batchgen.run.invocation import RunOptions

HALF = st.text(st.characters())  # lone surrogates included
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HALF | st.binary() | st.datetimes() | st.decimals(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HALF | st.integers() | st.dates(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_becomes_one_line_of_strict_json(value: Any) -> None:
    line = encode_json(value)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert b"\n" not in line
    json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("zażółć", '"zażółć"'.encode()),
        ("\ud800ż", b'"\\ud800\\u017c"'),
        ([float("nan"), float("inf"), 1.5], b"[null, null, 1.5]"),
        (b"\x00\xff", b'"AP8="'),
        (datetime.date(2024, 2, 29), b'"2024-02-29"'),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), b'"2024-02-29T01:02:03"'),
        (decimal.Decimal("1.10"), b'"1.10"'),
        ({datetime.date(2024, 1, 1): 1}, b'{"2024-01-01": 1}'),
        (np.array([1, 2]), b"[1, 2]"),
        (np.float32(0.5), b"0.5"),
        ((1, "a"), b'[1, "a"]'),
        (10**30, b"1" + b"0" * 30),
    ],
)
def test_values_json_has_no_word_for(value: Any, expected: bytes) -> None:
    assert encode_json(value) == expected


@given(VALUES)
def test_a_value_that_was_decoded_is_written_as_it_was_read(value: Any) -> None:
    line = encode_json(value)
    try:
        found = json_value(line.decode())
    except ValueError:
        assert b"\\ud" in line  # half a character
    else:
        assert encode_json(found) == line
        assert not is_too_deep(found, line.decode())


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"a": 1, "a": 2}', '"\\ud83d"', "9" * 5000, "", "{}{}"])
def test_what_would_be_written_as_something_else_is_no_value(text: str) -> None:
    with pytest.raises(ValueError):
        json_value(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_nesting_has_a_limit(depth: int) -> None:
    json_value("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="deep"):
        json_value("[" * depth + "]" * depth)


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_row_belongs_to_one_shard(count: int) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    rows = [[index for index in range(20) if index in shard.rows()] for shard in shards]
    assert sorted(index for owned in rows for index in owned) == list(range(20))
    assert rows == [list(shard.rows(20)) for shard in shards]


def test_a_whole_input_is_one_shard() -> None:
    assert [index in WHOLE.rows() for index in (-1, 0, 5)] == [False, True, True]
    assert str(Shard(2, 8)) == "2/8"


@pytest.mark.parametrize(("number", "count"), [(0, 1), (3, 2), (-1, 4)])
def test_a_shard_outside_its_count_is_refused(number: int, count: int) -> None:
    with pytest.raises(ValueError, match="1 <= i <= n"):
        Shard(number, count)


def test_options_take_a_shard_as_a_pair() -> None:
    assert RunOptions(shard=(2, 3)).shard == Shard(2, 3)  # type: ignore[arg-type]  # as scripts have always written it

"""Values that JSON cannot express still become one line of strict JSON."""

import datetime
import decimal
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.json_line import encode_json

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

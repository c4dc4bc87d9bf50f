"""Which cases of a test repeat the claim of others: those are slow, so that the default suite stays short.

CI runs the slow ones too, so no combination is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def each_value_once(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrize over all combinations; those that are not needed to have every value of every axis once are slow.

    ``axes`` are the values by argument; those of several arguments, as in "width, height", are tuples.
    """
    lengths = [len(values) for values in axes.values()]
    needed = {tuple(turn % length for length in lengths) for turn in range(max(lengths))}
    cases = []
    for places in product(*map(range, lengths)):
        found = [(name, axes[name][place]) for name, place in zip(axes, places, strict=True)]
        flat = [part for name, value in found for part in (value if "," in name else (value,))]
        cases.append((pytest.param if places in needed else slow)(*flat))
    return pytest.mark.parametrize(", ".join(axes), cases, ids=str)

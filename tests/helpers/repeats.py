"""Which cases of a test repeat the claim of others: those are slow, so that the default suite stays short.

CI runs the slow ones too, so no combination is lost. Of a product of parametrizations, as many cases are left as show
every value once; of cases on Triton's interpreter, which takes a second for what a kernel does in a millisecond, one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)  # for cases that are long or dear by themselves


def mark_repeats(items: Iterable[pytest.Item], is_interpreted: bool) -> None:
    """Mark as slow all but the needed cases of each test; ``is_interpreted`` where there is no GPU."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "nightly"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        interpreted = [item for item in found if is_interpreted and item.get_closest_marker("interpreted")]
        others = [item for item in found if item not in interpreted]
        for item in [*interpreted[1:], *_repeats(others)]:
            item.add_marker(pytest.mark.slow)


def _repeats(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of one test whose values, one for each axis of its product, are all those of others too."""
    values = {case: _values(case) for case in cases}
    seen: set[tuple[Any, ...]] = set()
    needed = []
    for most_seen in range(max(map(len, values.values()), default=0)):  # first those of which every value is new
        for case, found in values.items():
            if len(found & seen) <= most_seen and not found <= seen:
                needed.append(case)
                seen |= found
    return [case for case, found in values.items() if len(found) > 1 and case not in needed]


def _values(case: pytest.Item) -> set[tuple[Any, ...]]:
    """What a case has of each axis: of a parametrization of one or several arguments together, or of a fixture."""
    params: dict[str, Any] = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    axes = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        axes.append(names.replace(" ", "").split(",") if isinstance(names, str) else list(names))
    axes += [[name] for name in params.keys() - {name for axis in axes for name in axis}]
    return {(*axis, *(id(params[name]) for name in axis)) for axis in axes if params.keys() >= set(axis)}

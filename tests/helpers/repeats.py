"""Which cases of a test repeat the claim of others: those are slow or nightly, so that the default suite stays short.

Of a product of parametrizations, as many cases run by default as show every value once; CI's slow tests add as many as
show every pair of values, and the night runs all. On Triton's interpreter, which takes a second for what a kernel does
in a millisecond, CI runs one case of a test. Of the examples of a slow fuzzer, CI runs the share that
``BATCHGEN_SLOW_SHARE`` says.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)  # for cases that are long or dear by themselves
further = partial(pytest.param, marks=pytest.mark.further)  # for cases whose mechanism others have
nightly = partial(pytest.param, marks=pytest.mark.nightly)
SLOW_SHARE = float(os.environ.get("BATCHGEN_SLOW_SHARE", "1"))


def share_of(count: int) -> int:
    """How many of ``count`` examples a slow fuzzer runs; at least a few."""
    return max(3, round(count * SLOW_SHARE))


def mark_repeats(items: Iterable[pytest.Item], is_interpreted: bool) -> None:
    """Mark all but the needed cases of each test as slow or nightly; ``is_interpreted`` where there is no GPU."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "nightly"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        interpreted = [item for item in found if is_interpreted and item.get_closest_marker("interpreted")]
        shown = {item: _values(item) for item in found if item not in interpreted}
        repeats = _repeats(shown, set())
        pairs = {item: {frozenset(pair) for pair in combinations(values, 2)} for item, values in shown.items()}
        seen = set().union(*(pairs[item] for item in shown if item not in repeats))
        rare = [*interpreted[1:], *_repeats({item: pairs[item] for item in repeats}, seen)]
        for item in {*rare, *repeats}:
            item.add_marker(pytest.mark.nightly if item in rare else pytest.mark.slow)


def _repeats(shown: Mapping[pytest.Item, set[Any]], seen: set[Any]) -> list[pytest.Item]:
    """The cases of one test that show nothing, of several things, that ``seen`` or other cases do not show."""
    seen = {*seen}
    needed = []
    for most_seen in range(max(map(len, shown.values()), default=0)):  # first those that show only what is new
        for case, found in shown.items():
            if len(found & seen) <= most_seen and not found <= seen:
                needed.append(case)
                seen |= found
    return [case for case, found in shown.items() if len(found) > 1 and case not in needed]


def _values(case: pytest.Item) -> set[tuple[Any, ...]]:
    """What a case has of each axis: of a parametrization of one or several arguments together, or of a fixture."""
    params: dict[str, Any] = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    axes = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        axes.append(names.replace(" ", "").split(",") if isinstance(names, str) else list(names))
    axes += [[name] for name in params.keys() - {name for axis in axes for name in axis}]
    return {(*axis, *(id(params[name]) for name in axis)) for axis in axes if params.keys() >= set(axis)}

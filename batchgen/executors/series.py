"""Series of the steps of several workers as one, over common points of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS = 1000
_SUMS = ("steps", "tokens", "prefill_tokens")
_MEANS = ("sequences", "kv_use")

Columns = Mapping[str, Sequence[float]]  # see ``EngineStats.series``


def merged(parts: Sequence[Columns], num_workers: int) -> dict[str, list[Any]]:
    """Series of workers as one of at most ``MAX_POINTS`` points of equal length.

    ``steps``, ``tokens`` and ``prefill_tokens`` are sums, spread evenly over the time of the points that they come
    from. ``sequences`` and ``kv_use`` are means over time and ``num_workers``, of which some may not be there: what a
    share of all their room is taken.
    """
    parts = [part for part in parts if part["at"]]
    if not parts:
        return {}
    start = min(part["at"][0] for part in parts)
    end = max(part["at"][-1] + part["span_s"][-1] for part in parts)
    edges = np.linspace(start, max(end, start + 1e-6), min(max(len(part["at"]) for part in parts), MAX_POINTS) + 1)
    totals = {name: np.zeros(len(edges)) for name in (*_SUMS, *_MEANS)}  # up to each edge
    for part in parts:
        spans = np.asarray(part["span_s"])
        ends = np.maximum.accumulate(np.asarray(part["at"]) + spans)
        times = np.maximum.accumulate(np.stack([ends - spans, ends], axis=1).ravel())
        for name in totals:
            amounts = np.asarray(part[name], dtype=float) * (spans if name in _MEANS else 1.0)
            until = np.cumsum(amounts)
            totals[name] += np.interp(edges, times, np.stack([until - amounts, until], axis=1).ravel())
    widths = np.diff(edges)
    columns: dict[str, list[Any]] = {"at": edges[:-1].tolist(), "span_s": widths.round(6).tolist()}
    columns |= {name: np.diff(totals[name].round()).astype(int).tolist() for name in _SUMS}
    return columns | {name: (np.diff(totals[name]) / widths / num_workers).round(4).tolist() for name in _MEANS}

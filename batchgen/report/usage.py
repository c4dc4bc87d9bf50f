"""Usage of invocations as plain numbers that add up: seconds by account, engine counts, the series of steps.

``run.progress`` and ``engine.stats`` write these shapes. Rows are counted in ``rows``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 2000
_SECONDS_PER_HOUR = 3600
_ENGINE_ACCOUNTS = ("prefill", "decode", "mask", "sample", "host")
_MEANS = ("sequences", "kv_use")  # columns of a series that are means over steps; the others but at_s are sums

Numbers = Mapping[str, Any]
# Errors of reading a file with values that this package does not write.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def add_up(totals: Numbers, more: Numbers) -> dict[str, Any]:
    """Numbers of two invocations as one, nested too: the larger of ``max_*`` keys, sums of others; lists are joined."""
    result = dict(totals)
    for key, value in more.items():
        total = result.get(key)
        are_lists = isinstance(value, list) and isinstance(total, list)
        are_numbers = isinstance(value, int | float) and isinstance(total, int | float)
        if isinstance(value, Mapping):
            result[key] = add_up(total if isinstance(total, Mapping) else {}, value)
        elif are_numbers and key.startswith("max_"):
            result[key] = max(total, value)
        elif are_numbers or are_lists:
            result[key] = total + value
        else:
            result[key] = value
    return result


def follow(totals: Numbers, more: Numbers) -> dict[str, Any]:
    """Append ``more`` to ``totals``; its time series starts at their wall time.

    If ``more`` lacks ``tail_s``, it is computed from the series of ``more`` alone: an earlier invocation that was
    stopped, or that had other sizes, did not reach its tail.
    """
    series = more.get("engine", {}).get("series")
    if not series:
        return add_up(totals, more)
    at_s = [round(at + totals.get("wall_s", 0.0), 3) for at in series["at_s"]]
    total = add_up(totals, {**more, "engine": {**more["engine"], "series": {**series, "at_s": at_s}}})
    total["engine"]["series"] = thin(total["engine"]["series"])
    return total if "tail_s" in more else {**total, "tail_s": tail_s(series)}


def lengthened(usage: Numbers, seconds: float) -> dict[str, Any]:
    """The usage of an invocation that continued generating for ``seconds`` more."""
    wall_s, accounts = usage["wall_s"] + seconds, usage["seconds"]
    devices_s = device_s(usage) * (wall_s / usage["wall_s"])  # the new wall_s if the usage lacks device_s
    accounts = {**accounts, "generate": accounts.get("generate", 0.0) + seconds}
    return {**usage, "wall_s": wall_s, "device_s": devices_s, "seconds": accounts}


def usage_of(report: Numbers) -> dict[str, Any]:
    """The usage that a report was made from, so that more can be added to it; the inverse of ``split``.

    Its ``tail_s`` is that of the finished run, so that the tails of shards add up.
    """
    workers = {f"{worker['name']}@{worker['place']}": _worker_usage(worker) for worker in report.get("workers", ())}
    accounts = {name: seconds for name, seconds in report["seconds"].items() if name not in _ENGINE_ACCOUNTS}
    return {
        "sessions": report["sessions"],
        "wall_s": report["wall_s"],
        "device_s": device_s(report),
        "seconds": {**accounts, "generate": report["generate_s"]},
        "engine": {**report["engine"], "series": report["series"]} | ({"workers": workers} if workers else {}),
        "max_rss_bytes": report["max_rss_bytes"],
        "tail_s": report["tail_s"] or 0.0,
        "empty_fields": report.get("empty_fields", {}),
    }


def device_s(usage: Numbers) -> float:
    """Seconds of all devices together: ``wall_s`` times their mean number. ``usage`` may be a report."""
    return float(max(usage.get("device_s", 0.0), usage.get("wall_s", 0.0)))


def cost_of(report: Numbers, price_per_hour: float) -> dict[str, float | None]:
    """Cost of a run's ``device_s``, in total and per million computed tokens: output tokens, or else prompt tokens."""
    side, name = ("completion", "output") if report["tokens"]["completion"] else ("prompt", "prompt")
    num_tokens = report["tokens"][side] - report["copied_tokens"][side] - report.get("reused", {}).get(side, 0)
    total = price_per_hour * device_s(report) / _SECONDS_PER_HOUR
    each = round(total / num_tokens * 1e6, 6) if num_tokens else None
    return {"total": round(total, 6), f"per_million_{name}_tokens": each}


def workers_section(engine: Numbers) -> list[dict[str, Any]]:
    """The report's ``workers``, from the counts of an engine; empty if it ran in the driver's process."""
    section = []
    for counts in engine.get("workers", {}).values():
        worker = dict(counts)
        present_s, busy_s = worker.pop("present_s"), worker.pop("busy_s")
        worker["busy_share"] = round(busy_s / present_s, 4) if present_s > 0 else 0.0
        worker["worker_hours"] = round(present_s / _SECONDS_PER_HOUR, 6)
        section.append(worker)
    return section


def _worker_usage(worker: Numbers) -> dict[str, Any]:
    """The inverse of ``workers_section`` for one worker."""
    counts = dict(worker)
    busy_share, present_s = counts.pop("busy_share"), counts.pop("worker_hours") * _SECONDS_PER_HOUR
    return {**counts, "present_s": present_s, "busy_s": busy_share * present_s}


def split(seconds: Numbers, engine: Numbers) -> dict[str, float]:
    """The clock's accounts with "generate" divided by the engine's own measurements; the sum stays the same.

    The time of a step with prompts and single tokens is divided between prefill and decode by their numbers of tokens.
    ``host`` is the rest of generating: scheduling, bookkeeping, handing rows in and out.
    """
    accounts = {name: float(value) for name, value in seconds.items() if name != "generate"}
    generate_s = float(seconds.get("generate", 0.0))
    phases = engine.get("phase_s", {})
    forward_s = min(phases.get("forward", 0.0), generate_s)
    prefill_s = min(engine.get("forward_prefill_s", 0.0), forward_s)
    mask_s = min(phases.get("mask", 0.0), generate_s - forward_s)
    sample_s = min(phases.get("sample", 0.0), generate_s - forward_s - mask_s)
    parts = (prefill_s, forward_s - prefill_s, mask_s, sample_s, generate_s - forward_s - mask_s - sample_s)
    return accounts | dict(zip(_ENGINE_ACCOUNTS, parts, strict=True))


def since(engine: Numbers, started_at: float) -> dict[str, Any]:
    """An engine's counts; the instants of its series become seconds since ``started_at``, on the same clock."""
    if "series" not in engine:
        return dict(engine)
    series = dict(engine["series"])
    at_s = [round(at - started_at, 3) for at in series.pop("at")]
    return {**engine, "series": {"at_s": at_s, **series}}


def tail_s(series: Numbers) -> float | None:
    """Seconds after the last time when at least half of the most sequences ran; None without a series."""
    sequences = series.get("sequences")
    if not sequences:
        return None
    full = max(sequences) / 2
    last = max(i for i, count in enumerate(sequences) if count >= full)
    return round(float(sum(series["span_s"][last + 1 :])), 3)


def thin(series: Numbers, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """A series of at most ``max_points``, neighbours merged two by two: sums stay, means are weighted by steps."""
    columns = dict(series)
    while len(columns.get("steps", ())) > max_points:
        columns = {name: _halved(name, column, columns["steps"]) for name, column in columns.items()}
    return columns


def _halved(name: str, column: Sequence[float], steps: Sequence[int]) -> list[float]:
    if name in ("at", "at_s"):
        return list(column[::2])
    pairs = [slice(i, i + 2) for i in range(0, len(column), 2)]
    if name not in _MEANS:
        return [round(sum(column[pair]), 6) for pair in pairs]
    weighted = [value * weight for value, weight in zip(column, steps, strict=True)]
    return [round(sum(weighted[pair]) / max(sum(steps[pair]), 1), 4) for pair in pairs]

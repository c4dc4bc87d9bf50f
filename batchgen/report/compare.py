"""Two reports side by side, and the gates that decide whether one is a regression; each applies only if it is given.

A comparison is plain data, which ``--json`` prints; figures without a gate are only shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from batchgen.core.errors import GateFailed, UsageError
from batchgen.core.units import format_duration, format_share, printable, shortened
from batchgen.report.facts import Report, Table, at, rate

_WIDTH = 80
_SHOWN_IDS = 20
_JOB = ("model", "adapter", "numerics", "threads", "input")  # what should be alike for figures to be comparable
_FIGURES = {  # by name: where the report has it, and how it is shown
    "output tokens/s": ("rate.completion", ",.1f"),
    "total tokens/s": ("rate.total", ",.1f"),
    "failed rows": ("failed_share", ".3%"),
    "exact match": ("accuracy.exact_match", ".2%"),
    "perplexity": ("perplexity.value", ",.4f"),
    "rows compared": ("accuracy.total", ",.0f"),
    "rows done": ("rows.done", ",.0f"),
    "tokens in": ("tokens.prompt", ",.0f"),
    "tokens out": ("tokens.completion", ",.0f"),
    "wall time": ("wall_s", ""),
}


class Gates(NamedTuple):
    """Limits of a change: ``speed`` may fall by this share, ``accuracy`` by these percentage points; None: no gate."""

    speed: float | None = None
    accuracy: float | None = None


NO_GATES = Gates()


def compare_reports(
    now: Report, before: Report, gates: Gates = NO_GATES, answers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The comparison of ``now`` with the baseline ``before``, judged by ``gates``.

    It has ``figures``, ``answers`` (see ``answer_changes``; None if the rows of a run are missing), ``differences``
    between values that should be equal, and ``unjudged``, the figures that a gate cannot judge, each with the reason.
    """
    unjudged, figures = dict(_unjudged(now, before, gates)), []
    for name, (path, _) in _FIGURES.items():
        was, is_now = _number(before, path), _number(now, path)
        if was is not None or is_now is not None:
            verdict = None if name in unjudged else _is_worse(name, was, is_now, gates)
            figures.append({"name": name, "before": was, "now": is_now, "is_regression": verdict})
    keys = [key for key in _JOB if key != "threads" or None not in (before.get(key), now.get(key))]
    differences = [text for key in keys for text in _differences(key, before.get(key), now.get(key))]
    return {"figures": figures, "answers": answers, "differences": differences, "unjudged": unjudged}


def _unjudged(now: Report, before: Report, gates: Gates) -> Iterator[tuple[str, str]]:
    """The figures that have a gate and cannot be judged, each with the reason."""
    if gates.speed is not None and not (_number(before, "rate.total") and _number(now, "rate.total")):
        for name in ("output tokens/s", "total tokens/s"):
            yield name, "--max-regress-speed has nothing to judge: both runs must have computed tokens"
    if gates.accuracy is not None:
        why = "both runs must compare rows with [eval] expected, and some must have been right before"
        if _number(before, "accuracy.exact_match") and _number(now, "accuracy.exact_match") is not None:
            digests = {before.get("compared"), now.get("compared")} - {None}
            is_same = len(digests) < 2 and at(before, "accuracy.total") == at(now, "accuracy.total")
            why = "" if is_same else "the runs compared other rows or other right answers: run both over the same"
        if why:
            yield "exact match", f"--max-regress-accuracy has nothing to judge: {why}"


def _is_worse(name: str, before: float | None, now: float | None, gates: Gates) -> bool | None:
    """Whether a figure is worse than its gate allows; None without a gate."""
    if before is None or now is None:
        return None
    if name.endswith("tokens/s") and gates.speed is not None:
        return now < before * (1 - gates.speed)
    if name == "exact match" and gates.accuracy is not None:
        return round(100 * (before - now), 6) > gates.accuracy
    return now > before if name == "failed rows" and gates != NO_GATES else None


def comparison_tables(comparison: Mapping[str, Any], title: str) -> tuple[Table, Table]:
    """The figures of a comparison, and lines on changed answers and on values that should be equal but differ."""
    figures = []
    for figure in comparison["figures"]:
        name, before, now = figure["name"], figure["before"], figure["now"]
        change = ""
        if before is not None and now is not None and _FIGURES[name][1].endswith("%"):
            change = f"{100 * (now - before):+.1f} pts"
        elif before and now is not None:
            change = format(now / before - 1, "+.2%" if name == "perplexity" else "+.1%")
        mark = "REGRESSION" if figure["is_regression"] else ""
        figures.append((name, _shown(name, before), _shown(name, now), change, mark))
    words = [*_answer_lines(comparison["answers"]), *(("not alike", text) for text in comparison["differences"])]
    head = ("", "before", "now", "change", "")
    return Table(title, head, figures), Table("Answers of both", (), words, is_prose=True)


def render_comparison(comparison: Mapping[str, Any]) -> str:
    """A comparison as a table of at most 80 columns."""
    figures, words = comparison_tables(comparison, "")
    lines = [
        f"{name:<18} {before:>14} {now:>14} {change:>9}  {mark}".rstrip()
        for name, before, now, change, mark in (figures.head, *figures.rows)
    ]
    lines += [f"{name:<18} {text}" for name, text in words.rows]
    return "\n".join(shortened(printable(line), _WIDTH) for line in lines)


def _shown(name: str, value: float | None) -> str:
    form = _FIGURES[name][1]
    return "-" if value is None else format(value, form) if form else format_duration(value)


def _answer_lines(answers: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if answers and answers["rows"]:
        share = format_share(answers["equal"] / answers["rows"], 1)
        yield "equal answers", f"{answers['equal']:,} of {answers['rows']:,} in both ({share})"
    if answers and answers["changed"]:
        ids = answers["changed"]
        more = ", …" if len(ids) < answers["rows"] - answers["equal"] else ""
        yield "changed", f"{', '.join(ids)}{more}"


def check_gates(comparison: Mapping[str, Any]) -> None:
    """Raises GateFailed naming every regression, else UsageError naming every gate that has nothing to judge."""
    worse = [figure for figure in comparison["figures"] if figure["is_regression"]]
    changes = [f"{f['name']} {_shown(f['name'], f['before'])} -> {_shown(f['name'], f['now'])}" for f in worse]
    reasons = [*dict.fromkeys(comparison["unjudged"].values())]
    if worse:
        raise GateFailed(f"regression: {'; '.join([*changes, *reasons])}")
    if reasons:
        raise UsageError("; ".join(reasons))


def answer_changes(now: Iterable[tuple[str, str]], before: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Rows of two runs, as ids and answers, matched by their ids: how many are in both, how many answers are equal.

    Rows without an answer ("") in both do not count. ``changed`` has the first ids of rows with different answers.
    Holds about 200 bytes for each row of ``before``.
    """
    answers = {_hashed(row_id): _hashed(answer) for row_id, answer in before}
    num_rows, num_equal, changed = 0, 0, list[str]()
    for row_id, answer in now:
        earlier = answers.get(_hashed(row_id))
        if earlier is None or (not answer and earlier == _hashed("")):
            continue
        num_rows += 1
        num_equal += earlier == _hashed(answer)
        if earlier != _hashed(answer) and len(changed) < _SHOWN_IDS:
            changed.append(row_id)
    return {"rows": num_rows, "equal": num_equal, "changed": changed}


def _hashed(text: str) -> bytes:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """A line for each different value; nested values are compared one by one."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name}, before {_value(before)}, now {_value(now)}"


def _value(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else "not set" if value is None else str(value)


def _number(report: Report, path: str) -> float | None:
    if path == "failed_share":
        rows = report["rows"]
        return rows["failed"] / rows["total"] if rows["total"] else None
    side = path.removeprefix("rate.")
    value = at(report, path) if side == path else rate(report, side)
    return value if isinstance(value, int | float) else None

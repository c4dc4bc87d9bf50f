"""Two reports side by side, and the gates that decide whether one is a regression; each applies only if it is given.

A comparison is plain data, which ``--json`` prints; figures without a gate are only shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from batchgen.core.errors import GateFailed, UsageError
from batchgen.core.json_line import encode_json
from batchgen.core.units import counted, format_duration, format_share, printable, shortened
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
    """Limits of a change: ``speed`` may fall by a share, ``accuracy`` by percentage points; None: no gate."""

    speed: float | None = None
    accuracy: float | None = None


NO_GATES = Gates()


def compare_reports(
    now: Report, before: Report, gates: Gates = NO_GATES, answers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The comparison of ``now`` with the baseline ``before``, judged by ``gates``."""
    figures, other_rows = [], _other_rows(before, now)
    for name, (path, _) in _FIGURES.items():
        values = _number(before, path), _number(now, path)
        if values != (None, None):
            verdict = None if name == "exact match" and other_rows else _is_regression(name, *values, gates)
            figures.append({"name": name, "before": values[0], "now": values[1], "is_regression": verdict})
    differences = [text for key in _JOB for text in _differences(key, before.get(key), now.get(key))]
    limits = {f"max_regress_{name}": limit for name, limit in gates._asdict().items()}
    return {"figures": figures, "answers": answers, "differences": differences, "other_rows": other_rows, **limits}


def _is_regression(name: str, before: float | None, now: float | None, gates: Gates) -> bool | None:
    """Whether a figure is worse than its gate allows; None without a gate."""
    if before is None or now is None:
        return None
    if name.endswith("tokens/s") and gates.speed is not None:
        return now < before * (1 - gates.speed)
    if name == "exact match" and gates.accuracy is not None:
        return round(100 * (before - now), 6) > gates.accuracy
    return now > before if name == "failed rows" and gates != NO_GATES else None


def comparison_tables(comparison: Mapping[str, Any], title: str) -> tuple[Table, Table]:
    """The figures of a comparison, and lines on changed answers and on differences that should not be."""
    verdicts = {True: "REGRESSION", False: "passes", None: ""}
    figures = []
    for figure in comparison["figures"]:
        name, before, now = figure["name"], figure["before"], figure["now"]
        change = ""
        if before is not None and now is not None and _FIGURES[name][1].endswith("%"):
            change = f"{100 * (now - before):+.1f} pts"
        elif before and now is not None:
            change = format(now / before - 1, "+.2%" if name == "perplexity" else "+.1%")
        figures.append((name, _shown(name, before), _shown(name, now), change, verdicts[figure["is_regression"]]))
    words = [*_answer_lines(comparison["answers"]), *(("not alike", text) for text in comparison["differences"])]
    has_gates = any(verdict for *_, verdict in figures)
    head = ("", "before", "now", "change", *(["gate"] if has_gates else []))
    return Table(title, head, figures if has_gates else [row[:-1] for row in figures]), Table(
        "Answers of both", (), words, is_prose=True
    )


def render_comparison(comparison: Mapping[str, Any]) -> str:
    """A comparison as a table of at most 80 columns."""
    figures, words = comparison_tables(comparison, "")
    lines = [f"{'':<18} {'before':>14} {'now':>14} {'change':>9}"]
    for name, before, now, change, *verdict in figures.rows:
        lines.append(f"{name:<18} {before:>14} {now:>14} {change:>9}  {''.join(verdict)}".rstrip())
    lines += [f"{name:<18} {text}" for name, text in words.rows]
    return "\n".join(shortened(printable(line), _WIDTH) for line in lines)


def _shown(name: str, value: float | None) -> str:
    form = _FIGURES[name][1]
    return "-" if value is None else format(value, form) if form else format_duration(value)


def _answer_lines(answers: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if answers is None:
        return
    apart = (f", {answers[f'only_{when}']:,} only {when}" for when in ("before", "now") if answers[f"only_{when}"])
    yield "rows in both", f"{answers['rows']:,}{''.join(apart)}"
    if answers["rows"] > answers["empty"]:
        equal = answers["rows"] - answers["changed"]["rows"]
        yield "equal answers", f"{equal:,} ({format_share(equal / answers['rows'], 1)})"
    for kind in ("changed", "newly_right", "newly_wrong"):
        rows, ids = answers[kind]["rows"], answers[kind]["ids"]
        if rows:
            yield kind.replace("_", " "), f"{rows:,}: {', '.join(map(str, ids))}{', …' if rows > len(ids) else ''}"


def check_gates(comparison: Mapping[str, Any]) -> None:
    """Raises GateFailed naming every regression, and UsageError if a gate has nothing to judge."""
    values = {figure["name"]: (figure["before"], figure["now"]) for figure in comparison["figures"]}
    worse = [figure["name"] for figure in comparison["figures"] if figure["is_regression"]]
    before, now = values.get("total tokens/s", (None, None))
    if comparison["max_regress_speed"] is not None and not (before and now):
        which = "this run has no rate of tokens" if before else "the run compared with computed no tokens"
        raise UsageError(f"--max-regress-speed has nothing to judge: {which}")
    if comparison["max_regress_accuracy"] is not None:
        if reason := _no_accuracy(*values.get("exact match", (None, None))):
            raise UsageError(f"--max-regress-accuracy has nothing to judge: {reason}")
        if (reason := comparison["other_rows"]) and "failed rows" not in worse:
            raise UsageError(f"--max-regress-accuracy has nothing to judge: {reason}; run both over the same rows")
    if worse:
        listed = "; ".join(f"{name} {' -> '.join(_shown(name, value) for value in values[name])}" for name in worse)
        raise GateFailed(f"regression: {listed}")


def _no_accuracy(before: float | None, now: float | None) -> str:
    """The reason why two shares of right answers cannot be judged; "" if they can."""
    if before is None or now is None:
        which = "the run compared with" if before is None else "this run"
        return f"{which} compared no row; name the column of right answers as [eval] expected"
    return "" if before else "no text of the run compared with equals [eval] expected; its own report says more"


Answers = Iterator[tuple[str, str, bool | None]]  # id, the answer or "", whether it is right (None: not known)


def answer_changes(now: Answers, before: Answers) -> dict[str, Any]:
    """Rows of two runs, matched by their ids: how many are in both, and which answers changed or are newly right.

    ``empty`` counts the rows without an answer in either run, as of a job that scores prompts. Holds about 200 bytes
    for each row of ``before``, and the first ids of each kind.
    """
    answers = {_hashed(row_id): (_hashed(answer), is_right) for row_id, answer, is_right in before}
    changes: dict[str, Any] = {"rows": 0, "empty": 0, "only_before": len(answers), "only_now": 0}
    changes |= {kind: {"rows": 0, "ids": []} for kind in ("changed", "newly_right", "newly_wrong")}
    for row_id, answer, is_right in now:
        if (earlier := answers.get(_hashed(row_id))) is None:
            changes["only_now"] += 1
            continue
        changes["rows"] += 1
        changes["only_before"] -= 1
        changes["empty"] += not answer and earlier[0] == _hashed("")
        kinds = ["changed"] if earlier[0] != _hashed(answer) else []
        if None not in (is_right, earlier[1]) and is_right != earlier[1]:
            kinds.append("newly_right" if is_right else "newly_wrong")
        for kind in kinds:
            changes[kind]["rows"] += 1
            changes[kind]["ids"] += [row_id] if len(changes[kind]["ids"]) < _SHOWN_IDS else []
    return changes


def _hashed(text: str) -> bytes:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()


def _other_rows(before: Report, now: Report) -> str:
    """The difference between the rows whose answers two runs compared; "" if they are the same, or missing."""
    was, is_now = _number(before, "accuracy.total"), _number(now, "accuracy.total")
    if not was or not is_now:
        return ""
    if was != is_now:
        return f"this run compared {counted(int(is_now), 'row')} with their right answers, the other one {int(was):,}"
    digests = before.get("compared"), now.get("compared")
    other = None not in digests and digests[0] != digests[1]
    return "the rows compared have other ids or other right answers" if other else ""


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """A line for each different value; nested values are compared one by one."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name}, before {_value(before)}, now {_value(now)}"


def _value(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else encode_json(value).decode()


def _number(report: Report, path: str) -> float | None:
    if path == "failed_share":
        rows = report["rows"]
        return rows["failed"] / rows["total"] if rows["total"] else None
    kind = path.removeprefix("rate.")
    value = at(report, path) if kind == path else rate(report, kind)
    return value if isinstance(value, int | float) else None

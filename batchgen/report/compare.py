"""Two reports side by side, and the gates by which one is a regression of the other.

Each gate is silent unless it is asked for: tokens per second of generating may fall by a share of what they were, exact
match over the same rows by percentage points; with either, the share of failed rows may not rise. All else is shown and
does not count: latencies and seconds depend on the load of the machine, and change with settings that make it faster.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from batchgen.core.errors import GateFailed, UsageError
from batchgen.core.units import counted, format_duration, printable, shortened
from batchgen.report.advice import BARE_ANSWERS
from batchgen.report.facts import Report, at, rate

_WIDTH = 80
_SHOWN_IDS = 20
_JOB = ("model", "adapter", "numerics", "threads", "input")  # what should be alike for figures to be comparable
_FIGURES = (  # name, where the report has it, the gate that it counts for, how it is shown
    ("output tokens/s", "rate.completion", "speed", ",.1f"),
    ("total tokens/s", "rate.total", "speed", ",.1f"),
    ("failed rows", "failed_share", "any", ".3%"),
    ("exact match", "accuracy.exact_match", "accuracy", ".2%"),
    ("rows compared", "accuracy.total", "", ",.0f"),
    ("not complete", "structured.incomplete", "", ",.0f"),
    ("tokens forced", "structured.forced_share", "", ".1%"),
    ("rows done", "rows.done", "", ",.0f"),
    ("tokens in", "tokens.prompt", "", ",.0f"),
    ("tokens out", "tokens.completion", "", ",.0f"),
    ("wall time", "wall_s", "", "duration"),
    ("TTFT p50, s", "latency_s.ttft_s.p50", "", ",.3f"),
    ("TPOT p50, s", "latency_s.tpot_s.p50", "", ",.4f"),
    ("preemptions", "preemptions", "", ",.0f"),
    ("most memory, MiB", "max_rss_bytes", "", "MiB"),
)


class Gates(NamedTuple):
    """What was asked for: ``speed`` may fall by that share of one, ``accuracy`` by that many points; None: no gate."""

    speed: float | None = None
    accuracy: float | None = None

    def __str__(self) -> str:
        asked = [f"tokens/s may fall by {100 * self.speed:g}%"] if self.speed is not None else []
        return ", ".join([*asked, f"exact match by {self.accuracy:g} points"] if self.accuracy is not None else asked)

    def is_regression(self, gate: str, before: float | None, now: float | None) -> bool | None:
        """Whether a figure that counts for a gate is worse than it allows; None where it was not asked for."""
        if before is None or now is None:
            return None
        if gate == "speed" and self.speed is not None:
            return now < before * (1 - self.speed)
        if gate == "accuracy" and self.accuracy is not None:
            return round(100 * (before - now), 6) > self.accuracy
        return now > before if gate == "any" and self != _NO_GATES else None


_NO_GATES = Gates()


class Figure(NamedTuple):
    """One number of two reports, None where a report has none; ``is_regression`` is None where no gate asks."""

    name: str
    before: float | None
    now: float | None
    is_regression: bool | None
    form: str

    @property
    def change(self) -> float | None:
        """The change as a share of what it was; None where that has no meaning."""
        return None if self.now is None or not self.before else self.now / self.before - 1

    def show_change(self) -> str:
        """The change in words; that of a share in percentage points, as gates count it."""
        if self.form.endswith("%") and self.before is not None and self.now is not None:
            return f"{100 * (self.now - self.before):+.1f} pts"
        return "" if self.change is None else f"{self.change:+.1%}"

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        if self.form == "MiB":
            return f"{value / 2**20:,.0f}"
        return format_duration(value) if self.form == "duration" else format(value, self.form)


class Comparison(NamedTuple):
    """The figures of a report beside those of a baseline, and what should have been alike and is not.

    ``other_rows`` says how the rows that accuracy was counted over differ; "" where they are the same. ``answers`` are
    those that changed, see ``answer_changes``; None where the rows of a run are not there.
    """

    gates: Gates
    figures: list[Figure]
    differences: list[str]
    other_rows: str = ""
    answers: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        figures = [
            {"name": f.name, "before": f.before, "now": f.now, "change": f.change, "is_regression": f.is_regression}
            for f in self.figures
        ]
        asked = {f"max_regress_{name}": limit for name, limit in self.gates._asdict().items()}
        return {"figures": figures, "answers": self.answers, "differences": self.differences, **asked}

    def render(self) -> str:
        """A table of at most 80 columns."""
        lines = [f"{'':<18} {'before':>14} {'now':>14} {'change':>9}"]
        verdicts = {True: "  REGRESSION", False: "  passes", None: ""}
        for f in self.figures:
            values = f"{f.show(f.before):>14} {f.show(f.now):>14} {f.show_change():>9}"
            line = f"{f.name:<18} {values}{verdicts[f.is_regression]}"
            lines.append(line.rstrip())
        lines += [shortened(printable(f"{name:<18} {text}"), _WIDTH) for name, text in self._answer_lines()]
        return "\n".join([*lines, *(shortened(printable(text), _WIDTH) for text in self.differences)])

    def _answer_lines(self) -> Iterator[tuple[str, str]]:
        if (found := self.answers) is None:
            return
        apart = (f", {found[f'only_{when}']:,} only {when}" for when in ("before", "now") if found[f"only_{when}"])
        yield "rows in both", f"{found['rows']:,}{''.join(apart)}"
        if found["rows"]:
            equal = found["rows"] - found["changed"]["rows"]
            yield "equal answers", f"{equal:,} ({equal / found['rows']:.1%})"
        for name in ("changed", "newly_right", "newly_wrong"):
            rows, ids = found[name]["rows"], found[name]["ids"]
            if rows:
                yield name.replace("_", " "), f"{rows:,}: {', '.join(map(str, ids))}{', …' if rows > len(ids) else ''}"

    def check(self) -> None:
        """Raises GateFailed naming every regression, and UsageError where there is nothing that a gate could judge."""
        found = {f.name: (f.before, f.now) for f in self.figures}
        before, now = found.get("total tokens/s", (None, None))
        if self.gates.speed is not None and not (before and now):
            which = "this run has no rate of tokens" if before else "the run compared with computed no tokens"
            raise UsageError(f"--max-regress-speed has nothing to judge: {which}")
        if self.gates.accuracy is not None:
            before, now = found.get("exact match", (None, None))
            nothing = "--max-regress-accuracy has nothing to judge:"
            if before is None or now is None:
                which = "the run compared with" if before is None else "this run"
                raise UsageError(
                    f"{nothing} {which} compared no row; name the column of right answers as [output] expected"
                )
            if not before:
                why = "no text of the run compared with equals [output] expected, so none could be lost"
                raise UsageError(f"{nothing} {why}; {BARE_ANSWERS}")
            if self.other_rows and not any(f.name == "failed rows" and f.is_regression for f in self.figures):
                raise UsageError(f"{nothing} {self.other_rows}; run both over the same rows")
        if worse := [f for f in self.figures if f.is_regression]:
            listed = "; ".join(f"{f.name} {f.show(f.before)} -> {f.show(f.now)}" for f in worse)
            raise GateFailed(f"regression ({self.gates}): {listed}")


Answers = Iterator[tuple[str, str, bool | None]]  # id, a digest of the answer, whether it is right (None: not known)


def answer_changes(now: Answers, before: Answers) -> dict[str, Any]:
    """Rows of two runs, matched by their ids: how many are in both, and which answers changed or are newly right.

    Holds a few dozen bytes for each row of ``before``, and the first ids of each kind.
    """
    ids, digests, verdicts = array("Q"), array("Q"), bytearray()
    for row_id, digest, is_right in before:
        ids.append(_hashed(row_id))
        digests.append(_hashed(digest))
        verdicts.append(2 if is_right is None else is_right)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    ordered = array("Q", (ids[place] for place in order))
    found: dict[str, Any] = {"rows": 0, "only_before": len(ids), "only_now": 0}
    found |= {name: {"rows": 0, "ids": []} for name in ("changed", "newly_right", "newly_wrong")}
    for row_id, digest, is_right in now:
        known = bisect_left(ordered, key := _hashed(row_id))
        if known == len(ordered) or ordered[known] != key:
            found["only_now"] += 1
            continue
        place = order[known]
        found["rows"] += 1
        found["only_before"] -= 1
        kinds = ["changed"] if digests[place] != _hashed(digest) else []
        if is_right is not None and verdicts[place] == 1 - is_right:
            kinds.append("newly_right" if is_right else "newly_wrong")
        for kind in kinds:
            found[kind]["rows"] += 1
            found[kind]["ids"] += [row_id] if len(found[kind]["ids"]) < _SHOWN_IDS else []
    return found


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest())


def compare_reports(
    now: Report, before: Report, gates: Gates = _NO_GATES, answers: Mapping[str, Any] | None = None
) -> Comparison:
    """``now`` beside the baseline ``before``, judged by ``gates``, with what ``answer_changes`` found."""
    figures, others = [], _other_rows(before, now)
    for name, path, gate, form in _FIGURES:
        was, is_now = _number(before, path), _number(now, path)
        if was is not None or is_now is not None:
            verdict = None if gate == "accuracy" and others else gates.is_regression(gate, was, is_now)
            figures.append(Figure(name, was, is_now, verdict, form))
    differences = [text for key in _JOB for text in _differences(key, before.get(key), now.get(key))]
    return Comparison(gates, figures, differences, others, answers)


def _other_rows(before: Report, now: Report) -> str:
    """How the rows whose answers were compared differ, in words; "" where they do not, or where there are none."""
    was, is_now = _number(before, "accuracy.total"), _number(now, "accuracy.total")
    if not was or not is_now:
        return ""
    if was != is_now:
        return f"this run compared {counted(int(is_now), 'row')} with their right answers, the other one {int(was):,}"
    known = before.get("compared"), now.get("compared")
    return "the rows compared have other ids or other right answers" if None not in known and len({*known}) > 1 else ""


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """A line for each value that is not alike, of tables for each of theirs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"not alike: {name}, before {before}, now {now}"


def _number(report: Report, path: str) -> float | None:
    if path == "failed_share":
        rows = report["rows"]
        return rows["failed"] / rows["total"] if rows["total"] else None
    kind = path.removeprefix("rate.")
    value = at(report, path) if kind == path else rate(report, kind)
    return value if isinstance(value, int | float) else None

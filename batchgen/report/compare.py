"""Two reports side by side, and the rule by which one is a regression of the other.

Tokens per second and exact match may fall by a given share of what they were; the share of failed rows may not rise.
All else is shown and does not count: latencies and seconds depend on the load of the machine, and change with settings
that make a job faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen.core.errors import GateFailed
from batchgen.core.units import format_duration, printable, shortened
from batchgen.report.facts import Report, at

_WIDTH = 80
_JOB = ("model", "adapter", "numerics", "threads", "input")  # what should be alike for figures to be comparable
_MAY_FALL, _MAY_NOT_RISE, _SHOWN = "may fall by the share given", "may not rise", "does not count"
_FIGURES = (
    ("output tokens/s", "tokens_per_s.completion", _MAY_FALL, ",.1f"),
    ("total tokens/s", "tokens_per_s.total", _MAY_FALL, ",.1f"),
    ("failed rows", "failed_share", _MAY_NOT_RISE, ".3%"),
    ("exact match", "accuracy.exact_match", _MAY_FALL, ".2%"),
    ("not complete", "structured.incomplete", _SHOWN, ",.0f"),
    ("tokens forced", "structured.forced_share", _SHOWN, ".1%"),
    ("rows done", "rows.done", _SHOWN, ",.0f"),
    ("tokens in", "tokens.prompt", _SHOWN, ",.0f"),
    ("tokens out", "tokens.completion", _SHOWN, ",.0f"),
    ("wall time", "wall_s", _SHOWN, "duration"),
    ("TTFT p50, s", "latency_s.ttft_s.p50", _SHOWN, ",.3f"),
    ("TPOT p50, s", "latency_s.tpot_s.p50", _SHOWN, ",.4f"),
    ("preemptions", "preemptions", _SHOWN, ",.0f"),
    ("roofline share", "roofline.share", _SHOWN, ".1%"),
    ("most memory, MB", "max_rss_bytes", _SHOWN, "megabytes"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of two reports; None where a report has none."""

    name: str
    before: float | None
    now: float | None
    rule: str
    form: str

    @property
    def change(self) -> float | None:
        """The change as a share of what it was; None where that has no meaning."""
        return None if self.now is None or not self.before else self.now / self.before - 1

    def is_regression(self, max_regress: float | None) -> bool:
        """Whether the rule is broken; ``max_regress`` is a share of one, None for no rule at all."""
        if self.before is None or self.now is None or max_regress is None:
            return False
        least = self.before * (1 - max_regress)
        return (self.rule == _MAY_FALL and self.now < least) or (self.rule == _MAY_NOT_RISE and self.now > self.before)

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        if self.form == "megabytes":
            return f"{value / 1e6:,.0f}"
        return format_duration(value) if self.form == "duration" else format(value, self.form)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of a report beside those of a baseline, and what should have been alike and is not."""

    figures: list[Figure]
    differences: list[str]

    def to_dict(self, max_regress: float | None) -> dict[str, Any]:
        """Plain data for ``--json``."""
        figures = [
            {"name": f.name, "before": f.before, "now": f.now, "change": f.change, "rule": f.rule}
            | {"is_regression": f.is_regression(max_regress)}
            for f in self.figures
        ]
        return {"figures": figures, "differences": self.differences, "max_regress": max_regress}

    def check(self, max_regress: float) -> None:
        """Raises GateFailed naming every regression."""
        worse = [f for f in self.figures if f.is_regression(max_regress)]
        if worse:
            listed = "; ".join(f"{f.name} {f.show(f.before)} -> {f.show(f.now)}" for f in worse)
            raise GateFailed(f"regression (tokens/s and exact match may fall by {100 * max_regress:g}%): {listed}")

    def render(self, max_regress: float | None) -> str:
        """A table of at most 80 columns."""
        lines = [f"{'':<18} {'before':>14} {'now':>14} {'change':>9}"]
        for f in self.figures:
            change = "" if f.change is None else f"{f.change:+.1%}"
            verdict = "REGRESSION" if f.is_regression(max_regress) else "passes"
            verdict = "" if max_regress is None or f.rule == _SHOWN else f"  {verdict}"
            lines.append(f"{f.name:<18} {f.show(f.before):>14} {f.show(f.now):>14} {change:>9}{verdict}".rstrip())
        lines += [shortened(printable(text), _WIDTH) for text in self.differences]
        return "\n".join(lines)


def compare_reports(now: Report, before: Report) -> Comparison:
    """``now`` beside the baseline ``before``."""
    figures = [
        Figure(name, _number(before, path), _number(now, path), rule, form) for name, path, rule, form in _FIGURES
    ]
    differences = [
        f"not alike: {key}, before {before.get(key)}, now {now.get(key)}"
        for key in _JOB
        if before.get(key) != now.get(key)
    ]
    return Comparison([f for f in figures if f.before is not None or f.now is not None], differences)


def _number(report: Report, path: str) -> float | None:
    if path == "failed_share":
        rows = report["rows"]
        return rows["failed"] / rows["total"] if rows["total"] else None
    value = at(report, path)
    return value if isinstance(value, int | float) else None

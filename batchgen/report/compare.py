"""Two reports side by side, and the rule by which one is a regression of the other.

Tokens per second and exact match may fall by a given share of what they were; the share of failed rows may not rise.
Everything else is shown and does not count: latencies and seconds depend on what else the machine was doing, and
shift with settings that make a job faster. It reads reports and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from batchgen.core.errors import GateFailed
from batchgen.core.units import format_duration, printable, shortened

Report = Mapping[str, Any]
_WIDTH = 80
_ABOUT = ("model", "numerics", "threads", "input")  # what should be alike for figures to be comparable


class Rule(StrEnum):
    """When a figure's change is a regression."""

    MAY_FALL = "may fall by the share given"
    MAY_NOT_RISE = "may not rise"
    SHOWN = "does not count"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of two reports; None where a report has none."""

    name: str
    before: float | None
    now: float | None
    rule: Rule
    form: str

    @property
    def change(self) -> float | None:
        """The change as a share of what it was; None where that has no meaning."""
        if self.before is None or self.now is None or not self.before:
            return None
        return self.now / self.before - 1

    def is_regression(self, max_regress: float) -> bool:
        """Whether the rule is broken; ``max_regress`` is a share of one."""
        if self.before is None or self.now is None:
            return False
        if self.rule is Rule.MAY_FALL:
            return self.now < self.before * (1 - max_regress)
        return self.rule is Rule.MAY_NOT_RISE and self.now > self.before

    def show(self, value: float | None) -> str:
        """A value as text."""
        if value is None:
            return "-"
        if self.form == "megabytes":
            return f"{value / 1e6:,.0f}"
        return format_duration(value) if self.form == "duration" else format(value, self.form)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of a report beside those of a baseline, and what should have been alike and is not."""

    figures: tuple[Figure, ...]
    differences: tuple[str, ...]

    def to_dict(self, max_regress: float | None) -> dict[str, Any]:
        """Plain data for ``--json``."""
        figures = [
            {"name": f.name, "before": f.before, "now": f.now, "change": f.change, "rule": str(f.rule)}
            | {"is_regression": max_regress is not None and f.is_regression(max_regress)}
            for f in self.figures
        ]
        return {"figures": figures, "differences": list(self.differences), "max_regress": max_regress}

    def check(self, max_regress: float) -> None:
        """Raises GateFailed naming every regression."""
        worse = [
            f"{f.name} {f.show(f.before)} -> {f.show(f.now)}" for f in self.figures if f.is_regression(max_regress)
        ]
        if worse:
            raise GateFailed(
                f"regression (tokens/s and exact match may fall by {100 * max_regress:g}%): {'; '.join(worse)}"
            )

    def render(self, max_regress: float | None) -> str:
        """A table of at most 80 columns."""
        lines = [f"{'':<18} {'before':>14} {'now':>14} {'change':>9}"]
        for f in self.figures:
            change = "" if f.change is None else f"{f.change:+.1%}"
            line = f"{f.name:<18} {f.show(f.before):>14} {f.show(f.now):>14} {change:>9}"
            if max_regress is not None and f.rule is not Rule.SHOWN:
                line += "  REGRESSION" if f.is_regression(max_regress) else "  passes"
            lines.append(line.rstrip())
        lines += [shortened(printable(text), _WIDTH) for text in self.differences]
        return "\n".join(lines)


def compare_reports(now: Report, before: Report) -> Comparison:
    """``now`` beside the baseline ``before``."""
    figures = (
        _figure("output tokens/s", now, before, ("tokens_per_s", "completion"), Rule.MAY_FALL, ",.1f"),
        _figure("total tokens/s", now, before, ("tokens_per_s", "total"), Rule.MAY_FALL, ",.1f"),
        Figure("failed rows", _failed_share(before), _failed_share(now), Rule.MAY_NOT_RISE, ".3%"),
        _figure("exact match", now, before, ("accuracy", "exact_match"), Rule.MAY_FALL, ".2%"),
        _figure("rows done", now, before, ("rows", "done"), Rule.SHOWN, ",.0f"),
        _figure("tokens in", now, before, ("tokens", "prompt"), Rule.SHOWN, ",.0f"),
        _figure("tokens out", now, before, ("tokens", "completion"), Rule.SHOWN, ",.0f"),
        _figure("wall time", now, before, ("wall_s",), Rule.SHOWN, "duration"),
        _figure("TTFT p50, s", now, before, ("latency_s", "ttft_s", "p50"), Rule.SHOWN, ",.3f"),
        _figure("TPOT p50, s", now, before, ("latency_s", "tpot_s", "p50"), Rule.SHOWN, ",.4f"),
        _figure("preemptions", now, before, ("preemptions",), Rule.SHOWN, ",.0f"),
        _figure("roofline share", now, before, ("roofline", "share"), Rule.SHOWN, ".1%"),
        _figure("most memory, MB", now, before, ("max_rss_bytes",), Rule.SHOWN, "megabytes"),
    )
    known = tuple(f for f in figures if f.before is not None or f.now is not None)
    differences = tuple(
        f"not alike: {key}, before {before.get(key)}, now {now.get(key)}"
        for key in _ABOUT
        if before.get(key) != now.get(key)
    )
    return Comparison(known, differences)


def _figure(name: str, now: Report, before: Report, path: tuple[str, ...], rule: Rule, form: str) -> Figure:
    return Figure(name, _at(before, path), _at(now, path), rule, form)


def _at(report: Report, path: tuple[str, ...]) -> float | None:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


def _failed_share(report: Report) -> float | None:
    rows = report["rows"]
    return rows["failed"] / rows["total"] if rows["total"] else None

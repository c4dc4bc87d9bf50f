"""The report as text for a person, at most 80 columns wide: how long, how fast, what failed, what to change."""

from __future__ import annotations

from batchgen.core.units import labelled
from batchgen.report.facts import Report, details, joined, latencies, outcome


def render_report(report: Report) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    advice = [("" if number else "advice", text) for number, text in enumerate(report["advice"])]
    facts = [(label, text) for label, text in details(report).rows]
    lines = [*labelled([*joined(outcome(report)).items(), *advice, *facts])]
    table = latencies(report)
    if table.rows:
        rows = (("seconds", *table.head[1:]), *table.rows)
        lines += ["", *(f"{name:<12} " + " ".join(f"{cell:>9}" for cell in cells) for name, *cells in rows)]
    return "\n".join(lines)

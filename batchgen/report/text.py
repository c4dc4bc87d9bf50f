"""The report as text for a person, at most 80 columns wide: how long, how fast, what failed, what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from batchgen.core.units import printable
from batchgen.report.facts import Report, joined, latencies, outcome, resources, work

_WIDTH = 80
_LABEL = 12


def render_report(report: Report) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    advice = [("" if number else "advice", text) for number, text in enumerate(report["advice"])]
    details = joined([*work(report), *resources(report)])
    facts = [*joined(outcome(report)).items(), *advice, *details.items()]
    lines = [line for label, text in facts for line in _wrapped(label, text)]
    table = latencies(report)
    if table.rows:
        lines.append("")
        for name, *cells in (("seconds", *table.head[1:]), *table.rows):
            lines.append(f"{name:<{_LABEL}} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(map(printable, lines))


def _wrapped(label: str, text: str) -> Iterator[str]:
    for part in textwrap.wrap(text, _WIDTH - _LABEL - 1):
        yield f"{label:<{_LABEL}} {part}"
        label = ""

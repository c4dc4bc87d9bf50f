"""The report as text for a person, at most 80 columns wide: how long, how fast, what failed, what to change."""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.core.units import labelled, printable
from batchgen.report.facts import Report, Table, details, joined, outcome
from batchgen.report.tables import confusions, labels, latencies, mistakes

_WIDTH = 80


def render_report(report: Report) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    advice = [("" if number else "advice", text) for number, text in enumerate(report["advice"])]
    facts = [(label, text) for label, text in details(report).rows]
    lines = [*labelled([*joined(outcome(report)).items(), *advice, *facts])]
    matrix = confusions(report)
    narrow = next((table for table in (matrix, _numbered(matrix)) if table.rows and _width(table) <= _WIDTH), None)
    for table in (labels(report), narrow or mistakes(report)):
        if table.rows:
            lines += ["", printable(table.title), *_grid(table)]
    table = latencies(report)
    if table.rows:
        rows = (("seconds", *table.head[1:]), *table.rows)
        lines += ["", *(f"{name:<12} " + " ".join(f"{cell:>9}" for cell in cells) for name, *cells in rows)]
    return "\n".join(lines)


def _numbered(table: Table) -> Table:
    """A square table whose columns are named by the numbers of the rows."""
    head = ("", *(str(number) for number, _ in enumerate(table.rows, 1)))
    rows = [(f"{number} {name}", *cells) for number, (name, *cells) in enumerate(table.rows, 1)]
    return table._replace(head=head, rows=rows)


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]


def _width(table: Table) -> int:
    return sum(_widths(table)) + 2 * len(table.head) - 2


def _grid(table: Table) -> Iterator[str]:
    """Lines in columns: the first column aligned left, the others right."""
    first, *others = _widths(table)
    for name, *cells in (table.head, *table.rows):
        aligned = (f"{printable(cell):>{width}}" for cell, width in zip(cells, others, strict=True))
        yield "  ".join([f"{printable(name):<{first}}", *aligned]).rstrip()

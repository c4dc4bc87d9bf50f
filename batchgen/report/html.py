"""The report as one self-contained HTML file: no script, no font, no request, light and dark, any width.

The page's content security policy forbids all loading, and every text is escaped, since ids and paths are untrusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from batchgen.core.storage import check_replaceable, write_atomic
from batchgen.report.facts import Report, Table, tiles
from batchgen.report.plots import draw, has_matplotlib
from batchgen.report.tables import tables

_NO_CHARTS = "the page has no charts: they need matplotlib (pip install matplotlib)"
_BAD = ("rows failed", "not complete")  # figures that are bad where they are not 0


def write_html(report: Report, path: Path, folder: str, rows: Sequence[Table]) -> str:
    """Write the page of the run in ``folder``, with tables of its ``rows``. Returns what is missing in it, or "".

    Raises UsageError if ``path`` is a file of another kind, StorageError if it cannot be written.
    """
    check_replaceable(path, b"<title>batchgen report:", "a report page")
    write_atomic(
        path, render_html(report, folder, rows).encode(), "give the command again, or write the page elsewhere"
    )
    return "" if has_matplotlib() else _NO_CHARTS


def render_html(report: Report, folder: str, rows: Sequence[Table]) -> str:
    """The page as text; ``report`` is the content of ``report.json``. Without matplotlib the charts are left out."""
    source = files("batchgen.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    finished_at = datetime.fromisoformat(report["finished_at"]).astimezone(UTC)
    pictures = [(title, Markup(svg), is_folded) for title, svg, is_folded in draw(report)]
    return environment.from_string(source).render(
        name=Path(folder).name,
        model=report["model"],
        subtitle=f"{folder} · {', '.join(report['input'])} · finished {finished_at:%Y-%m-%d %H:%M} UTC",
        tiles=[(label, text, label in _BAD and text != "0") for label, text in tiles(report)],
        note="" if has_matplotlib() else _NO_CHARTS,
        bound_by=report["bound_by"],
        advice=report["advice"],
        pictures=[(title, svg) for title, svg, is_folded in pictures if not is_folded],
        folded_pictures=[(title, svg) for title, svg, is_folded in pictures if is_folded],
        tables=[table for table in (*rows, *tables(report)) if table.rows],
    )

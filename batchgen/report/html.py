"""The report as one self-contained HTML file: no script, no font, no request, light and dark, any width.

The page's content security policy forbids all loading, and every text is escaped, since ids and paths are untrusted.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from batchgen.core.storage import check_replaceable, write_atomic
from batchgen.report.facts import Report, Table, figures
from batchgen.report.plots import draw
from batchgen.report.tables import tables

_BAD = ("rows failed", "not complete")  # figures that are bad where they are not 0


def write_html(report: Report, path: Path, folder: str, answers: Table | None) -> None:
    """Write the page of the run in ``folder``, with a few of its ``answers``.

    Raises UsageError without matplotlib or where ``path`` is a file of another kind, StorageError where it cannot be
    written.
    """
    check_replaceable(path, b"<title>batchgen report:", "a report page")
    write_atomic(path, render_html(report, folder, answers).encode())


def render_html(report: Report, folder: str, answers: Table | None) -> str:
    """The page as text; ``report`` is the content of ``report.json``. Raises UsageError without matplotlib."""
    source = files("batchgen.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    finished_at = datetime.fromisoformat(report["finished_at"]).astimezone(UTC)
    return environment.from_string(source).render(
        model=report["model"],
        subtitle=f"{folder} · {', '.join(report['input'])} · finished {finished_at:%Y-%m-%d %H:%M} UTC",
        tiles=[(label, text, label in _BAD and text != "0") for label, text in figures(report)],
        bound_by=report["bound_by"],
        advice=report["advice"],
        pictures=[(title, Markup(svg)) for title, svg in draw(report).items()],
        tables=[table for table in (answers, *tables(report)) if table is not None and table.rows],
    )

"""Tables of a report (failed rows, labels, latencies, the slowest rows), and the whole report as text for a person.

``facts`` has the parts shared with the headline numbers, and ``html`` lays the tables out on a page.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.core.errors import RowErrorCode
from batchgen.core.units import labelled, printable, shortened
from batchgen.report.accuracy import SHOWN_LABELS
from batchgen.report.facts import Report, Table, details, joined, outcome, workers

_ID_WIDTH = 40
_LABEL_WIDTH = 24
_WIDTH = 80


def tables(report: Report) -> Iterator[Table]:
    """All that is shown in addition to the headline numbers."""
    matrix = confusions(report)
    yield from (details(report), failures(report), labels(report), matrix if matrix.rows else mistakes(report))
    yield from (workers(report), latencies(report), slowest(report))


def failures(report: Report) -> Table:
    """Failed rows by code, most frequent first."""
    errors = sorted(report["errors"].items(), key=lambda item: -item[1])
    shares = [(code, f"{count:,}", f"{count / report['rows']['total']:.2%}") for code, count in errors]
    rows = [(code, *share, RowErrorCode(code).remedy) for code, *share in shares]
    return Table("Failed rows", ("code", "rows", "share", "what to do"), rows)


def labels(report: Report) -> Table:
    """For each of the most frequent labels: rows whose right answer it is, rows that found it, precision, recall."""
    accuracy = report.get("accuracy") or {}
    labels = accuracy.get("labels", ())[:SHOWN_LABELS]
    rows = [
        (
            _label(each["label"]),
            *(f"{each[name]:,}" for name in ("expected", "found", "correct")),
            *("-" if each[name] is None else f"{each[name]:.1%}" for name in ("precision", "recall")),
        )
        for each in labels
    ]
    total = accuracy.get("num_labels", 0)
    title = "Labels" if len(rows) == total else f"Labels: {len(rows)} of {total:,}"
    return Table(title, ("label", "expected", "found", "right", "precision", "recall"), rows)


def confusions(report: Report) -> Table:
    """Rows by expected label (down) and found label (across); empty if there are too many labels."""
    accuracy = report.get("accuracy") or {}
    names = [each["label"] for each in accuracy.get("labels", ())]
    if accuracy.get("num_labels", 0) > SHOWN_LABELS:
        return Table("", (), ())
    counts = {(each["label"], each["label"]): each["correct"] for each in accuracy.get("labels", ())}
    counts |= {(each["expected"], each["found"]): each["rows"] for each in accuracy.get("confusions", ())}
    rows = [(_label(name), *(f"{counts.get((name, other), 0):,}" for other in names)) for name in names]
    return Table("Labels expected (down) and found (across)", ("", *map(_label, names)), rows)


def mistakes(report: Report) -> Table:
    """The labels that were most often taken for others."""
    confusions = (report.get("accuracy") or {}).get("confusions", ())[:SHOWN_LABELS]
    rows = [(_label(each["expected"]), _label(each["found"]), f"{each['rows']:,}") for each in confusions]
    return Table("Labels taken for others, the most frequent", ("expected", "found", "rows"), rows)


def _label(name: str) -> str:
    return shortened(name, _LABEL_WIDTH) or "(none)"


def latencies(report: Report) -> Table:
    """Percentiles of the timings of computed rows."""
    rows = [
        (name.removesuffix("_s"), *(f"{value:,.3f}" for value in percentiles.values()))
        for name, percentiles in report["latency_s"].items()
        if None not in percentiles.values()
    ]
    return Table("Latency of a row, seconds", ("", "p50", "p90", "p99"), rows)


def slowest(report: Report) -> Table:
    """The rows that took longest."""
    head = ("id", "in", "out", "queue s", "prefill s", "decode s", "total s", "preempted")
    keys = ("prompt_tokens", "completion_tokens", "queue_s", "prefill_s", "decode_s", "total_s", "preemptions")
    rows = [
        (shortened(str(row["id"]), _ID_WIDTH), *(format(row[key], ",.2f" if key[-2:] == "_s" else ",") for key in keys))
        for row in report["slowest"]
    ]
    return Table("Slowest rows", head, rows)


def render_report(report: Report) -> str:
    """The whole text; ``report`` is the content of ``report.json``."""
    advice = [("" if number else "advice", text) for number, text in enumerate(report["advice"])]
    facts = [(label, text) for label, text in details(report).rows]
    lines = [*labelled([*joined(outcome(report)).items(), *advice, *facts])]
    matrix = confusions(report)
    is_shown = matrix.rows and sum(_widths(matrix)) + 2 * len(matrix.head) - 2 <= _WIDTH
    for table in (labels(report), matrix if is_shown else mistakes(report)):
        if table.rows:
            lines += ["", printable(table.title), *_grid(table)]
    table = latencies(report)
    if table.rows:
        rows = (("seconds", *table.head[1:]), *table.rows)
        lines += ["", *(f"{name:<12} " + " ".join(f"{cell:>9}" for cell in cells) for name, *cells in rows)]
    return "\n".join(lines)


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]


def _grid(table: Table) -> Iterator[str]:
    """Lines in columns: the first column aligned left, the others right."""
    first, *others = _widths(table)
    for name, *cells in (table.head, *table.rows):
        aligned = (f"{printable(cell):>{width}}" for cell, width in zip(cells, others, strict=True))
        yield "  ".join([f"{printable(name):<{first}}", *aligned]).rstrip()

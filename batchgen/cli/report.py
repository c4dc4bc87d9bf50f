"""The ``report`` command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.console import say, say_next, show
from batchgen.cli.options import AMOUNT, PATH, POINTS, SHARE, json_option
from batchgen.core.errors import ExitCode, StorageError, UsageError
from batchgen.core.units import printable

if TYPE_CHECKING:
    from batchgen.output.rundir import RunDir
    from batchgen.report.compare import Gates
    from batchgen.report.facts import Table

_SPEED_HELP = "With --compare: exit 4 if tokens/s while generating fall by more, such as 5%."
_ACCURACY_HELP = "With --compare: exit 4 if exact match falls by more points, such as 1."


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@json_option("Print report.json, or with --compare the figures of both.")
@click.option("--html", type=PATH, help="Write a page with charts to FILE.")
@click.option("--price-per-hour", type=AMOUNT, help="Show the cost at this price of a machine or worker.")
@click.option("--compare", metavar="OTHER", type=PATH, help="Run directory, or its report.json.")
@click.option("--max-regress-speed", type=SHARE, help=_SPEED_HELP)
@click.option("--max-regress-accuracy", type=POINTS, help=_ACCURACY_HELP)
def report(
    folder: Path,
    as_json: bool,
    html: Path | None,
    price_per_hour: float | None,
    compare: Path | None,
    max_regress_speed: float | None,
    max_regress_accuracy: float | None,
) -> int:
    """Show how a finished run went: time, throughput, failures.

    With --compare the figures of OTHER appear next to it and, if it is a folder, which answers changed. A gate is
    checked only if it is given; with either gate, a larger share of failed rows is a regression too. A gate that cannot
    be judged, such as accuracy over other rows, is an error (exit 2). --html writes one file that loads nothing else,
    with the comparison if there is one; its charts need matplotlib.

    \b
    Examples:
      batchgen report runs/questions
      batchgen report runs/questions --json | jq .tokens_per_s
      batchgen report runs/questions --html report.html
      batchgen report runs/questions --price-per-hour 2.10
      batchgen report runs/new --compare runs/last --max-regress-speed 5%
      batchgen report runs/new --compare runs/last --max-regress-accuracy 1
    """
    from batchgen.output.rundir import RunDir
    from batchgen.report.compare import NO_GATES, Gates
    from batchgen.run.reports import read_report

    gates = Gates(max_regress_speed, max_regress_accuracy)
    if compare is None and gates != NO_GATES:
        raise UsageError("--max-regress-speed and --max-regress-accuracy need --compare OTHER")
    if compare is not None and price_per_hour is not None:
        raise UsageError("--compare shows no cost: leave out --price-per-hour")
    run_dir = RunDir(folder)
    content = read_report(run_dir)
    with suppress(UsageError):  # job.json may be unreadable although the report is readable
        if run_dir.is_complete() and run_dir.unfinished():
            say(f"{folder} has an unfinished job; this report describes the previous one")
    if compare is None:
        _show(run_dir, content, price_per_hour, html, as_json=as_json)
    else:
        _compare(run_dir, content, compare, gates, html, as_json=as_json)
    return ExitCode.OK


def _show(run_dir: RunDir, content: dict[str, Any], price: float | None, html: Path | None, *, as_json: bool) -> None:
    """Show a report, with the cost at a price per hour."""
    from batchgen.report.tables import render_report
    from batchgen.report.usage import cost_of

    if price is not None:
        content["cost"] = cost_of(content, price)
    if html is not None:
        _write_page(run_dir, content, html, ())
    if as_json:
        show(json.dumps(content, indent=2))
    elif html is None:
        show(render_report(content))
        say_next("cat", run_dir.path)


def _compare(
    run_dir: RunDir, content: dict[str, Any], other: Path, gates: Gates, html: Path | None, *, as_json: bool
) -> None:
    """Show a report next to the report of another run, and judge the difference. Raises GateFailed, UsageError."""
    from batchgen.output.rundir import RunDir
    from batchgen.report.build import read_report_file
    from batchgen.report.compare import check_gates, compare_reports, comparison_tables, render_comparison
    from batchgen.run.reports import changed_rows, compared_answers, read_report

    before = read_report_file(other) if other.is_file() else read_report(RunDir(other))
    answers = None
    if not other.is_file():
        try:
            answers = compared_answers(run_dir, RunDir(other))
        except (StorageError, UsageError) as error:
            say(f"answers are not compared: {error}")
    comparison = compare_reports(content, before, gates, answers)
    if html is not None:
        tables = [*comparison_tables(comparison, f"Compared with {printable(str(other))}")]
        tables += [changed_rows(run_dir, RunDir(other), answers["changed"])] if answers else []
        _write_page(run_dir, content, html, tables)
    if as_json or html is None:
        show(json.dumps(comparison, indent=2) if as_json else render_comparison(comparison))
    check_gates(comparison)


def _write_page(run_dir: RunDir, content: dict[str, Any], path: Path, tables: Sequence[Table]) -> None:
    """Write the page of a run, with ``tables`` before the report's tables."""
    from batchgen.report.html import write_html
    from batchgen.run.reports import shown_rows

    rows = [*tables]
    try:
        rows += shown_rows(run_dir, content)
    except (StorageError, UsageError) as error:
        say(f"the page shows no rows: {error}")
    except (KeyError, TypeError) as error:
        say(f"the page shows no rows: a file of {run_dir.path} is not as it was written ({error!r}); was it edited?")
    if missing := write_html(content, path, str(run_dir.path.absolute()), rows):
        say(missing)

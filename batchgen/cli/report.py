"""The ``report`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from batchgen.cli.options import PATH, SHARE, json_option
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@json_option("The content of report.json: --format json.")
@click.option("--format", "form", type=click.Choice(["text", "json", "prometheus"]), default="text", help="[text]")
@click.option("--html", type=PATH, help="Write a page with charts to FILE.")
@click.option("--compare", metavar="OTHER", type=PATH, help="Run directory, or its report.json.")
@click.option("--max-regress", type=SHARE, help="With --compare: exit 4 on a regression, such as 5%.")
def report(
    folder: Path, as_json: bool, form: str, html: Path | None, compare: Path | None, max_regress: float | None
) -> int:
    """Show how a finished run went: time, speed, failures.

    With --compare the figures of OTHER appear beside it. A regression is a fall of tokens/s or exact match by more
    than --max-regress of OTHER's, or a larger share of failed rows. --html writes one file that loads nothing else
    (needs the extra batchgen[report]).

    \b
    Examples:
      batchgen report runs/questions
      batchgen report runs/questions --json | jq .tokens_per_s
      batchgen report runs/questions --html report.html
      batchgen report runs/questions --format prometheus
      batchgen report runs/new --compare runs/last --max-regress 5%
    """
    from batchgen.output.rundir import RunDir
    from batchgen.report.build import read_report_file
    from batchgen.run.reports import read_report

    form = "json" if as_json else form
    if compare is not None and (html is not None or form == "prometheus"):
        raise click.UsageError("--compare gives text or --json, not a page or metrics", click.get_current_context())
    found = read_report(RunDir(folder))
    if compare is not None:
        before = read_report_file(compare) if compare.is_file() else read_report(RunDir(compare))
        return _compare(found, before, max_regress, form == "json")
    if max_regress is not None:
        raise click.UsageError("--max-regress needs --compare OTHER", click.get_current_context())
    if html is not None:
        from batchgen.report.html import write_html

        write_html(found, html)
        return ExitCode.OK
    show(_render(found, folder, form).removesuffix("\n"))
    return ExitCode.OK


def _render(found: dict[str, Any], folder: Path, form: str) -> str:
    if form == "json":
        return json.dumps(found, indent=2)
    if form == "prometheus":
        from batchgen.report.prometheus import render_metrics

        return render_metrics(str(folder), found["model"], found)
    from batchgen.report.text import render_report

    return render_report(found)


def _compare(now: dict[str, Any], before: dict[str, Any], limit: float | None, as_json: bool) -> int:
    from batchgen.report.compare import compare_reports

    comparison = compare_reports(now, before)
    show(json.dumps(comparison.to_dict(limit), indent=2) if as_json else comparison.render(limit))
    if limit is not None:
        comparison.check(limit)
    return ExitCode.OK

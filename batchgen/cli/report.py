"""The ``report`` command: read, compare, render, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from batchgen.cli.options import LocalPath
from batchgen.cli.say import show
from batchgen.core.errors import ExitCode
from batchgen.core.units import parse_share


@click.command()
@click.argument("folder", metavar="DIR", type=LocalPath())
@click.option("--json", "as_json", is_flag=True, help="The content of report.json: --format json.")
@click.option("--format", "form", type=click.Choice(["text", "json", "prometheus"]), default="text", help="[text]")
@click.option("--html", metavar="FILE", type=LocalPath(), help="Write a page with pictures to FILE.")
@click.option("--compare", metavar="OTHER", type=LocalPath(), help="Run directory, or its report.json.")
@click.option("--max-regress", metavar="SHARE", help="With --compare: exit 4 on a regression, such as 5%.")
def report(
    folder: Path, as_json: bool, form: str, html: Path | None, compare: Path | None, max_regress: str | None
) -> int:
    """Show how long a finished run took, how fast, and what failed.

    With --compare the figures of OTHER stand beside it. A regression is a fall of tokens/s or exact match by more
    than --max-regress of what OTHER had, or a larger share of failed rows. The page that --html writes is one file
    that loads nothing (needs the extra batchgen[report]).

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

    limit = _share(max_regress)
    form = "json" if as_json else form
    if compare is not None and (html is not None or form == "prometheus"):
        raise click.UsageError("--compare gives text or --json, no page and no metrics", click.get_current_context())
    found = read_report(RunDir(folder))
    if compare is not None:
        before = read_report_file(compare) if compare.is_file() else read_report(RunDir(compare))
        return _compare(found, before, limit, form == "json")
    if limit is not None:
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


def _share(text: str | None) -> float | None:
    try:
        return None if text is None else parse_share(text)
    except ValueError as error:
        raise click.UsageError(f"--max-regress {text}: {error}", click.get_current_context()) from None
